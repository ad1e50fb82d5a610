// The node is another process: what its two ways, tcp and shm, have in common.
//
// Every call but put, get, write and read is one message and its answer, here; how bytes move is
// the ways' own (transport_tcp, transport_shm). Calls without limits of their own wait as long as
// RemoteOptions::timeout; those whose result has no room for "could not ask" throw system_error.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "copier.h"
#include "remote.h"
#include "transport.h"

namespace kvstore {

// What a node has granted or leased over a wire, and in which of its lives.
struct RemoteGrants : GrantBatch {
  uint64_t incarnation = 0;
};
struct RemoteLeases : LeaseBatch {
  uint64_t incarnation = 0;
  std::vector<std::vector<uint32_t>> parts;  // what the items' `parts` point to
  std::shared_ptr<Mapping> mapping;          // shm: where the blocks are
  bool looked_at = false;                    // without a copy
};

class RemoteStore : public Transport {
 public:
  RemoteStore(std::shared_ptr<Remote> remote, unsigned copy_threads);
  ~RemoteStore() override;

  bool local() const override { return false; }
  uint32_t version() override { return remote_->version(); }
  uint64_t pool_bytes() override { return remote_->pool_bytes(); }
  uint64_t view_bytes_max() override { return remote_->view_bytes_max(); }
  Loans& loans() override { return loans_; }

  PutOutcome put(const PutRequest& request, const std::vector<BlockMemory>& blocks,
                 const CallLimits& limits) override;
  std::shared_ptr<GrantBatch> reserve(const PutRequest& request, const CallLimits& limits) override;
  bool reserve_more(GrantBatch& grants, bool chain, const CallLimits& limits) override;
  PutOutcome commit(GrantBatch& grants, size_t end, Status otherwise) override;

  size_t match(std::span<const BlockKey> keys, size_t skip, uint16_t ranks) override;
  std::vector<bool> exists(std::span<const BlockKey> keys) override;
  std::shared_ptr<LeaseBatch> lookup(std::span<const BlockKey> keys, size_t skip,
                                     bool run) override;
  Released release(LeaseBatch& leases) override;
  bool make_view(LeaseBatch&) override { return false; }
  std::vector<std::span<uint8_t>> view(const LeaseBatch&, size_t) override { return {}; }
  std::vector<Status> verify(LeaseBatch& leases) override;
  AttemptId ticket(LeaseBatch& leases) override;
  std::shared_ptr<LeaseBatch> redeem(const AttemptId& ticket) override;

  size_t apply(KeyOperation operation, std::span<const BlockKey> keys) override;
  uint32_t clear() override;
  std::vector<Listed> list() override;
  UsageReport usage() override;
  std::string audit() override;
  bool settle(Nanos deadline) override;
  std::vector<BlockKey> take_evicted() override { return {}; }

  void wake() override {}  // waits look at `cancelled` every few milliseconds
  void end() override;

 protected:
  // Throws system_error where the node cannot be asked.
  template <class Answer, class Message>
  Answer asked(const Message& message, bool again, uint64_t* incarnation = nullptr,
               Nanos at_least = 0) {
    Answer answer;
    Patience patience = remote_->patience();
    patience.deadline = std::max(patience.deadline, monotonic_now() + at_least);
    const Io io = remote_->ask(message, &answer, patience, again, incarnation);
    if (io != Io::kDone) fail(io);
    return answer;
  }
  static constexpr Nanos kLong = 10'000 * kMillisecond;  // for what walks through the whole table
  [[noreturn]] void fail(Io io) const;
  // A call told not to wait, or whose time is over, still moves what it was granted; not for ever.
  Patience patience_of(const CallLimits& limits) const;
  virtual bool puts_inline(uint64_t bytes) const = 0;
  PutOutcome put_inline(const PutRequest& request, const std::vector<BlockMemory>& blocks,
                        const CallLimits& limits);
  virtual PutOutcome write_and_commit(GrantBatch& grants, const std::vector<BlockMemory>& blocks,
                                      const CallLimits& limits);
  PutOutcome put_failed(size_t blocks, Status status) const;
  std::shared_ptr<RemoteLeases> lease(std::span<const BlockKey> keys, size_t skip, bool run,
                                      const Patience& patience, Io* failed, bool view = false);
  std::shared_ptr<RemoteLeases> leases_of(wire::Leased answer, uint64_t incarnation);
  void complain(const RemoteLeases& leases, size_t item);
  wire::Commit commit_message(const GrantBatch& grants, size_t end, Status otherwise) const;
  PutOutcome finish_put(GrantBatch& grants, size_t end, Io io, wire::PutDone done);
  void take_granted(GrantBatch& grants, wire::Granted granted) const;

  const std::shared_ptr<Remote> remote_;
  Copier copier_;
  Loans loans_;
  std::atomic<uint64_t> views_{0};  // view leases not released
  // Whether the last hits were looked at without a copy: then the next ask for that at once, and a
  // view costs one trip. Only shm has any.
  std::atomic<bool> views_likely_{false};
  std::atomic<bool> ended_{false};
};

Status status_of(Io io);
inline Patience patience_of(const CallLimits& limits) {
  return {limits.deadline, limits.cancelled};
}

// By the way that was agreed on with the node.
std::unique_ptr<Transport> make_remote_store(std::shared_ptr<Remote> remote, unsigned copy_threads);

}  // namespace kvstore
