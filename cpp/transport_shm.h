// The node's memory is mapped here: the client copies by itself, or looks without a copy.
//
// put: reserve → copy with checksum into the granted slots → commit. get: lookup → copy and check →
//   has the slot moved meanwhile? → release, one way. A granted slot stays out of use until commit,
//   abort or this process's death; a lease that was revoked shows in the slot's generation.
#pragma once

#include <memory>
#include <vector>

#include "transport_remote.h"

namespace kvstore {

class ShmStore final : public RemoteStore {
 public:
  using RemoteStore::RemoteStore;
  const char* name() const override { return "shm"; }

  Status write(GrantBatch& grants, const std::vector<BlockMemory>& blocks, ByteRange range,
               const CallLimits& limits) override;
  GetOutcome get(std::span<const BlockKey> keys, const std::vector<BlockMemory>& blocks,
                 const CallLimits& limits) override;
  GetOutcome read(LeaseBatch& leases, size_t first, const std::vector<BlockMemory>& blocks,
                  ByteRange range, const CallLimits& limits) override;
  Released release(LeaseBatch& leases) override;
  bool make_view(LeaseBatch& leases) override;
  std::vector<std::span<uint8_t>> view(const LeaseBatch& leases, size_t item) override;

 private:
  // So few bytes go through the socket quicker than by two messages.
  bool puts_inline(uint64_t bytes) const override { return bytes <= uint64_t{16} << 10; }
};

}  // namespace kvstore
