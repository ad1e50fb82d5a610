// A stripe of the table (blocks.h): entries, their index by key, and the policy that orders them
// for eviction. Included by blocks.cc, evict.cc and nothing else.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
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
  uint32_t layout;  // namespace and, in the low bits, the size of parts
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

  NamespaceId name_space() const { return layout >> kPartSizeBits; }
  PartSizeId part_size() const { return layout & ((1U << kPartSizeBits) - 1); }
  // Set and compared word by word, since a reader without the lock may look while the entry gets
  // its next name; what it then sees is thrown away.
  void set_name(const BlockKey& named, uint32_t with_layout, uint32_t with_version) {
    for (size_t at = 0; at < kKeyBytes; at += 8)
      word_at(at).store(load(named, at), std::memory_order_relaxed);
    std::atomic_ref(layout).store(with_layout, std::memory_order_relaxed);
    std::atomic_ref(version).store(with_version, std::memory_order_relaxed);
  }
  bool is_named(const BlockKey& named, NamespaceId name_space, uint32_t of_version) {
    uint64_t differ = 0;
    for (size_t at = 0; at < kKeyBytes; at += 8)
      differ |= word_at(at).load(std::memory_order_acquire) ^ load(named, at);
    return differ == 0 &&
           std::atomic_ref(layout).load(std::memory_order_acquire) >> kPartSizeBits == name_space &&
           std::atomic_ref(version).load(std::memory_order_acquire) == of_version;
  }

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

 private:
  std::atomic_ref<uint64_t> word_at(size_t at) {
    return std::atomic_ref(*reinterpret_cast<uint64_t*>(key.bytes.data() + at));
  }
  static uint64_t load(const BlockKey& from, size_t at) {
    uint64_t word;
    memcpy(&word, from.bytes.data() + at, 8);
    return word;
  }
};

// An array that grows, and may be read without the lock by whoever can live with old contents: the
// arrays it has outgrown stay, half as much memory again.
template <class T>
class Blocks::GrowingArray {
 public:
  uint32_t size() const { return arrays_.empty() ? 0 : arrays_.back()->size; }
  T operator[](uint32_t at) const { return word(at).load(std::memory_order_relaxed); }
  void set(uint32_t at, T value) { word(at).store(value, std::memory_order_release); }
  // Calls use(words, their number) with one array, whatever the writer does meanwhile.
  template <class Use>
  void peek(Use&& use) const {
    const Array* const array = current_.load(std::memory_order_acquire);
    if (array != nullptr) use(array->words, array->size);
  }
  // REQUIRES (as set): the lock. `keep`: starts with the old contents. Returns those.
  std::span<const std::atomic<T>> grow(Blocks& table, uint32_t size, T fill, bool keep) {
    const Array* const last = current_.load(std::memory_order_relaxed);
    std::span<const std::atomic<T>> old;
    if (last != nullptr) old = {last->words, last->size};
    auto* const words =
        reinterpret_cast<std::atomic<T>*>(table.allocate(size * sizeof(std::atomic<T>)));
    for (uint32_t at = 0; at < size; ++at) {
      new (words + at) std::atomic<T>(keep && at < old.size() ? T{old[at]} : fill);
    }
    arrays_.push_back(std::make_unique<Array>(Array{size, words}));
    current_.store(arrays_.back().get(), std::memory_order_release);
    return old;
  }

 private:
  struct Array {
    uint32_t size;
    std::atomic<T>* words;  // the table's
  };
  std::atomic<T>& word(uint32_t at) const {
    return current_.load(std::memory_order_acquire)->words[at];
  }
  std::atomic<const Array*> current_{nullptr};
  std::vector<std::unique_ptr<Array>> arrays_;
};

struct Blocks::Stripe {
  static_assert(sizeof(Entry) == 64, "one cache line an entry");
  static constexpr uint32_t kChunk = 256;  // entries; they never move
  static constexpr uint32_t kEmpty = UINT32_MAX;

  mutable std::mutex mutex;
  uint32_t number = 0;
  // Guarded by mutex from here on.
  std::unique_ptr<Policy> policy;
  GrowingArray<Entry*> chunks;  // in the table's slabs
  uint32_t num_entries = 0;     // ids handed out so far
  std::vector<uint32_t> vacant;
  std::unordered_map<uint32_t, std::string> texts;
  // Open addressing: 8 bits of the hash beside 24 bits of entry id, so that most misses cost one
  // line.
  GrowingArray<uint32_t> index;
  uint32_t num_indexed = 0;
  std::atomic<uint32_t> moves{0};  // of the index; odd while it is changed

