// The node's bytes come and go through sockets, straight between slots and the caller's memory.
//
// put: up to 64 KiB one message; above that reserve, then what was granted, with the commit behind
//   it. get: one message and its answer. Large batches take several connections.
#pragma once

#include <memory>
#include <vector>

#include "transport_remote.h"

namespace kvstore {

class TcpStore final : public RemoteStore {
 public:
  using RemoteStore::RemoteStore;
  const char* name() const override { return "tcp"; }

  Status write(GrantBatch& grants, const std::vector<BlockMemory>& blocks, ByteRange range,
               const CallLimits& limits) override;
  GetOutcome get(std::span<const BlockKey> keys, const std::vector<BlockMemory>& blocks,
                 const CallLimits& limits) override;
  GetOutcome read(LeaseBatch& leases, size_t first, const std::vector<BlockMemory>& blocks,
                  ByteRange range, const CallLimits& limits) override;

 private:
  using TooSmall = std::optional<std::pair<size_t, uint64_t>>;
  bool puts_inline(uint64_t bytes) const override { return bytes <= wire::kInlineBytesMax; }
  PutOutcome write_and_commit(GrantBatch& grants, const std::vector<BlockMemory>& blocks,
                              const CallLimits& limits) override;
  Io send_items(Link& link, GrantBatch& grants, std::span<const uint32_t> items,
                const std::vector<BlockMemory>& blocks, ByteRange range, const Patience& patience);
  // Asks for blocks [first, first + count) of the caller's, by `message`, and fills their memory.
  template <class Message>
  void fetch(const Message& message, size_t first, size_t count,
             const std::vector<BlockMemory>& blocks, ByteRange range, const Patience& patience,
             GetOutcome* outcome, TooSmall* too_small);
  template <class Work>
  GetOutcome in_lanes(const std::vector<BlockMemory>& blocks, Work&& work);
  // How many connections share so much work, each of at least a few MiB.
  size_t num_lanes(uint64_t bytes, size_t items) const;
};

}  // namespace kvstore
