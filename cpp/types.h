// Values and limits every layer shares. Nothing here owns memory or takes a lock.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvstore {

// ---- limits, gathered; the assertions relate them --------------------------------------------

inline constexpr size_t kFrameBytes = size_t{2} << 20;       // unit of memory between sizes
inline constexpr size_t kSlotAlign = 64;                     // a slot starts on a cache line
inline constexpr size_t kKeyBytes = 32;                      // BlockKey
inline constexpr size_t kChainBytes = 28;                    // chain hash inside a BlockKey
inline constexpr size_t kTextKeyBytesMax = 512;              // str or bytes given as a key
inline constexpr size_t kOpaquePartBytes = size_t{1} << 20;  // part of an opaque block
inline constexpr size_t kPartBytesMin = size_t{2} << 10;  // heads join until a part has this much
inline constexpr size_t kBatchBlocksMax = 65536;          // blocks in one call; depth fits 16 bits
inline constexpr size_t kStripes = 64;                    // lock-sized portions of the table
inline constexpr size_t kStripeEntriesMax = size_t{1} << 24;  // an entry id is 24 bits
inline constexpr uint64_t kBlockBytesMax = uint64_t{1} << 40;

static_assert((kStripes & (kStripes - 1)) == 0);
static_assert(kFrameBytes % kSlotAlign == 0);

// ---- values ----------------------------------------------------------------------------------

struct BlockKey {
  std::array<uint8_t, kKeyBytes> bytes{};
  bool operator==(const BlockKey& other) const {  // inline; std::array's calls memcmp
    uint64_t differ = 0;
    for (size_t at = 0; at < kKeyBytes; at += 8) {
      uint64_t mine, theirs;
      memcpy(&mine, bytes.data() + at, 8);
      memcpy(&theirs, other.bytes.data() + at, 8);
      differ |= mine ^ theirs;
    }
    return differ == 0;
  }
};
static_assert(sizeof(BlockKey) == kKeyBytes);

// How many keys ahead a batch fetches what it will read: index lines twice as far as entries. More
// does not help (the processor has some twenty such requests in flight), and a chain that is not
// held at all has fetched them for nothing.
inline constexpr size_t kPrefetchAhead = 10;

// Contiguous piece of a slot, relative to the segment's first byte.
struct Extent {
  uint64_t offset;
  uint64_t bytes;
};

// Random identity of one put of one block; commit and abort name it.
struct AttemptId {
  uint64_t high = 0;
  uint64_t low = 0;
  bool operator==(const AttemptId&) const = default;
};

// The core sees time only as a value: nanoseconds of a monotonic clock, or of a simulation.
using Nanos = int64_t;
inline constexpr Nanos kNever = INT64_MAX;
inline constexpr Nanos kMillisecond = 1'000'000;

inline Nanos monotonic_now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace kvstore
