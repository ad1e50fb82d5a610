// The core over a small real segment, without thread or clock: what node.h is in production.
// Random names come from a seed, so that a run can be replayed.
#pragma once

#include <doctest/doctest.h>

#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "blocks.h"
#include "crc32c.h"
#include "payload.h"
#include "pool.h"
#include "segment.h"
#include "session.h"

namespace kvstore {

// Its frames get memory when they are first written.
inline std::unique_ptr<Segment> make_segment(uint32_t frames) {
  std::string error;
  auto segment = Segment::create({frames * kFrameBytes, false}, &error);
  REQUIRE_MESSAGE(segment != nullptr, error);
  return segment;
}

struct Core {
  explicit Core(uint32_t frames, Blocks::Options options = {}, uint64_t seed = 1)
      : segment(make_segment(frames)),
        pool(*segment),
        blocks(*segment, pool, options),
        random(seed),
        space(*blocks.open_namespace("first")) {
    pool.add_frames(0, frames);
    limits.random = [this] { return random(); };
    limits.view_bytes_max = segment->bytes();
    limits.stuck_bytes_max = segment->bytes();
  }

  std::unique_ptr<Segment> segment;
  Pool pool;
  Blocks blocks;
  std::mt19937_64 random;
  SessionLimits limits;
  Namespace& space;
};

inline BlockKey key_of(uint32_t number) {
  BlockKey key;
  memcpy(key.bytes.data(), &number, sizeof number);
  key.bytes[kChainBytes + 3] = 1;  // world size
  return key;
}

inline uint32_t number_of(const BlockKey& key) {
  uint32_t number;
  memcpy(&number, key.bytes.data(), sizeof number);
  return number;
}

inline std::vector<BlockKey> keys_of(uint32_t first, uint32_t count) {
  std::vector<BlockKey> keys;
  for (uint32_t i = 0; i < count; ++i) keys.push_back(key_of(first + i));
  return keys;
}

// Bytes [first, first + bytes) of a slot's block, piece by piece in order.
template <class Visit>
void visit_slot(const Core& core, SlotId slot, uint64_t first, uint64_t bytes, Visit&& visit) {
  uint64_t start = 0;  // of the extent, in the block
  for (const Extent& extent : core.pool.extents(slot, first + bytes)) {
    const uint64_t begin = std::max(first, start);
    const uint64_t end = std::min(first + bytes, start + extent.bytes);
    if (begin < end) {
      visit(std::span(core.segment->data() + extent.offset + (begin - start), end - begin), begin);
    }
    start += extent.bytes;
  }
}

// Writes bytes [first, end) of what put `attempt` of `block` stores.
inline void write_slot(const Core& core, SlotId slot, uint32_t block, uint32_t attempt,
                       uint64_t first, uint64_t end) {
  visit_slot(core, slot, first, end - first, [&](std::span<uint8_t> piece, uint64_t at) {
    fill_payload(piece, block, attempt, at);
  });
}

inline std::vector<uint8_t> read_slot(const Core& core, SlotId slot, uint64_t length) {
  std::vector<uint8_t> bytes(length);
  visit_slot(core, slot, 0, length, [&](std::span<uint8_t> piece, uint64_t at) {
    std::ranges::copy(piece, bytes.begin() + static_cast<ptrdiff_t>(at));
  });
  return bytes;
}

inline std::vector<uint32_t> checksums(std::span<const uint8_t> bytes, uint64_t part_bytes) {
  std::vector<uint32_t> parts;
  for (size_t at = 0; at < bytes.size(); at += part_bytes) {
    parts.push_back(crc32c(0, bytes.data() + at, std::min<size_t>(part_bytes, bytes.size() - at)));
  }
  return parts;
}

// reserve → write → commit of one block, past any session. Depth is its place in the chain of
// `batch`.
inline Status put_block(Core& core, uint32_t block, uint64_t length, uint32_t attempt,
                        uint64_t batch, size_t depth = 0) {
  const Stamp stamp = make_stamp(batch, depth);
  Pool::Taken taken{};
  const Status status = core.blocks.reserve(key_of(block), core.space, core.space.version.load(),
                                            length, stamp, batch << kDepthBits, &taken);
  if (status != Status::kOk) return status;
  write_slot(core, taken.slot, block, attempt, 0, length);
  return core.blocks.commit({key_of(block),
                             &core.space,
                             core.space.version.load(),
                             taken.slot,
                             length,
                             stamp,
                             checksums(payload(block, attempt, length), kOpaquePartBytes),
                             {}});
}

inline Status put_block(Core& core, uint32_t block, uint64_t length, uint32_t attempt = 1) {
  return put_block(core, block, length, attempt, core.blocks.next_batch());
}

}  // namespace kvstore
