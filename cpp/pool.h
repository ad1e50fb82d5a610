// Slots in a segment: who has which memory. Knows sizes and frames, nothing of keys.
//
// Life of a frame:
//   1. add_frames(): populated, free.
//   2. *cut* for one size class (equal cells, for small blocks and for the tails of large ones), or
//      *whole* inside one large slot.
//   3. When none of its cells is in use it is idle; it keeps its shape for the next block of its
//      size until another size needs the room. Then it is broken back into a free frame.
// Life of a slot: take() → granted → commit() → committed → free(), or granted → free(). A freed
//   slot keeps its shape on the free list of its size. Generations only grow: odd while granted or
//   free, even while committed.
//
// Threads: every method takes the pool's mutex, which is the innermost lock. Owns no memory but its
//   tables.
// Invariant: each byte of each populated frame belongs to one free frame, one cell or one whole
//   slot (audit()).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "segment.h"
#include "types.h"

namespace kvstore {

using SlotId = uint32_t;
inline constexpr SlotId kNoSlot = UINT32_MAX;
inline constexpr uint32_t kSlotsPerFrameMax = 32768;

// Size classes by cells per frame: 2, 3, then {4, 5, 6, 7} x 2^k: four per power of two, so that
// many sizes share few classes and a cell wastes at most a fifth.
using SizeClass = uint8_t;
inline constexpr SizeClass kNumClasses = 55;
inline constexpr SizeClass kLargeClass = kNumClasses;  // slots of whole frames, all sizes together
inline constexpr SizeClass kNoTail = 255;

uint32_t cells_per_frame(SizeClass size_class);
uint64_t cell_bytes(SizeClass size_class);

// What a block of some length needs: whole frames, then a tail in a cell of a cut frame.
struct Shape {
  uint32_t frames = 0;
  SizeClass tail = kNoTail;
  auto operator<=>(const Shape&) const = default;
  // The list the eviction policy keeps such slots in.
  SizeClass size_class() const { return frames == 0 ? tail : kLargeClass; }
};
Shape shape_of(uint64_t bytes);
uint64_t shape_bytes(const Shape& shape);

// Which table entry a committed slot belongs to; opaque here.
using EntryRef = uint32_t;
inline constexpr EntryRef kNoEntry = UINT32_MAX;

struct PoolUsage {
  uint64_t capacity_bytes = 0;  // populated frames
  uint64_t free_bytes = 0;      // free frames and free slots
  uint64_t taken_bytes = 0;     // granted and committed slots, by their shape
  uint32_t free_frames = 0;
  uint32_t largest_free_run = 0;  // frames
  uint64_t slots = 0;             // granted or committed
};

class Pool {
 public:
  explicit Pool(Segment& segment);
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  void add_frames(uint32_t first, uint32_t count);

  struct Taken {
    SlotId slot;
    uint64_t generation;
  };
  // A slot for `bytes`, out of free memory of any shape; empty if that does not suffice.
  std::optional<Taken> take(uint64_t bytes);
  // REQUIRES: granted. Fills in the header and makes the generation even.
  uint64_t commit(SlotId slot, const BlockKey& key, uint64_t length, uint32_t content_id,
                  EntryRef entry);
  // Granted or committed → free.
  void free(SlotId slot);

  std::vector<Extent> extents(SlotId slot, uint64_t length) const;
  // Slots of `shape` that take() could hand out without any eviction, counted up to `most`.
  uint64_t free_slots(const Shape& shape, uint64_t most) const;
  Shape shape_of_slot(SlotId slot) const;

  // What stands in one frame, for evicting it as a group.
  struct Tenant {
    SlotId slot;
    EntryRef entry;  // kNoEntry: granted, nobody may evict it
  };
  struct FrameTenants {
    bool in_use = false;  // cut or whole, with at least one slot taken
    std::vector<Tenant> tenants;
  };
  FrameTenants tenants(uint32_t frame) const;
  std::vector<uint32_t> frames_of(SlotId slot) const;

