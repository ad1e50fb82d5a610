#include "pool.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstdio>
#include <cstdlib>

namespace kvstore {
namespace {

constexpr uint32_t kNoFrame = UINT32_MAX;

// A broken rule of this file: going on would hand one piece of memory to two owners.
void require(bool holds, const char* rule) {
  if (holds) return;
  fprintf(stderr, "kvstore: pool invariant broken: %s\n", rule);
  abort();
}

}  // namespace

uint32_t cells_per_frame(SizeClass size_class) {
  if (size_class < 2) return size_class + 2U;
  const uint32_t rank = std::min<uint32_t>(size_class, kNumClasses - 1) - 2U;
  return (4 + rank % 4) << (rank / 4);
}

uint64_t cell_bytes(SizeClass size_class) {
  return kFrameBytes / cells_per_frame(size_class) / kSlotAlign * kSlotAlign;
}

Shape shape_of(uint64_t bytes) {
  Shape shape;
  shape.frames = static_cast<uint32_t>(bytes / kFrameBytes);
  const uint64_t tail = bytes % kFrameBytes;
  if (tail > cell_bytes(0)) {
    ++shape.frames;
  } else if (tail > 0) {
    // The class with the smallest cell that still holds the tail: classes are in falling order.
    SizeClass best = 0;
    SizeClass high = kNumClasses;
    while (best + 1 < high) {
      const SizeClass middle = static_cast<SizeClass>((best + high) / 2);
      (cell_bytes(middle) >= tail ? best : high) = middle;
    }
    shape.tail = best;
  }
  return shape;
}

uint64_t shape_bytes(const Shape& shape) {
  return uint64_t{shape.frames} * kFrameBytes +
         (shape.tail == kNoTail ? 0 : cell_bytes(shape.tail));
}

Pool::Pool(Segment& segment) : segment_(segment), frames_(segment.num_frames()) {
  free_bits_.resize((frames_.size() + 63) / 64);
  std::fill(std::begin(carving_), std::end(carving_), kNoFrame);
}

void Pool::add_frames(uint32_t first, uint32_t count) {
  const std::lock_guard lock(mutex_);
  for (uint32_t frame = first; frame < first + count; ++frame) {
    require(frames_[frame].kind == FrameKind::kAbsent, "a frame is added once");
    mark_frame_free(frame);
  }
  num_populated_ += count;
}

// ---- slot ids and free lists -------------------------------------------------------------------

SlotId Pool::new_slot() {
  SlotId slot;
  if (!vacant_slots_.empty()) {
    slot = vacant_slots_.back();
    vacant_slots_.pop_back();
  } else {
    require(slots_.size() < segment_.slots_max(), "headers suffice for the smallest slots");
    slot = static_cast<SlotId>(slots_.size());
    slots_.emplace_back();
    segment_.header(slot).generation.store(1, std::memory_order_relaxed);
  }
  slots_[slot] = Slot{};
  slots_[slot].state = SlotState::kFree;
  return slot;
}

void Pool::drop_slot(SlotId slot) {
  slots_[slot].state = SlotState::kVacant;
  vacant_slots_.push_back(slot);
}

void Pool::push_free(FreeList& list, SlotId slot) {
  slots_[slot].previous = kNoSlot;
  slots_[slot].next = list.head;
  if (list.head != kNoSlot) slots_[list.head].previous = slot;
  list.head = slot;
  ++list.size;
}

void Pool::unlink_free(FreeList& list, SlotId slot) {
  const Slot& record = slots_[slot];
  if (record.previous != kNoSlot) slots_[record.previous].next = record.next;
  if (record.next != kNoSlot) slots_[record.next].previous = record.previous;
  if (list.head == slot) list.head = record.next;
  --list.size;
}

SlotId Pool::pop_free(FreeList& list) {
  const SlotId slot = list.head;
  unlink_free(list, slot);
  return slot;
}

// ---- frames ------------------------------------------------------------------------------------

void Pool::mark_frame_free(uint32_t frame) {
  frames_[frame] = Frame{};
  frames_[frame].kind = FrameKind::kFree;
  free_bits_[frame / 64] |= uint64_t{1} << (frame % 64);
  free_hint_ = std::min(free_hint_, size_t{frame / 64});
  ++num_free_frames_;
}

std::optional<uint32_t> Pool::take_frame() {
  if (num_free_frames_ == 0 && !break_something_idle()) return std::nullopt;
  while (free_bits_[free_hint_] == 0) ++free_hint_;
  const uint32_t frame = static_cast<uint32_t>(
      free_hint_ * 64 + static_cast<size_t>(std::countr_zero(free_bits_[free_hint_])));
  free_bits_[free_hint_] &= free_bits_[free_hint_] - 1;
  --num_free_frames_;
  return frame;
}

// `count` free frames, side by side if such a run exists. REQUIRES: num_free_frames_ >= count.
std::vector<uint32_t> Pool::collect_frames(uint32_t count) {
  std::vector<uint32_t> found;
  found.reserve(count);
  for (uint32_t frame = static_cast<uint32_t>(free_hint_ * 64);
       frame < frames_.size() && found.size() < count; ++frame) {
    if (frame % 64 == 0 && free_bits_[frame / 64] == 0) {
      found.clear();
      frame += 63;
    } else if (frames_[frame].kind == FrameKind::kFree) {
      found.push_back(frame);
    } else {
      found.clear();
    }
  }
  if (found.size() < count) {  // no run: take what there is
    found.clear();
    for (uint32_t frame = 0; found.size() < count; ++frame) {
      if (frames_[frame].kind == FrameKind::kFree) found.push_back(frame);
    }
  }
  for (const uint32_t frame : found) free_bits_[frame / 64] &= ~(uint64_t{1} << (frame % 64));
  num_free_frames_ -= count;
  return found;
}

void Pool::link_idle(uint32_t frame) {
  Frame& record = frames_[frame];
  record.previous = kNoFrame;
  record.next = idle_;
  if (idle_ != kNoFrame) frames_[idle_].previous = frame;
  idle_ = frame;
  ++num_idle_;
  ++num_idle_of_[record.size_class];
}

void Pool::unlink_idle(uint32_t frame) {
  Frame& record = frames_[frame];
  if (record.previous != kNoFrame) frames_[record.previous].next = record.next;
  if (record.next != kNoFrame) frames_[record.next].previous = record.previous;
  if (idle_ == frame) idle_ = record.next;
  --num_idle_;
  --num_idle_of_[record.size_class];
}

void Pool::count_cell(uint32_t frame, bool taken) {
  Frame& record = frames_[frame];
  if (taken) {
    if (record.num_taken++ == 0) unlink_idle(frame);
  } else {
    require(record.num_taken > 0, "a cell is freed once");
    if (--record.num_taken == 0) link_idle(frame);
  }
}

bool Pool::break_something_idle() {
  if (idle_ != kNoFrame) {
    break_frame(idle_);
    return true;
  }
  if (free_large_.empty()) return false;
  break_large(free_large_.begin()->second.head);
  return true;
}

// An idle cut frame becomes a free frame again.
void Pool::break_frame(uint32_t frame) {
  Frame& record = frames_[frame];
  for (uint32_t index = 0; index < record.num_carved; ++index) {
    if (large_.contains(record.cells[index])) break_large(record.cells[index]);
    unlink_free(free_small_[record.size_class], record.cells[index]);
    drop_slot(record.cells[index]);
  }
  if (carving_[record.size_class] == frame) carving_[record.size_class] = kNoFrame;
  unlink_idle(frame);
  mark_frame_free(frame);
}

// A free large slot becomes free frames, and its tail a free small slot.
void Pool::break_large(SlotId slot) {
  unlist_large(slot);
  const LargeSlot large = std::move(large_.at(slot));
  large_.erase(slot);
  uint32_t left = large.shape.frames;
  for (const Extent& extent : large.extents) {
    for (uint64_t offset = extent.offset; left > 0 && offset < extent.offset + extent.bytes;
         offset += kFrameBytes, --left) {
      mark_frame_free(static_cast<uint32_t>(offset / kFrameBytes));
    }
  }
  if (large.shape.tail != kNoTail) {
    const Cell cell = tail_cell(large);
    const SlotId small = new_slot();
    slots_[small].size_class = large.shape.tail;
    segment_.header(small).offset = cell_offset(cell);
    frames_[cell.frame].cells[cell.index] = small;
    push_free(free_small_[large.shape.tail], small);
  }
  drop_slot(slot);
}

void Pool::unlist_large(SlotId slot) {
  const Shape shape = large_.at(slot).shape;
  const auto list = free_large_.find(shape);
  unlink_free(list->second, slot);
  if (list->second.size == 0) free_large_.erase(list);
  num_frames_in_free_large_ -= shape.frames;
}

// ---- cells ------------------------------------------------------------------------------------

Pool::Cell Pool::cell_at(uint64_t offset) const {
  const uint32_t frame = static_cast<uint32_t>(offset / kFrameBytes);
  return {frame,
          static_cast<uint32_t>(offset % kFrameBytes / cell_bytes(frames_[frame].size_class))};
}

uint64_t Pool::cell_offset(const Cell& cell) const {
  return uint64_t{cell.frame} * kFrameBytes +
         cell.index * cell_bytes(frames_[cell.frame].size_class);
}

Pool::Cell Pool::tail_cell(const LargeSlot& large) const {
  return cell_at(large.extents.back().offset);
}

// A cell without a slot of its own, counted as taken.
std::optional<Pool::Cell> Pool::take_cell(SizeClass size_class) {
  FreeList& list = free_small_[size_class];
  if (list.size > 0) {
    const SlotId slot = pop_free(list);
    const Cell cell = cell_at(segment_.header(slot).offset);
    drop_slot(slot);
    count_cell(cell.frame, true);
    return cell;
  }
  uint32_t frame = carving_[size_class];
  if (frame == kNoFrame) {
    const auto fresh = take_frame();
    if (!fresh) return std::nullopt;
    frame = *fresh;
    frames_[frame].kind = FrameKind::kCut;
    frames_[frame].size_class = size_class;
    frames_[frame].cells = std::make_unique<SlotId[]>(cells_per_frame(size_class));
    carving_[size_class] = frame;
    link_idle(frame);
  }
  Frame& record = frames_[frame];
  const Cell cell{frame, record.num_carved++};
  if (record.num_carved == cells_per_frame(size_class)) carving_[size_class] = kNoFrame;
  count_cell(frame, true);
  return cell;
}

// The opposite: the cell becomes a free small slot.
void Pool::return_cell(const Cell& cell) {
  const SlotId slot = new_slot();
  const SizeClass size_class = frames_[cell.frame].size_class;
  slots_[slot].size_class = size_class;
  segment_.header(slot).offset = cell_offset(cell);
  frames_[cell.frame].cells[cell.index] = slot;
  push_free(free_small_[size_class], slot);
  count_cell(cell.frame, false);
}

// ---- take, commit, free ------------------------------------------------------------------------

std::optional<SlotId> Pool::take_small(SizeClass size_class) {
  if (free_small_[size_class].size > 0) {
    const SlotId slot = pop_free(free_small_[size_class]);
    count_cell(static_cast<uint32_t>(segment_.header(slot).offset / kFrameBytes), true);
    return slot;
  }
  const auto cell = take_cell(size_class);
  if (!cell) return std::nullopt;
  const SlotId slot = new_slot();
  slots_[slot].size_class = size_class;
  segment_.header(slot).offset = cell_offset(*cell);
  frames_[cell->frame].cells[cell->index] = slot;
  return slot;
}

std::optional<SlotId> Pool::take_large(const Shape& shape) {
  const auto list = free_large_.find(shape);
  if (list != free_large_.end()) {
    const SlotId slot = list->second.head;
    unlist_large(slot);
    if (shape.tail != kNoTail) count_cell(tail_cell(large_.at(slot)).frame, true);
    return slot;
  }
  std::optional<Cell> tail;
  if (shape.tail != kNoTail) {
    tail = take_cell(shape.tail);
    if (!tail) return std::nullopt;
  }
  while (num_free_frames_ < shape.frames) {
    if (break_something_idle()) continue;
    if (tail) return_cell(*tail);
    return std::nullopt;
  }
  const SlotId slot = new_slot();
  slots_[slot].size_class = kLargeClass;
  LargeSlot& large = large_[slot];
  large.shape = shape;
  for (const uint32_t frame : collect_frames(shape.frames)) {
    frames_[frame].kind = FrameKind::kWhole;
    frames_[frame].owner = slot;
    const uint64_t offset = uint64_t{frame} * kFrameBytes;
    if (!large.extents.empty() &&
        large.extents.back().offset + large.extents.back().bytes == offset) {
      large.extents.back().bytes += kFrameBytes;
    } else {
      large.extents.push_back({offset, kFrameBytes});
    }
  }
  if (tail) {
    frames_[tail->frame].cells[tail->index] = slot;
    large.extents.push_back({cell_offset(*tail), cell_bytes(shape.tail)});
  }
  segment_.header(slot).offset = large.extents.front().offset;
  return slot;
}

std::optional<Pool::Taken> Pool::take(uint64_t bytes) {
  const Shape shape = shape_of(bytes);
  const std::lock_guard lock(mutex_);
  const auto slot = shape.frames == 0 ? take_small(shape.tail) : take_large(shape);
  if (!slot) return std::nullopt;
  slots_[*slot].state = SlotState::kGranted;
  slots_[*slot].entry = kNoEntry;
  taken_bytes_ += shape_bytes(shape);
  ++num_taken_;
  // Still odd: an older grant or lease of this slot can no longer match.
  const uint64_t generation = segment_.header(*slot).generation.load(std::memory_order_relaxed) + 2;
  segment_.header(*slot).generation.store(generation, std::memory_order_release);
  return Taken{*slot, generation};
}

uint64_t Pool::commit(SlotId slot, const BlockKey& key, uint64_t length, uint32_t content_id,
                      EntryRef entry) {
  const std::lock_guard lock(mutex_);
  require(slots_[slot].state == SlotState::kGranted, "only a granted slot is committed");
  slots_[slot].state = SlotState::kCommitted;
  slots_[slot].entry = entry;
  SlotHeader& header = segment_.header(slot);
  header.length = length;
  header.key = key;
  header.content_id = content_id;
  const auto large = large_.find(slot);
  header.num_extents =
      large == large_.end() ? 1 : static_cast<uint32_t>(large->second.extents.size());
  const uint64_t generation = header.generation.load(std::memory_order_relaxed) + 1;
  header.generation.store(generation, std::memory_order_release);
  return generation;
}

void Pool::free(SlotId slot) {
  const std::lock_guard lock(mutex_);
  Slot& record = slots_[slot];
  require(record.state == SlotState::kGranted || record.state == SlotState::kCommitted,
          "a slot is freed once");
  std::atomic<uint64_t>& generation = segment_.header(slot).generation;
  const uint64_t now = generation.load(std::memory_order_relaxed);
  generation.store(now + (now % 2 == 0 ? 1 : 2), std::memory_order_release);
  record.state = SlotState::kFree;
  record.entry = kNoEntry;
  taken_bytes_ -= slot_bytes(slot);
  --num_taken_;
  if (record.size_class != kLargeClass) {
    push_free(free_small_[record.size_class], slot);
    count_cell(static_cast<uint32_t>(segment_.header(slot).offset / kFrameBytes), false);
    return;
  }
  const LargeSlot& large = large_.at(slot);
  push_free(free_large_[large.shape], slot);
  num_frames_in_free_large_ += large.shape.frames;
  if (large.shape.tail != kNoTail) count_cell(tail_cell(large).frame, false);
}

}  // namespace kvstore
