// A stripe of the table (blocks.h): entries, their index by key, and the policy that orders them
// for eviction. Included by blocks.cc, evict.cc and nothing else.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "blocks.h"

namespace kvstore {

inline constexpr unsigned kEntryBits = 24;
inline constexpr uint32_t kEntryMask = (1U << kEntryBits) - 1;

struct Blocks::Entry {
  BlockKey key;
  union {
    uint32_t one_part;
    uint32_t* many_parts;  // owned; num_parts > 1
  };
  SlotId slot;
  NamespaceId name_space;
  uint32_t version;
  uint32_t num_leases;
  uint32_t num_parts;
  uint16_t num_pins;
  uint8_t flags;
  SizeClass size_class;

  static constexpr uint8_t kInUse = 1;   // not on the list of vacant entries
  static constexpr uint8_t kDoomed = 2;  // left the index; waits for its last lease
  static constexpr uint8_t kParked =
      4;  // met while busy by eviction; not in the policy until idle again

  bool live() const { return has(kInUse) && !has(kDoomed); }
  bool busy() const { return num_leases > 0 || num_pins > 0; }
  bool has(uint8_t flag) const { return (flags & flag) != 0; }
  std::span<const uint32_t> parts() const {
    return {num_parts > 1 ? many_parts : &one_part, num_parts};
  }
  void set_parts(const std::vector<uint32_t>& parts) {
    num_parts = static_cast<uint32_t>(parts.size());
    if (num_parts > 1) {
      many_parts = new uint32_t[num_parts];
      std::copy(parts.begin(), parts.end(), many_parts);
    } else {
      one_part = parts.empty() ? 0 : parts[0];
    }
  }
};

struct Blocks::Stripe {
  static_assert(sizeof(Entry) == 64, "one cache line an entry");
  static constexpr uint32_t kChunk = 256;  // entries; they never move
  static constexpr uint32_t kEmpty = UINT32_MAX;

  mutable std::mutex mutex;
  uint32_t number = 0;
  // Guarded by mutex from here on.
  std::unique_ptr<Policy> policy;
  std::vector<Entry*> chunks;  // in the table's slabs
  uint32_t num_entries = 0;    // ids handed out so far
  std::vector<uint32_t> vacant;
  std::unordered_map<uint32_t, std::string> texts;
  // Open addressing: 8 bits of the hash beside 24 bits of entry id, so that most misses cost one
  // line.
  std::vector<uint32_t> index;
  uint32_t num_indexed = 0;
  // The same for whoever only prefetches, without the lock.
  std::atomic<const uint32_t*> index_start{nullptr};
  std::atomic<uint32_t> index_mask{0};

  Entry& entry(uint32_t id) const { return chunks[id / kChunk][id % kChunk]; }
  EntryRef ref(uint32_t id) const { return number << kEntryBits | id; }

  uint32_t new_entry(Blocks& table);
  void free_entry(uint32_t id);
  // Position in `index`, or -1.
  template <class Equal>
  int64_t find(uint64_t hash, Equal&& equal) const {
    if (index.empty()) return -1;
    const uint32_t mask = static_cast<uint32_t>(index.size()) - 1;
    const uint32_t tag = static_cast<uint32_t>(hash >> 56) << kEntryBits;
    for (uint32_t at = static_cast<uint32_t>(hash) & mask; index[at] != kEmpty;
         at = (at + 1) & mask) {
      if ((index[at] & ~kEntryMask) == tag && equal(index[at] & kEntryMask)) return at;
    }
    return -1;
  }
  template <class HashOf>
  void insert(uint64_t hash, uint32_t id, HashOf&& hash_of) {
    if ((size_t{num_indexed} + 1) * 4 > index.size() * 3) grow(hash_of);
    place(hash, id);
    ++num_indexed;
  }
  template <class HashOf>
  void erase(uint32_t at, HashOf&& hash_of) {
    // Backward shift: no tombstones, so an old table is as quick as a new one.
    const uint32_t mask = static_cast<uint32_t>(index.size()) - 1;
    uint32_t hole = at;
    for (uint32_t next = (at + 1) & mask; index[next] != kEmpty; next = (next + 1) & mask) {
      const uint32_t home = static_cast<uint32_t>(hash_of(index[next] & kEntryMask)) & mask;
      if (((next - home) & mask) >= ((next - hole) & mask)) {
        index[hole] = index[next];
        hole = next;
      }
    }
    index[hole] = kEmpty;
    --num_indexed;
  }

 private:
  void place(uint64_t hash, uint32_t id) {
    const uint32_t mask = static_cast<uint32_t>(index.size()) - 1;
    uint32_t at = static_cast<uint32_t>(hash) & mask;
    while (index[at] != kEmpty) at = (at + 1) & mask;
    index[at] = static_cast<uint32_t>(hash >> 56) << kEntryBits | id;
  }
  template <class HashOf>
  void grow(HashOf&& hash_of) {
    std::vector<uint32_t> old(std::max<size_t>(16, index.size() * 2), kEmpty);
    old.swap(index);
    for (const uint32_t slot : old) {
      if (slot != kEmpty) place(hash_of(slot & kEntryMask), slot & kEntryMask);
    }
    index_start.store(index.data(), std::memory_order_relaxed);
    index_mask.store(static_cast<uint32_t>(index.size()) - 1, std::memory_order_relaxed);
  }
};

}  // namespace kvstore
