// The store inside one process: put, get and match as function calls.
//
//   put: reserve → write → commit | abort          get: lookup → read → release
//
// Threads: any. Calls block for the copy, and put for room up to its deadline; nothing here needs
//   the interpreter.
// Owns: a session at the node. close() ends it once the calls under way have returned.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "memory.h"
#include "node.h"
#include "session.h"
#include "status.h"
#include "types.h"

namespace kvstore {

// How one call ends early.
struct CallLimits {
  Nanos deadline = kNever;
  const std::atomic<bool>* cancelled = nullptr;
  bool waits = true;  // for room, up to the deadline
  // The deadline bounds the wait for room; what was granted by then is copied all the same.
  CallLimits for_copy() const { return {passed() ? kNever : deadline, cancelled, waits}; }
  bool passed() const { return deadline != kNever && monotonic_now() > deadline; }
  bool stopped() const {
    return cancelled != nullptr && cancelled->load(std::memory_order_relaxed);
  }
};

// Bytes [first, first + bytes) of each block: all of it, or some parts.
struct ByteRange {
  uint64_t first = 0;
  uint64_t bytes = UINT64_MAX;  // to the end of the block
};

struct PutOutcome {
  std::vector<Status> statuses;
  bool parent_held = true;
  bool stale = false;
  std::string message;
};

struct GetOutcome {
  std::vector<Status> statuses;
  std::vector<uint64_t> bytes;
  // Item whose memory is smaller than its block, and the block's length: then nothing was read at
  // all.
  std::optional<std::pair<size_t, uint64_t>> too_small;
};

class LocalStore {
 public:
  // Blocks are cut into parts of `part_bytes`, the last one shorter.
  LocalStore(std::shared_ptr<Node> node, const std::string& namespace_digest, uint64_t part_bytes);
  ~LocalStore();
  LocalStore(const LocalStore&) = delete;
  LocalStore& operator=(const LocalStore&) = delete;

  Node& node() { return *node_; }
  const std::shared_ptr<Node>& shared_node() const { return node_; }
  Session& session() { return *session_; }
  uint32_t version() const { return session_->space().version.load(); }

  // REQUIRES (all calls): keys.size() <= kBatchBlocksMax; blocks.size() == keys.size() - skip.
  PutOutcome put(const PutRequest& request, const std::vector<BlockMemory>& blocks,
                 const CallLimits& limits);
  GetOutcome get(std::span<const BlockKey> keys, const std::vector<BlockMemory>& blocks,
                 const CallLimits& limits);
  // Blocks of the leading run after `skip`, none of them touched. `ranks` > 1: the shortest over
  // the sibling shards.
  size_t match(std::span<const BlockKey> keys, size_t skip, uint16_t ranks) const;

  // The pieces of put, for a block written part by part.
  std::shared_ptr<GrantBatch> reserve(const PutRequest& request);
  // For items that found no room: waits for some, up to the deadline.
  void reserve_more(GrantBatch& grants, bool chain, const CallLimits& limits);
  // Writes the range of every granted item; kOk, kTimedOut or kCancelled. Whole parts only.
  Status write(GrantBatch& grants, const std::vector<BlockMemory>& blocks, ByteRange range,
               const CallLimits& limits);
  PutOutcome commit(GrantBatch& grants, size_t end, Status otherwise);

  // The pieces of get. read() fills items [first, first + blocks.size()).
  std::shared_ptr<LeaseBatch> lookup(std::span<const BlockKey> keys, size_t skip, bool run);
  GetOutcome read(LeaseBatch& leases, size_t first, const std::vector<BlockMemory>& blocks,
                  ByteRange range, const CallLimits& limits);
  Released release(LeaseBatch& leases);
  // Checks the bytes of every leased block against its checksums; the statuses say which are bad.
  std::vector<Status> verify(LeaseBatch& leases);

  size_t remove(std::span<const BlockKey> keys);
  size_t touch(std::span<const BlockKey> keys);
  size_t pin(std::span<const BlockKey> keys);
  size_t unpin(std::span<const BlockKey> keys);
  uint32_t clear();

 private:
  const std::shared_ptr<Node> node_;
  const std::shared_ptr<Session> session_;
};

}  // namespace kvstore
