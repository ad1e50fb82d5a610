// The table of blocks: the truth about what this node holds.
//
// Life of a block:
//   1. reserve(): the key is not held, a slot is taken. Nothing is visible; the slot belongs to a
//      grant (session.h).
//   2. commit(): in one step, under its stripe's lock, the key enters the table. Or abort(): no
//      trace is left.
//   3. lease() .. release(): readers. While one is open the memory is not reused.
//   4. remove() or eviction: the key leaves the table at once; the slot follows with the last lease
//      (*doomed*).
//
// Threads: any. Every entry belongs to one of kStripes stripes, each under a mutex of its own; the
//   pool's mutex is taken inside a stripe's. No clock, no thread, no waiting in here: a state
//   machine over its calls.
// Invariants: a key has at most one committed entry; every removal goes through one function; a
//   slot is freed when no lease is left and never before; entries of a cleared namespace version
//   are never answered.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "policy.h"
#include "pool.h"
#include "status.h"
#include "types.h"

namespace kvstore {

using NamespaceId = uint32_t;
// One of the part sizes in use on this node. Beside the namespace, since one model cut for another
// number of ranks has other parts.
using PartSizeId = uint16_t;
inline constexpr unsigned kPartSizeBits = 10;
inline constexpr uint32_t kNamespacesMax = 1U << (32 - kPartSizeBits);

// One namespace on this node; never moves, lives as long as the table.
struct Namespace {
  NamespaceId id = 0;
  std::string digest;
  std::atomic<uint32_t> version{1};  // raised by clear()
  std::atomic<int64_t> blocks{0};
  std::atomic<int64_t> bytes{0};
};

// What a lease gives a reader. `parts` stays valid while the lease is open.
struct Found {
  EntryRef entry = kNoEntry;
  SlotId slot = kNoSlot;
  uint64_t generation = 0;
  uint64_t length = 0;
  uint64_t part_bytes = 0;          // the last part may be shorter
  std::span<const uint32_t> parts;  // CRC32C per part
  std::vector<Extent> extents;      // filled by the transport that reads
};

// Everything commit() needs of a granted slot.
struct Committing {
  BlockKey key;
  Namespace* space = nullptr;
  uint32_t version = 0;
  SlotId slot = kNoSlot;
  uint64_t length = 0;
  Stamp stamp = 0;
  std::vector<uint32_t> parts;
  std::string text;  // of a text key, else empty
  PartSizeId part_size = 0;
};

struct Listed {
  BlockKey key;
  uint64_t length;
  std::string text;
  bool pinned;
};

// Only ever grow; read without a lock.
struct BlockCounters {
  std::atomic<uint64_t> commits{0}, evictions{0}, removals{0}, corrupt{0};
  std::atomic<uint64_t> requested{0}, hits{0};  // blocks asked for by match and get, and found
  std::atomic<uint64_t> scrubbed{0};            // blocks whose bytes were checked in the background
};

class Blocks {
 public:
  struct Options {
    uint64_t seed = 0;  // of the table's hash
    uint64_t reserve_blocks =
        0;  // free slots kept per size in use; 0: chosen by size (see reserve_for)
    bool log_evictions = false;  // keep the keys of evicted blocks for take_evicted()
  };
  Blocks(Segment& segment, Pool& pool, const Options& options);
  ~Blocks();
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;

  // ---- namespaces: a digest is known from its first mention on; versions only grow
  // Null if the node knows kNamespacesMax already.
  Namespace* open_namespace(const std::string& digest);
  // The name of a part size; none if too many are in use already.
  std::optional<PartSizeId> part_size(uint64_t part_bytes);
  uint32_t clear(Namespace& space);
  std::vector<Listed> list(const Namespace& space) const;

  // A number larger than every one before: the batch part of a stamp.
  uint64_t next_batch() { return batch_.fetch_add(1, std::memory_order_relaxed); }

