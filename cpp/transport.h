// One way to a node: the verbs of the data's way, whatever lies between caller and blocks.
//
//   put: reserve → write → commit | abort          get: lookup → read → release
//
// Threads: any. Calls block for the copy, and put for room up to its deadline; nothing here needs
//   the interpreter.
// Owns: a session at the node. end() ends it once the calls under way have returned.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "loans.h"
#include "memory.h"
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
  // What was not done was cancelled, whatever it was waiting for.
  void cancel_rest() {
    std::ranges::replace(statuses, Status::kOutOfSpace, Status::kCancelled);
    message.clear();
  }
};

struct GetOutcome {
  std::vector<Status> statuses;
  std::vector<uint64_t> bytes;
  // Item whose memory is smaller than its block, and the block's length: then nothing was read at
  // all.
  std::optional<std::pair<size_t, uint64_t>> too_small;
  bool revoked = false;  // a read whose lease no longer held: not a word on who can be asked
};

enum class KeyOperation : uint8_t { kRemove, kTouch, kPin, kUnpin };

// What an operator sees of a node: names as in Python's `Usage`.
struct UsageReport {
  std::vector<std::pair<std::string, uint64_t>> counts;
  std::string pages;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual const char* name() const = 0;
  virtual bool local() const = 0;  // no other process is asked: a call without a copy is short
  virtual uint32_t version() = 0;  // newest of the namespace that is known here
  virtual uint64_t pool_bytes() = 0;
  virtual uint64_t view_bytes_max() = 0;
  virtual Loans& loans() = 0;

  // ---- put
  // A version of 0 is the current one, which a node elsewhere knows best.
  // REQUIRES (all calls): keys.size() <= kBatchBlocksMax; blocks.size() == keys.size() - skip.
  virtual PutOutcome put(const PutRequest& request, const std::vector<BlockMemory>& blocks,
                         const CallLimits& limits) = 0;
  virtual std::shared_ptr<GrantBatch> reserve(const PutRequest& request,
                                              const CallLimits& limits) = 0;
  // For items that found no room: waits for some, up to the deadline. True if waiting longer might
  // help.
  virtual bool reserve_more(GrantBatch& grants, bool chain, const CallLimits& limits) = 0;
  // Writes the range of every granted item; kOk, or why not all of it was. Whole parts only.
  virtual Status write(GrantBatch& grants, const std::vector<BlockMemory>& blocks, ByteRange range,
                       const CallLimits& limits) = 0;
  // Commits the granted items before `end`, gives up the others with `otherwise`.
  virtual PutOutcome commit(GrantBatch& grants, size_t end, Status otherwise) = 0;

  // ---- get
  virtual GetOutcome get(std::span<const BlockKey> keys, const std::vector<BlockMemory>& blocks,
                         const CallLimits& limits) = 0;
  // Blocks of the leading run after `skip`, none of them touched. `ranks` > 1: the shortest over
  // the sibling shards.
  virtual size_t match(std::span<const BlockKey> keys, size_t skip, uint16_t ranks) = 0;
  virtual std::vector<bool> exists(std::span<const BlockKey> keys) = 0;
  virtual std::shared_ptr<LeaseBatch> lookup(std::span<const BlockKey> keys, size_t skip,
                                             bool run) = 0;
  // Fills items [first, first + blocks.size()).
  virtual GetOutcome read(LeaseBatch& leases, size_t first, const std::vector<BlockMemory>& blocks,
                          ByteRange range, const CallLimits& limits) = 0;
  virtual Released release(LeaseBatch& leases) = 0;
  // The leases become views; false if too much is held by views already, or the leases have ended.
  virtual bool make_view(LeaseBatch& leases) = 0;
  virtual std::vector<std::span<uint8_t>> view(const LeaseBatch& leases, size_t item) = 0;
  // Checks the bytes of every leased block against its checksums; the statuses say which are bad.
  virtual std::vector<Status> verify(LeaseBatch& leases) = 0;
  virtual AttemptId ticket(LeaseBatch& leases) = 0;
  virtual std::shared_ptr<LeaseBatch> redeem(const AttemptId& ticket) = 0;

  // ---- the rest
  virtual size_t apply(KeyOperation operation,
                       std::span<const BlockKey> keys) = 0;  // how many held
  virtual uint32_t clear() = 0;
  virtual std::vector<Listed> list() = 0;
  virtual UsageReport usage() = 0;
  virtual std::string audit() = 0;
  virtual bool settle(Nanos deadline) = 0;
  virtual std::vector<BlockKey> take_evicted() = 0;

  virtual void wake() = 0;  // calls that wait look at `cancelled` again
  virtual void end() = 0;
};

}  // namespace kvstore