  uint32_t num_frames() const { return static_cast<uint32_t>(frames_.size()); }
  PoolUsage usage() const;
  // Walks everything; a description of the first contradiction, or empty.
  std::string audit() const;

 private:
  enum class FrameKind : uint8_t { kAbsent, kFree, kCut, kWhole };
  enum class SlotState : uint8_t { kVacant, kFree, kGranted, kCommitted };
  struct Frame {
    FrameKind kind = FrameKind::kAbsent;
    SizeClass size_class = kNoTail;
    uint32_t num_carved = 0;          // cut: cells handed out at least once
    uint32_t num_taken = 0;           // cut: cells inside granted or committed slots
    SlotId owner = kNoSlot;           // whole
    std::unique_ptr<SlotId[]> cells;  // cut: the slot each carved cell belongs to
    uint32_t previous = UINT32_MAX;   // idle list
    uint32_t next = UINT32_MAX;
  };
  struct Slot {
    SlotId previous = kNoSlot;  // free list
    SlotId next = kNoSlot;
    EntryRef entry = kNoEntry;
    SlotState state = SlotState::kVacant;
    SizeClass size_class = kNoTail;
  };
  static_assert(sizeof(Slot) == 16);
  struct LargeSlot {
    Shape shape;
    std::vector<Extent> extents;  // frames in order, neighbours joined, then the tail
  };
  struct FreeList {
    SlotId head = kNoSlot;
    uint64_t size = 0;
  };
  struct Cell {
    uint32_t frame;
    uint32_t index;
  };

  SlotId new_slot();
  void drop_slot(SlotId slot);
  void push_free(FreeList& list, SlotId slot);
  void unlink_free(FreeList& list, SlotId slot);
  SlotId pop_free(FreeList& list);

  std::optional<Cell> take_cell(SizeClass size_class);
  void return_cell(const Cell& cell);
  std::optional<SlotId> take_small(SizeClass size_class);
  std::optional<SlotId> take_large(const Shape& shape);
  std::vector<uint32_t> collect_frames(uint32_t count);
  std::optional<uint32_t> take_frame();
  void mark_frame_free(uint32_t frame);
  bool break_something_idle();
  void break_frame(uint32_t frame);
  void break_large(SlotId slot);
  void unlist_large(SlotId slot);
  void count_cell(uint32_t frame, bool taken);
  void link_idle(uint32_t frame);
  void unlink_idle(uint32_t frame);
  Cell cell_at(uint64_t offset) const;
  uint64_t cell_offset(const Cell& cell) const;
  Cell tail_cell(const LargeSlot& large) const;
  uint64_t slot_bytes(SlotId slot) const;
  std::string audit_frame(uint32_t frame) const;
  std::string audit_large(SlotId slot, const LargeSlot& large) const;

  Segment& segment_;
  mutable std::mutex mutex_;
  // Guarded by mutex_ from here on.
  std::vector<Frame> frames_;
  std::vector<uint64_t> free_bits_;  // one bit a free frame
  uint32_t num_free_frames_ = 0;
  uint32_t num_populated_ = 0;
  size_t free_hint_ = 0;        // word to start looking in
  uint32_t idle_ = UINT32_MAX;  // list of cut frames with no cell taken
  uint32_t num_idle_ = 0;
  uint32_t num_idle_of_[kNumClasses] = {};
  uint32_t num_frames_in_free_large_ = 0;
  std::vector<Slot> slots_;
  std::vector<SlotId> vacant_slots_;
  FreeList free_small_[kNumClasses];
  uint32_t carving_[kNumClasses];  // the frame of each class with uncarved cells, if any
  std::map<Shape, FreeList> free_large_;
  std::unordered_map<SlotId, LargeSlot> large_;
  uint64_t taken_bytes_ = 0;
  uint64_t num_taken_ = 0;
};

}  // namespace kvstore
