// Room in the pool: which blocks go, and how frames move between sizes (blocks.h, "room"); and the
// table's audit.
#include <algorithm>

#include "blocks.h"
#include "crc32c.h"
#include "stripe.h"

namespace kvstore {
namespace {

// A frame is taken from another size only if that size's oldest block has been unused for this many
// times as long as our own oldest: else two sizes would tear frames from each other all the time.
constexpr uint64_t kStealAgeRatio = 2;

// Default reserve per size: this much memory in slots, between the bounds, and never more than a
// share of what the size holds (a reserve costs hit ratio, so it is an absolute amount and a small
// one).
constexpr uint64_t kReserveBytes = uint64_t{64} << 20;
constexpr uint64_t kReserveSlotsMax = 256;
constexpr uint64_t kReserveShare = 16;

}  // namespace

std::optional<Pool::Taken> Blocks::take_slot(uint64_t length, Stamp stamp_limit) {
  const Shape shape = shape_of(length);
  while (true) {
    const auto taken = pool_.take(length);
    if (taken) return taken;
    if (!evict_for(shape, stamp_limit)) return std::nullopt;
  }
}

// Evicts something that helps a block of this shape. False: all that could help is held or too
// young.
bool Blocks::evict_for(const Shape& shape, Stamp stamp_limit) {
  if (growing() || num_evictable() == 0) return false;
  const SizeClass own = shape.size_class();
  const Stamp own_oldest = oldest(own).first;
  SizeClass other = own;
  Stamp other_oldest = kNoStamp;
  for (SizeClass size_class = 0; size_class <= kLargeClass; ++size_class) {
    if (size_class == own || live_[size_class].load(std::memory_order_relaxed) == 0) continue;
    const Stamp stamp = oldest(size_class).first;
    if (stamp < other_oldest) {
      other_oldest = stamp;
      other = size_class;
    }
  }
  const uint64_t now = batch_.load(std::memory_order_relaxed);
  const auto age = [&](Stamp stamp) { return now - std::min(now, stamp >> kDepthBits); };
  const bool steal =
      other_oldest != kNoStamp &&
      (own_oldest == kNoStamp || age(other_oldest) > kStealAgeRatio * age(own_oldest));
  if (steal && evict_beside(other, stamp_limit)) return true;
  if (evict_one(own, stamp_limit)) return true;
  if (!steal && other_oldest != kNoStamp && evict_beside(other, stamp_limit)) return true;
  // The oldest stand in frames with something held: any frame that can go whole will do.
  for (uint32_t frame = 0; frame < pool_.num_frames(); ++frame) {
    if (evict_frame(frame, stamp_limit)) return true;
  }
  return false;
}

std::pair<Stamp, uint32_t> Blocks::oldest(SizeClass size_class) const {
  std::pair<Stamp, uint32_t> best{kNoStamp, 0};
  for (uint32_t number = 0; number < kStripes; ++number) {
    const Stamp stamp = oldest_[size_class][number].load(std::memory_order_relaxed);
    if (stamp < best.first) best = {stamp, number};
  }
  return best;
}

// The oldest idle block of a class goes.
bool Blocks::evict_one(SizeClass size_class, Stamp stamp_limit) {
  while (true) {
    const auto [stamp, number] = oldest(size_class);
    if (stamp >= stamp_limit) return false;
    Stripe& stripe = stripes_[number];
    const std::lock_guard lock(stripe.mutex);
    // Decided under the lock, at the moment of freeing: it may have been used or held since.
    const auto victim = stripe.policy->victim(size_class);
    if (!victim || stripe.policy->oldest(size_class) != stamp) continue;
    if (stripe.entry(*victim).busy()) {
      stripe.entry(*victim).flags |= Entry::kParked;
      stripe.policy->erase(*victim, size_class);
      publish(stripe, size_class);
      continue;
    }
    drop(stripe, *victim, Reason::kEvicted);
    return true;
  }
}

// The oldest block of another class goes, with all that shares its frame.
bool Blocks::evict_beside(SizeClass size_class, Stamp stamp_limit) {
  const auto [stamp, number] = oldest(size_class);
  if (stamp >= stamp_limit) return false;
  SlotId slot = kNoSlot;
  {
    Stripe& stripe = stripes_[number];
    const std::lock_guard lock(stripe.mutex);
    const auto victim = stripe.policy->victim(size_class);
    if (!victim || stripe.entry(*victim).busy()) return false;
    slot = stripe.entry(*victim).slot;
  }
  const std::vector<uint32_t> frames = pool_.frames_of(slot);
  return !frames.empty() && evict_frame(frames.front(), stamp_limit);
}

// All blocks in a frame go, or none: true if the frame holds nothing afterwards that this call
// found there.
bool Blocks::evict_frame(uint32_t frame, Stamp stamp_limit) {
  if (held_in_[frame].load(std::memory_order_relaxed) > 0) return false;
  const Pool::FrameTenants tenants = pool_.tenants(frame);
  if (!tenants.in_use) return false;
  for (const auto& [slot, ref] : tenants.tenants) {
    if (ref == kNoEntry || !evictable(ref, slot, stamp_limit)) return false;
  }
  bool all = true;
  for (const auto& [slot, ref] : tenants.tenants) all &= evict_ref(ref, slot, stamp_limit);
  return all;
}

bool Blocks::evictable(EntryRef ref, SlotId slot, Stamp stamp_limit) {
  Stripe& stripe = stripes_[ref >> kEntryBits];
  const std::lock_guard lock(stripe.mutex);
  const uint32_t id = ref & kEntryMask;
  const Entry& entry = stripe.entry(id);
  return entry.live() && entry.slot == slot && !entry.busy() &&
         stripe.policy->stamp_of(id) < stamp_limit;
}

bool Blocks::evict_ref(EntryRef ref, SlotId slot, Stamp stamp_limit) {
  Stripe& stripe = stripes_[ref >> kEntryBits];
  const std::lock_guard lock(stripe.mutex);
  const uint32_t id = ref & kEntryMask;
  const Entry& entry = stripe.entry(id);
  if (!entry.live() || entry.slot != slot || entry.busy() ||
      stripe.policy->stamp_of(id) >= stamp_limit)
    return false;
  drop(stripe, id, Reason::kEvicted);
  return true;
}

// ---- the reserve -------------------------------------------------------------------------------

std::vector<Shape> Blocks::shapes_in_use() const {
  std::vector<Shape> shapes;
  for (SizeClass size_class = 0; size_class < kNumClasses; ++size_class) {
    if (live_[size_class].load(std::memory_order_relaxed) > 0) shapes.push_back({0, size_class});
  }
  const std::lock_guard lock(shapes_mutex_);
  for (const auto& [shape, count] : large_shapes_) shapes.push_back(shape);
  return shapes;
}

uint64_t Blocks::reserve_for(const Shape& shape) const {
  if (options_.reserve_blocks > 0) return options_.reserve_blocks;
  int64_t live = live_[shape.size_class()].load(std::memory_order_relaxed);
  if (shape.frames > 0) {
    const std::lock_guard lock(shapes_mutex_);
    const auto at = large_shapes_.find(shape);
    live = at == large_shapes_.end() ? 0 : at->second;
  }
  const uint64_t share = static_cast<uint64_t>(std::max<int64_t>(0, live)) / kReserveShare;
  return std::min(
      {kReserveBytes / std::min(kReserveBytes, shape_bytes(shape)) + 1, kReserveSlotsMax, share});
}

bool Blocks::reserve_full(const Shape& shape) const {
  const uint64_t reserve = reserve_for(shape);
  return reserve == 0 || pool_.free_slots(shape, reserve) >= reserve;
}

bool Blocks::refill_reserves() {
  if (growing()) return true;
  bool all = true;
  for (const Shape& shape : shapes_in_use()) {
    bool found = true;
    while (found && !reserve_full(shape)) found = evict_one(shape.size_class(), kNoStamp);
    all &= found;  // a size whose blocks are all held does not starve the others
  }
  return all;
}

// ---- audit -------------------------------------------------------------------------------------

struct Blocks::Census {
  std::vector<std::pair<int64_t, int64_t>> by_namespace;  // blocks, bytes
  uint64_t slots = 0;
  uint64_t leases = 0;
  uint64_t pinned = 0;
  int64_t evictable = 0;
  std::vector<uint32_t> held_in;  // by frame
};

std::string Blocks::audit_stripe(const Stripe& stripe, Census* census) const {
  const std::lock_guard lock(stripe.mutex);
  const std::string name = "stripe " + std::to_string(stripe.number);
  uint32_t indexed = 0;
  size_t ordered = 0;
  size_t vacant = 0;
  for (uint32_t id = 0; id < stripe.num_entries; ++id) {
    const Entry& entry = stripe.entry(id);
    if (!entry.has(Entry::kInUse)) {
      ++vacant;
      continue;
    }
    ++census->slots;
    census->leases += entry.num_leases;
    const SlotHeader& header = segment_.header(entry.slot);
    if (entry.busy() && entry.size_class != kLargeClass)
      ++census->held_in[header.offset / kFrameBytes];
    if (header.key != entry.key) return name + ": an entry's slot holds another key";
    if (crc32c(0, entry.parts().data(), entry.parts().size_bytes()) != header.content_id) {
      return name + ": a content id does not match its part table";
    }
    if (entry.has(Entry::kDoomed)) {
      if (entry.num_leases == 0) return name + ": a removed block without lease was kept";
      continue;
    }
    ++indexed;
    if (!entry.has(Entry::kParked)) ++ordered;
    if (!entry.busy()) ++census->evictable;
    if (!entry.busy() && entry.has(Entry::kParked))
      return name + ": an idle block is hidden from eviction";
    if (entry.num_pins > 0) ++census->pinned;
    census->by_namespace[entry.name_space()].first += 1;
    census->by_namespace[entry.name_space()].second += static_cast<int64_t>(header.length);
    const uint64_t hashed = hash(entry.key);
    if (&stripe_of(hashed) != &stripe ||
        stripe.find(hashed, [&](uint32_t other) { return other == id; }) < 0) {
      return name + ": an entry cannot be found by its key";
    }
  }
  if (indexed != stripe.num_indexed) return name + ": index and entries differ in number";
  if (vacant != stripe.vacant.size()) return name + ": vacant entries are miscounted";
  if (ordered != stripe.policy->size()) return name + ": policy and entries differ in number";
  return stripe.policy->audit();
}

std::string Blocks::audit(uint64_t grants, uint64_t leases) const {
  Census census;
  census.held_in.resize(segment_.num_frames());
  {
    const std::lock_guard lock(namespaces_mutex_);
    census.by_namespace.resize(namespaces_.size());
  }
  for (uint32_t number = 0; number < kStripes; ++number) {
    std::string problem = audit_stripe(stripes_[number], &census);
    if (!problem.empty()) return problem;
  }
  if (census.leases != num_leased()) return "leases are miscounted";
  if (census.leases != leases) return "table and sessions differ in leases";
  if (census.pinned != num_pinned()) return "pins are miscounted";
  if (census.evictable != num_evictable()) return "evictable blocks are miscounted";
  for (uint32_t frame = 0; frame < segment_.num_frames(); ++frame) {
    if (census.held_in[frame] != held_in_[frame].load())
      return "a frame's held blocks are miscounted";
  }
  const uint64_t taken = pool_.usage().slots;
  if (census.slots + grants != taken) {
    return "table and grants hold " + std::to_string(census.slots + grants) +
           " slots, the allocator gave " + std::to_string(taken);
  }
  {
    const std::lock_guard lock(namespaces_mutex_);
    for (size_t id = 0; id < namespaces_.size(); ++id) {
      if (namespaces_[id]->blocks.load() != census.by_namespace[id].first ||
          namespaces_[id]->bytes.load() != census.by_namespace[id].second) {
        return "a namespace's usage is miscounted";
      }
    }
  }
  return pool_.audit();
}

}  // namespace kvstore
