// The owner looks at its own bytes (blocks.h): asked by a reader who complains or wants to be sure,
// and unasked in the background, so that memory that rots is found before somebody needs it.
#include <algorithm>
#include <vector>

#include "blocks.h"
#include "crc32c.h"
#include "stripe.h"

namespace kvstore {

// REQUIRES: `parts` does not change meanwhile. The bytes may: then the answer means nothing.
bool Blocks::bytes_match(SlotId slot, uint64_t length, uint64_t part_bytes,
                         std::span<const uint32_t> parts) const {
  size_t part = 0;
  uint64_t in_part = 0;
  uint32_t seen = 0;
  for (const Extent& extent : pool_.extents(slot, length)) {
    for (uint64_t at = 0; at < extent.bytes;) {
      const uint64_t piece = std::min(extent.bytes - at, part_bytes - in_part);
      seen = crc32c(seen, segment_.data() + extent.offset + at, piece);
      at += piece;
      in_part += piece;
      if (in_part < part_bytes) continue;
      if (part == parts.size() || parts[part] != seen) return false;
      ++part;
      in_part = 0;
      seen = 0;
    }
  }
  if (in_part == 0) return part == parts.size();
  return part + 1 == parts.size() && parts[part] == seen;
}

bool Blocks::check(EntryRef ref) {
  // The caller's lease keeps slot and part table in place, so the bytes are read without the lock.
  Stripe& stripe = stripes_[ref >> kEntryBits];
  const uint32_t id = ref & kEntryMask;
  const Entry& entry = stripe.entry(id);
  const uint64_t length = segment_.header(entry.slot).length;
  if (bytes_match(entry.slot, length, part_sizes_[entry.part_size()].load(), entry.parts()))
    return true;
  const std::lock_guard lock(stripe.mutex);
  if (entry.live()) drop(stripe, id, Reason::kCorrupt);
  return false;
}

void Blocks::scrub(uint64_t bytes_max, uint32_t blocks_max) {
  uint64_t bytes = 0;
  uint32_t looked_at = 0;
  for (uint32_t stripes = 0; stripes <= kStripes;) {
    Stripe& stripe = stripes_[scrub_stripe_];
    if (const auto length = scrub_entry(stripe, scrub_entry_)) {
      ++scrub_entry_;
      bytes += *length;
      if (bytes >= bytes_max || ++looked_at >= blocks_max) return;
    } else {
      scrub_stripe_ = (scrub_stripe_ + 1) % kStripes;
      scrub_entry_ = 0;
      ++stripes;
    }
  }
}

// The bytes looked at; nothing beyond the stripe's last entry.
std::optional<uint64_t> Blocks::scrub_entry(Stripe& stripe, uint32_t id) {
  SlotId slot = kNoSlot;
  uint64_t length = 0;
  uint64_t generation = 0;
  uint64_t part_bytes = 0;
  std::vector<uint32_t> parts;
  {
    const std::lock_guard lock(stripe.mutex);
    if (id >= stripe.num_entries) return std::nullopt;
    const Entry& entry = stripe.entry(id);
    if (!entry.live()) return 0;
    slot = entry.slot;
    length = segment_.header(slot).length;
    generation = segment_.header(slot).generation.load();
    part_bytes = part_sizes_[entry.part_size()].load();
    parts.assign(entry.parts().begin(), entry.parts().end());
  }
  // Without a lease: nobody waits for a scrub, and no eviction takes another block because of it.
  // The slot may be given away and filled anew meanwhile; then the generation has moved on, and
  // what was seen is forgotten.
  const bool good = bytes_match(slot, length, part_bytes, parts);
  const std::lock_guard lock(stripe.mutex);
  const Entry& entry = stripe.entry(id);
  if (!entry.live() || entry.slot != slot || segment_.header(slot).generation.load() != generation)
    return length;
  counters_.scrubbed.fetch_add(1, std::memory_order_relaxed);
  if (!good) drop(stripe, id, Reason::kCorrupt);
  return length;
}

}  // namespace kvstore