  // ---- put: reserve → write → commit | abort
  // kExists (and touched), kStale, kOk with a granted slot, or kOutOfSpace. Evicts for room, but
  // nothing used at or after `stamp_limit` (a batch never evicts itself).
  Status reserve(const BlockKey& key, const Namespace& space, uint32_t version, uint64_t length,
                 Stamp stamp, Stamp stamp_limit, Pool::Taken* taken);
  // kOk; kExists if another attempt was first, kStale if cleared meanwhile: then the slot is free
  // again.
  Status commit(Committing block);
  void abort(SlotId slot);

  // ---- get: lookup → read → release
  // Calls use(i, hash of key i) for each key in order until it returns false, and meanwhile brings
  // what the next ones will read into the cache: in a table larger than the caches a batch
  // otherwise waits for memory line after line (256 of a million keys: a third of the time).
  template <class Use>
  void for_each(std::span<const BlockKey> keys, Use&& use) const {
    constexpr size_t kAhead = 2 * kPrefetchAhead;
    std::array<uint64_t, kAhead> hashes;  // of keys[i - kAhead, i)
    const size_t count = keys.size();
    for (size_t i = 0; i < count + kAhead; ++i) {
      if (i >= kPrefetchAhead && i - kPrefetchAhead < count)
        prefetch_entry(hashes[(i - kPrefetchAhead) % kAhead]);
      if (i >= kAhead && !use(i - kAhead, hashes[i % kAhead])) return;
      if (i < count) prefetch_index(hashes[i % kAhead] = hash(keys[i]));
    }
  }
  uint64_t hash(const BlockKey& key) const;
  bool holds(const BlockKey& key, uint64_t hashed, const Namespace& space) const;
  bool holds(const BlockKey& key, const Namespace& space) const {
    return holds(key, hash(key), space);
  }
  std::optional<Found> lease(const BlockKey& key, uint64_t hashed, const Namespace& space,
                             Stamp stamp);
  std::optional<Found> lease(const BlockKey& key, const Namespace& space, Stamp stamp) {
    return lease(key, hash(key), space, stamp);
  }
  void lease_again(EntryRef entry);  // REQUIRES: a lease on it is open
  void release(EntryRef entry);

  // ---- the owner's own check (scrub.cc)
  // Of a leased block's bytes; a bad block is dropped. False if it was bad.
  bool check(EntryRef entry);
  // Checks idle blocks, round and round, `bytes_max` bytes or `blocks_max` blocks at a time; bad
  // ones are dropped. Holds nothing meanwhile: eviction and readers never meet it.
  // REQUIRES: one thread at a time.
  void scrub(uint64_t bytes_max, uint32_t blocks_max);

  bool touch(const BlockKey& key, uint64_t hashed, const Namespace& space, Stamp stamp);
  bool touch(const BlockKey& key, const Namespace& space, Stamp stamp) {
    return touch(key, hash(key), space, stamp);
  }
  bool remove(const BlockKey& key, const Namespace& space);
  bool pin(const BlockKey& key, const Namespace& space);
  bool unpin(const BlockKey& key, const Namespace& space);

  // ---- room
  // While memory is still being populated nothing is evicted: more room is on its way.
  void set_growing(bool growing) { growing_.store(growing); }
  bool growing() const { return growing_.load(); }
  // Evicts until every size in use has its reserve of free slots. False if something it needed is
  // held.
  bool refill_reserves();
  bool reserve_full(const Shape& shape) const;
  // Blocks nobody holds: what eviction could still take.
  int64_t num_evictable() const { return num_evictable_.load(std::memory_order_relaxed); }
  std::vector<BlockKey> take_evicted();

  const BlockCounters& counters() const { return counters_; }
  BlockCounters& counters() { return counters_; }
  uint64_t num_leased() const { return num_leased_.load(std::memory_order_relaxed); }
  uint64_t num_pinned() const { return num_pinned_.load(std::memory_order_relaxed); }
  // Table, allocator, policies and counts agree, with `grants` slots granted and `leases` leases
  // open; else what does not. Exact only while nothing runs.
  std::string audit(uint64_t grants, uint64_t leases) const;

 private:
  struct Entry;
  struct Stripe;
  template <class T>
  class GrowingArray;
  enum class Reason { kRemoved, kEvicted, kCleared, kCorrupt };
  static constexpr uint32_t kNotHere = UINT32_MAX;

