#include "blocks.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "crc32c.h"
#include "stripe.h"

namespace kvstore {
namespace {

// A broken rule of this file: going on would free memory under a reader.
void require(bool holds, const char* rule) {
  if (holds) return;
  fprintf(stderr, "kvstore: table invariant broken: %s\n", rule);
  abort();
}

uint64_t load_word(const BlockKey& key, size_t word) {
  uint64_t value;
  memcpy(&value, key.bytes.data() + word * 8, 8);
  return value;
}

}  // namespace

// ---- stripe ------------------------------------------------------------------------------------

uint8_t* Blocks::allocate(size_t bytes) {
  const size_t aligned = (bytes + 63) / 64 * 64;
  const std::lock_guard lock(slabs_mutex_);
  if (slabs_.empty() || slabs_.back()->bytes() - slab_used_ < aligned) {
    slabs_.push_back(std::make_unique<PrivateSlab>(aligned));
    slab_used_ = 0;
  }
  uint8_t* const memory = slabs_.back()->data() + slab_used_;
  slab_used_ += aligned;
  return memory;
}

uint32_t Blocks::Stripe::new_entry(Blocks& table) {
  if (!vacant.empty()) {
    const uint32_t id = vacant.back();
    vacant.pop_back();
    return id;
  }
  require(num_entries < kStripeEntriesMax, "a stripe's entries fit 24 bits");
  if (num_entries % kChunk == 0) {
    const uint32_t chunk = num_entries / kChunk;
    if (chunk == chunks.size()) chunks.grow(table, std::max<uint32_t>(8, chunk * 2), nullptr, true);
    chunks.set(chunk, reinterpret_cast<Entry*>(table.allocate(kChunk * sizeof(Entry))));
  }
  return num_entries++;
}

void Blocks::Stripe::free_entry(uint32_t id) {
  Entry& gone = entry(id);
  if (gone.num_parts > 1) delete[] gone.many_parts;
  gone.flags = 0;
  texts.erase(id);
  vacant.push_back(id);
}

// ---- construction, namespaces ------------------------------------------------------------------

Blocks::Blocks(Segment& segment, Pool& pool, const Options& options)
    : segment_(segment),
      pool_(pool),
      options_(options),
      stripes_(std::make_unique<Stripe[]>(kStripes)),
      held_in_(std::make_unique<std::atomic<uint32_t>[]>(segment.num_frames())) {
  for (uint32_t number = 0; number < kStripes; ++number) {
    stripes_[number].number = number;
    stripes_[number].policy = std::make_unique<LruPolicy>();
  }
  part_sizes_[0].store(kOpaquePartBytes);
  allocate(64);  // the first slab: without memory for it there is no table
  for (auto& of_class : oldest_) {
    for (auto& stamp : of_class) stamp.store(kNoStamp, std::memory_order_relaxed);
  }
}

Blocks::~Blocks() {
  for (uint32_t number = 0; number < kStripes; ++number) {
    Stripe& stripe = stripes_[number];
    for (uint32_t id = 0; id < stripe.num_entries; ++id) {
      if (stripe.entry(id).has(Entry::kInUse) && stripe.entry(id).num_parts > 1)
        delete[] stripe.entry(id).many_parts;
    }
  }
}

Namespace* Blocks::open_namespace(const std::string& digest) {
  const std::lock_guard lock(namespaces_mutex_);
  const auto known = namespace_ids_.find(digest);
  if (known != namespace_ids_.end()) return namespaces_[known->second].get();
  if (namespaces_.size() == kNamespacesMax) return nullptr;
  const auto id = static_cast<NamespaceId>(namespaces_.size());
  namespaces_.push_back(std::make_unique<Namespace>());
  namespaces_.back()->id = id;
  namespaces_.back()->digest = digest;
  namespace_ids_.emplace(digest, id);
  return namespaces_.back().get();
}

std::optional<PartSizeId> Blocks::part_size(uint64_t part_bytes) {
  const std::lock_guard lock(namespaces_mutex_);
  for (size_t id = 0; id < part_sizes_.size(); ++id) {
    if (part_sizes_[id].load() == 0) part_sizes_[id].store(part_bytes);
    if (part_sizes_[id].load() == part_bytes) return static_cast<PartSizeId>(id);
  }
  return std::nullopt;
}

uint32_t Blocks::clear(Namespace& space) {
  // From here on no entry of an older version is answered and no older commit enters; the sweep
  // only frees memory.
  const uint32_t version = space.version.fetch_add(1) + 1;
  for (uint32_t number = 0; number < kStripes; ++number) {
    Stripe& stripe = stripes_[number];
    const std::lock_guard lock(stripe.mutex);
    for (uint32_t id = 0; id < stripe.num_entries; ++id) {
      const Entry& entry = stripe.entry(id);
      if (entry.live() && entry.name_space() == space.id && entry.version < version)
        drop(stripe, id, Reason::kCleared);
    }
  }
  return version;
}

std::vector<Listed> Blocks::list(const Namespace& space) const {
  std::vector<Listed> listed;
  const uint32_t version = space.version.load();
  for (uint32_t number = 0; number < kStripes; ++number) {
    const Stripe& stripe = stripes_[number];
    const std::lock_guard lock(stripe.mutex);
    for (uint32_t id = 0; id < stripe.num_entries; ++id) {
      const Entry& entry = stripe.entry(id);
      if (!entry.live() || entry.name_space() != space.id || entry.version != version) continue;
      const auto text = stripe.texts.find(id);
      listed.push_back({entry.key, segment_.header(entry.slot).length,
                        text == stripe.texts.end() ? std::string() : text->second,
                        entry.num_pins > 0});
    }
  }
  return listed;
}

// ---- finding -----------------------------------------------------------------------------------

// Keys are digests, but a caller may choose them: seeded, and over all words, since keys of sibling
// ranks differ in the last four bytes only.
uint64_t Blocks::hash(const BlockKey& key) const {
  uint64_t mixed = options_.seed;
  for (size_t word = 0; word < kKeyBytes / 8; ++word) {
    mixed = (mixed ^ load_word(key, word)) * 0x9E3779B97F4A7C15ULL;
    mixed ^= mixed >> 32;
  }
  return mixed;
}

Blocks::Stripe& Blocks::stripe_of(uint64_t hash) const {
  return stripes_[hash >> 32 & (kStripes - 1)];
}

uint32_t Blocks::find(const Stripe& stripe, uint64_t hash, const BlockKey& key,
                      const Namespace& space) const {
  const int64_t at = stripe.find(hash, [&](uint32_t id) {
    const Entry& entry = stripe.entry(id);
    return entry.key == key && entry.name_space() == space.id;
  });
  if (at < 0) return kNotHere;
  const uint32_t id = stripe.index[static_cast<uint32_t>(at)] & kEntryMask;
  // One that a clear has passed is not here, whatever the sweep has got to.
  return stripe.entry(id).version == space.version.load() ? id : kNotHere;
}

void Blocks::prefetch_index(uint64_t hashed) const { stripe_of(hashed).prefetch_index(hashed); }

void Blocks::prefetch_entry(uint64_t hashed) const { stripe_of(hashed).prefetch_entry(hashed); }

bool Blocks::holds(const BlockKey& key, uint64_t hashed, const Namespace& space) const {
  // Without the lock, but where another thread changes this stripe's index just now: half of a
  // match's time went into taking and giving back locks.
  const Stripe& stripe = stripe_of(hashed);
  const uint32_t version = space.version.load();
  const auto seen = stripe.peek(
      hashed, [&](uint32_t id) { return stripe.entry(id).is_named(key, space.id, version); });
  if (seen) return *seen;
  const std::lock_guard lock(stripe.mutex);
  return find(stripe, hashed, key, space) != kNotHere;
}

// ---- reserve → commit | abort ------------------------------------------------------------------

Status Blocks::reserve(const BlockKey& key, const Namespace& space, uint32_t version,
                       uint64_t length, Stamp stamp, Stamp stamp_limit, Pool::Taken* taken) {
  if (version != space.version.load()) return Status::kStale;
  if (touch(key, space, stamp)) return Status::kExists;
  const auto slot = take_slot(length, stamp_limit);
  if (!slot) return Status::kOutOfSpace;
  *taken = *slot;
  return Status::kOk;
}

Status Blocks::commit(Committing block) {
  const uint64_t hashed = hash(block.key);
  Stripe& stripe = stripe_of(hashed);
  const std::lock_guard lock(stripe.mutex);
  if (block.version != block.space->version.load()) {
    pool_.free(block.slot);
    return Status::kStale;
  }
  const int64_t at = stripe.find(hashed, [&](uint32_t id) {
    const Entry& entry = stripe.entry(id);
    return entry.key == block.key && entry.name_space() == block.space->id;
  });
  if (at >= 0) {
    const uint32_t id = stripe.index[static_cast<uint32_t>(at)] & kEntryMask;
    if (stripe.entry(id).version == block.version) {
      touch_entry(stripe, id, block.stamp);
      pool_.free(block.slot);
      return Status::kExists;
    }
    drop(stripe, id, Reason::kCleared);  // of a version the sweep has not reached yet
  }
  stripe.make_room(*this, [&](uint32_t other) { return hash(stripe.entry(other).key); });
  const uint32_t id = stripe.new_entry(*this);
  Entry& entry = stripe.entry(id);
  entry.set_name(block.key, block.space->id << kPartSizeBits | block.part_size, block.version);
  entry.slot = block.slot;
  entry.num_leases = 0;
  entry.num_pins = 0;
  entry.flags = Entry::kInUse;
  entry.size_class = shape_of(block.length).size_class();
  entry.set_parts(block.parts);
  if (!block.text.empty()) stripe.texts.emplace(id, std::move(block.text));
  const uint32_t content_id = crc32c(0, entry.parts().data(), entry.parts().size_bytes());
  pool_.commit(block.slot, block.key, block.length, content_id, stripe.ref(id));
  stripe.insert(hashed, id);
  stripe.policy->insert(id, entry.size_class, block.stamp);
  publish(stripe, entry.size_class);
  count_shape(block.slot, entry.size_class, 1);
  num_evictable_.fetch_add(1, std::memory_order_relaxed);
  block.space->blocks.fetch_add(1, std::memory_order_relaxed);
  block.space->bytes.fetch_add(static_cast<int64_t>(block.length), std::memory_order_relaxed);
  counters_.commits.fetch_add(1, std::memory_order_relaxed);
  return Status::kOk;
}

void Blocks::abort(SlotId slot) { pool_.free(slot); }

// ---- lease → release ---------------------------------------------------------------------------

std::optional<Found> Blocks::lease(const BlockKey& key, uint64_t hashed, const Namespace& space,
                                   Stamp stamp) {
  Stripe& stripe = stripe_of(hashed);
  const std::lock_guard lock(stripe.mutex);
  const uint32_t id = find(stripe, hashed, key, space);
  if (id == kNotHere) return std::nullopt;
  Entry& entry = stripe.entry(id);
  become_busy(entry);
  ++entry.num_leases;
  num_leased_.fetch_add(1, std::memory_order_relaxed);
  touch_entry(stripe, id, stamp);
  const SlotHeader& header = segment_.header(entry.slot);
  return Found{stripe.ref(id),
               entry.slot,
               header.generation.load(std::memory_order_relaxed),
               header.length,
               part_sizes_[entry.part_size()].load(std::memory_order_relaxed),
               entry.parts(),
               {}};
}

void Blocks::lease_again(EntryRef ref) {
  Stripe& stripe = stripes_[ref >> kEntryBits];
  const std::lock_guard lock(stripe.mutex);
  Entry& entry = stripe.entry(ref & kEntryMask);
  require(entry.num_leases > 0, "a lease is shared only while one is open");
  ++entry.num_leases;
  num_leased_.fetch_add(1, std::memory_order_relaxed);
}

void Blocks::release(EntryRef ref) {
  Stripe& stripe = stripes_[ref >> kEntryBits];
  const std::lock_guard lock(stripe.mutex);
  const uint32_t id = ref & kEntryMask;
  Entry& entry = stripe.entry(id);
  require(entry.num_leases > 0, "a lease is released once");
  --entry.num_leases;
  num_leased_.fetch_sub(1, std::memory_order_relaxed);
  if (!entry.has(Entry::kDoomed)) {
    become_idle(stripe, id);
  } else if (entry.num_leases == 0) {
    count_held(entry, -1);
    finish(stripe, id);
  }
}

// ---- touch, remove, pin ------------------------------------------------------------------------

bool Blocks::touch(const BlockKey& key, uint64_t hashed, const Namespace& space, Stamp stamp) {
  Stripe& stripe = stripe_of(hashed);
  const std::lock_guard lock(stripe.mutex);
  const uint32_t id = find(stripe, hashed, key, space);
  if (id == kNotHere) return false;
  touch_entry(stripe, id, stamp);
  return true;
}

void Blocks::touch_entry(Stripe& stripe, uint32_t id, Stamp stamp) {
  Entry& entry = stripe.entry(id);
  if (entry.has(Entry::kParked)) {
    // Used again while held: it returns to its place now, or its children would become newer than
    // it.
    entry.flags &= static_cast<uint8_t>(~Entry::kParked);
    stripe.policy->insert(id, entry.size_class, std::max(stamp, stripe.policy->stamp_of(id)));
  } else {
    stripe.policy->touch(id, entry.size_class, stamp);
  }
  publish(stripe, entry.size_class);
}

bool Blocks::remove(const BlockKey& key, const Namespace& space) {
  const uint64_t hashed = hash(key);
  Stripe& stripe = stripe_of(hashed);
  const std::lock_guard lock(stripe.mutex);
  const uint32_t id = find(stripe, hashed, key, space);
  if (id == kNotHere) return false;
  drop(stripe, id, Reason::kRemoved);
  return true;
}

bool Blocks::pin(const BlockKey& key, const Namespace& space) {
  const uint64_t hashed = hash(key);
  Stripe& stripe = stripe_of(hashed);
  const std::lock_guard lock(stripe.mutex);
  const uint32_t id = find(stripe, hashed, key, space);
  if (id == kNotHere || stripe.entry(id).num_pins == UINT16_MAX) return false;
  become_busy(stripe.entry(id));
  if (stripe.entry(id).num_pins++ == 0) num_pinned_.fetch_add(1, std::memory_order_relaxed);
  return true;
}

bool Blocks::unpin(const BlockKey& key, const Namespace& space) {
  const uint64_t hashed = hash(key);
  Stripe& stripe = stripe_of(hashed);
  const std::lock_guard lock(stripe.mutex);
  const uint32_t id = find(stripe, hashed, key, space);
  if (id == kNotHere || stripe.entry(id).num_pins == 0) return false;
  if (--stripe.entry(id).num_pins == 0) num_pinned_.fetch_sub(1, std::memory_order_relaxed);
  become_idle(stripe, id);
  return true;
}

// ---- one way out -------------------------------------------------------------------------------

void Blocks::drop(Stripe& stripe, uint32_t id, Reason reason) {
  Entry& entry = stripe.entry(id);
  const auto hash_of = [&](uint32_t other) { return hash(stripe.entry(other).key); };
  const int64_t at = stripe.find(hash(entry.key), [&](uint32_t other) { return other == id; });
  require(at >= 0, "an entry leaves the table once");
  stripe.erase(static_cast<uint32_t>(at), hash_of);
  if (!entry.busy()) num_evictable_.fetch_sub(1, std::memory_order_relaxed);
  if (entry.num_pins > 0) num_pinned_.fetch_sub(1, std::memory_order_relaxed);
  if (!entry.has(Entry::kParked)) stripe.policy->erase(id, entry.size_class);
  publish(stripe, entry.size_class);
  count_shape(entry.slot, entry.size_class, -1);
  {
    const std::lock_guard lock(namespaces_mutex_);
    Namespace& space = *namespaces_[entry.name_space()];
    space.blocks.fetch_sub(1, std::memory_order_relaxed);
    space.bytes.fetch_sub(static_cast<int64_t>(segment_.header(entry.slot).length),
                          std::memory_order_relaxed);
  }
  if (reason == Reason::kEvicted) {
    counters_.evictions.fetch_add(1, std::memory_order_relaxed);
    if (options_.log_evictions) {
      const std::lock_guard lock(evicted_mutex_);
      evicted_.push_back(entry.key);
    }
  } else if (reason == Reason::kCorrupt) {
    counters_.corrupt.fetch_add(1, std::memory_order_relaxed);
  } else {
    counters_.removals.fetch_add(1, std::memory_order_relaxed);
  }
  entry.flags |= Entry::kDoomed;
  if (entry.num_leases > 0) return;
  if (entry.num_pins > 0) count_held(entry, -1);
  finish(stripe, id);
}

void Blocks::finish(Stripe& stripe, uint32_t id) {
  pool_.free(stripe.entry(id).slot);
  stripe.free_entry(id);
}

// REQUIRES: called before the count that makes it busy is raised.
void Blocks::become_busy(const Entry& entry) {
  if (entry.busy()) return;
  num_evictable_.fetch_sub(1, std::memory_order_relaxed);
  count_held(entry, 1);
}

// REQUIRES: called after a count was lowered.
void Blocks::become_idle(Stripe& stripe, uint32_t id) {
  Entry& entry = stripe.entry(id);
  if (entry.busy()) return;
  num_evictable_.fetch_add(1, std::memory_order_relaxed);
  count_held(entry, -1);
  if (!entry.has(Entry::kParked)) return;
  entry.flags &= static_cast<uint8_t>(~Entry::kParked);
  stripe.policy->insert(id, entry.size_class, stripe.policy->stamp_of(id));
  publish(stripe, entry.size_class);
}

void Blocks::count_held(const Entry& entry, int change) {
  if (entry.size_class == kLargeClass) return;
  const uint64_t frame = segment_.header(entry.slot).offset / kFrameBytes;
  held_in_[frame].fetch_add(static_cast<uint32_t>(change), std::memory_order_relaxed);
}

void Blocks::publish(const Stripe& stripe, SizeClass size_class) {
  oldest_[size_class][stripe.number].store(stripe.policy->oldest(size_class),
                                           std::memory_order_relaxed);
}

void Blocks::count_shape(SlotId slot, SizeClass size_class, int change) {
  live_[size_class].fetch_add(change, std::memory_order_relaxed);
  if (size_class != kLargeClass) return;
  const Shape shape = pool_.shape_of_slot(slot);
  const std::lock_guard lock(shapes_mutex_);
  if ((large_shapes_[shape] += change) == 0) large_shapes_.erase(shape);
}

std::vector<BlockKey> Blocks::take_evicted() {
  const std::lock_guard lock(evicted_mutex_);
  return std::exchange(evicted_, {});
}

}  // namespace kvstore