  Entry& entry(uint32_t id) const { return chunks[id / kChunk][id % kChunk]; }
  EntryRef ref(uint32_t id) const { return number << kEntryBits | id; }

  uint32_t new_entry(Blocks& table);
  void free_entry(uint32_t id);
  // Position in `index`, or -1.
  template <class Equal>
  int64_t find(uint64_t hash, Equal&& equal) const {
    int64_t found = -1;
    index.peek([&](const std::atomic<uint32_t>* words, uint32_t size) {
      const uint32_t mask = size - 1;
      for (uint32_t at = static_cast<uint32_t>(hash) & mask;; at = (at + 1) & mask) {
        const uint32_t word = words[at].load(std::memory_order_acquire);
        if (word == kEmpty) return;
        if ((word & ~kEntryMask) != tag_of(hash) || !equal(word & kEntryMask)) continue;
        found = at;
        return;
      }
    });
    return found;
  }
  // find() without the lock: whether there is such an entry, or none if the index was changed
  // meanwhile. REQUIRES: what `equal` reads is read with memory_order_acquire.
  template <class Equal>
  std::optional<bool> peek(uint64_t hash, Equal&& equal) const {
    const uint32_t before = moves.load(std::memory_order_acquire);
    if (before % 2 != 0) return std::nullopt;
    const bool found = find(hash, equal) >= 0;
    if (moves.load(std::memory_order_relaxed) != before) return std::nullopt;
    return found;
  }
  // Without the lock: brings into the cache where find() would begin to look; and the entry it
  // would look at first, nearly always the right one.
  void prefetch_index(uint64_t hash) const {
    index.peek([&](const std::atomic<uint32_t>* words, uint32_t size) {
      __builtin_prefetch(words + (static_cast<uint32_t>(hash) & (size - 1)));
    });
  }
  void prefetch_entry(uint64_t hash) const {
    find(hash, [&](uint32_t id) {
      __builtin_prefetch(&entry(id));
      return true;
    });
  }
  // Before insert, since this may find no memory.
  template <class HashOf>
  void make_room(Blocks& table, HashOf&& hash_of) {
    if ((size_t{num_indexed} + 1) * 4 <= size_t{index.size()} * 3) return;
    const uint32_t size = std::max<uint32_t>(16, index.size() * 2);
    const Move move(moves);
    for (const auto& old : index.grow(table, size, kEmpty, false)) {
      const uint32_t word = old.load(std::memory_order_relaxed);
      if (word != kEmpty) place(hash_of(word & kEntryMask), word & kEntryMask);
    }
  }
  void insert(uint64_t hash, uint32_t id) {
    const Move move(moves);
    place(hash, id);
    ++num_indexed;
  }
  template <class HashOf>
  void erase(uint32_t at, HashOf&& hash_of) {
    // Backward shift: no tombstones, so an old table is as quick as a new one.
    const Move move(moves);
    const uint32_t mask = index.size() - 1;
    uint32_t hole = at;
    for (uint32_t next = (at + 1) & mask; index[next] != kEmpty; next = (next + 1) & mask) {
      const uint32_t home = static_cast<uint32_t>(hash_of(index[next] & kEntryMask)) & mask;
      if (((next - home) & mask) >= ((next - hole) & mask)) {
        index.set(hole, index[next]);
        hole = next;
      }
    }
    index.set(hole, kEmpty);
    --num_indexed;
  }

 private:
  class Move {
   public:
    explicit Move(std::atomic<uint32_t>& moves) : moves_(moves) { step(std::memory_order_relaxed); }
    ~Move() { step(std::memory_order_release); }
    Move(const Move&) = delete;
    Move& operator=(const Move&) = delete;

   private:
    void step(std::memory_order order) {
      moves_.store(moves_.load(std::memory_order_relaxed) + 1, order);
    }
    std::atomic<uint32_t>& moves_;
  };
  static uint32_t tag_of(uint64_t hash) { return static_cast<uint32_t>(hash >> 56) << kEntryBits; }
  void place(uint64_t hash, uint32_t id) {
    const uint32_t mask = index.size() - 1;
    uint32_t at = static_cast<uint32_t>(hash) & mask;
    while (index[at] != kEmpty) at = (at + 1) & mask;
    index.set(at, tag_of(hash) | id);
  }
};

}  // namespace kvstore
