// Copies between slots of a mapped segment and the caller's memory, by several threads, with one
// checksum a part in the same pass.
#pragma once

#include <cstdint>
#include <vector>

#include "copier.h"
#include "transport.h"

namespace kvstore {

// Writes the range of every granted item of `grants` (extents known) and notes the checksums of the
// parts; kOk, kTimedOut or kCancelled.
Status write_blocks(uint8_t* segment, Copier& copier, uint64_t part_bytes, GrantBatch& grants,
                    const std::vector<BlockMemory>& blocks, ByteRange range,
                    const CallLimits& limits);

// Reads the range of items [first, first + blocks.size()) and checks the parts. A failed item's
// memory is zeroed; kMiss where nothing is leased.
// REQUIRES: nothing under the lease moves meanwhile, or the caller finds out afterwards.
GetOutcome read_blocks(uint8_t* segment, Copier& copier, const LeaseBatch& leases, size_t first,
                       const std::vector<BlockMemory>& blocks, ByteRange range,
                       const CallLimits& limits);

// kCancelled or kTimedOut if the call is over, else kOk.
Status early_end(const CallLimits& limits);

}  // namespace kvstore