  Stripe& stripe_of(uint64_t hash) const;
  // The entry's id, or kNotHere.
  uint32_t find(const Stripe& stripe, uint64_t hash, const BlockKey& key,
                const Namespace& space) const;
  void prefetch_index(uint64_t hashed) const;
  void prefetch_entry(uint64_t hashed) const;
  void touch_entry(Stripe& stripe, uint32_t id, Stamp stamp);
  void drop(Stripe& stripe, uint32_t id, Reason reason);  // the one way out of the table
  void finish(Stripe& stripe, uint32_t id);               // no lease left: memory and entry go
  void become_busy(const Entry& entry);
  void become_idle(Stripe& stripe, uint32_t id);
  void count_held(const Entry& entry, int change);
  void publish(const Stripe& stripe, SizeClass size_class);
  void count_shape(SlotId slot, SizeClass size_class, int change);

  // room (evict.cc)
  std::optional<Pool::Taken> take_slot(uint64_t length, Stamp stamp_limit);
  bool evict_for(const Shape& shape, Stamp stamp_limit);
  bool evict_one(SizeClass size_class, Stamp stamp_limit);
  bool evict_beside(SizeClass size_class, Stamp stamp_limit);
  bool evict_frame(uint32_t frame, Stamp stamp_limit);
  bool evictable(EntryRef ref, SlotId slot, Stamp stamp_limit);
  bool evict_ref(EntryRef ref, SlotId slot, Stamp stamp_limit);
  std::pair<Stamp, uint32_t> oldest(SizeClass size_class) const;  // and its stripe
  std::vector<Shape> shapes_in_use() const;
  uint64_t reserve_for(const Shape& shape) const;
  // scrub.cc
  bool bytes_match(SlotId slot, uint64_t length, uint64_t part_bytes,
                   std::span<const uint32_t> parts) const;
  std::optional<uint64_t> scrub_entry(Stripe& stripe, uint32_t id);
  struct Census;
  std::string audit_stripe(const Stripe& stripe, Census* census) const;

  uint8_t* allocate(size_t bytes);  // zeroed, by cache lines, never given back

  Segment& segment_;
  Pool& pool_;
  std::mutex slabs_mutex_;
  // The memory of entries and index; guarded by slabs_mutex_.
  std::vector<std::unique_ptr<PrivateSlab>> slabs_;
  size_t slab_used_ = 0;  // of the last one
  const Options options_;
  std::unique_ptr<Stripe[]> stripes_;
  // Small blocks under lease or pin in each frame: a frame with one cannot go whole, and is not
  // walked to find that out.
  std::unique_ptr<std::atomic<uint32_t>[]> held_in_;
  uint32_t scrub_stripe_ = 0;  // where the next scrub() goes on
  uint32_t scrub_entry_ = 0;
  std::atomic<bool> growing_{false};
  std::atomic<uint64_t> batch_{1};
  std::atomic<int64_t> num_evictable_{0};
  std::atomic<uint64_t> num_leased_{0};
  std::atomic<uint64_t> num_pinned_{0};
  BlockCounters counters_;
  // Oldest stamp of each class in each stripe, published under the stripe's lock, read without it.
  std::atomic<Stamp> oldest_[kNumClasses + 1][kStripes];
  std::atomic<int64_t> live_[kNumClasses + 1] = {};

  // Sizes of parts by their names; zero: not used yet. Set under namespaces_mutex_.
  std::array<std::atomic<uint64_t>, 1U << kPartSizeBits> part_sizes_{};
  mutable std::mutex namespaces_mutex_;  // guards the next two
  std::vector<std::unique_ptr<Namespace>> namespaces_;
  std::map<std::string, NamespaceId> namespace_ids_;

  mutable std::mutex shapes_mutex_;
  std::map<Shape, int64_t> large_shapes_;  // committed blocks per large shape

  mutable std::mutex evicted_mutex_;
  std::vector<BlockKey> evicted_;
};

}  // namespace kvstore
