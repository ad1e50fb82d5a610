// Looking at a pool without changing it: what it holds, and whether its accounts agree (pool.h).
#include <algorithm>

#include "pool.h"

namespace kvstore {
namespace {

constexpr uint32_t kNoFrame = UINT32_MAX;

}  // namespace

uint64_t Pool::slot_bytes(SlotId slot) const {
  const SizeClass size_class = slots_[slot].size_class;
  return size_class == kLargeClass ? shape_bytes(large_.at(slot).shape) : cell_bytes(size_class);
}

std::vector<Extent> Pool::extents(SlotId slot, uint64_t length) const {
  const std::lock_guard lock(mutex_);
  if (slots_[slot].size_class != kLargeClass) return {{segment_.header(slot).offset, length}};
  std::vector<Extent> extents = large_.at(slot).extents;
  uint64_t left = length;
  for (Extent& extent : extents) {
    extent.bytes = std::min(extent.bytes, left);
    left -= extent.bytes;
  }
  return extents;
}

uint64_t Pool::free_slots(const Shape& shape, uint64_t most) const {
  const std::lock_guard lock(mutex_);
  if (shape.frames > 0) {
    const auto list = free_large_.find(shape);
    const uint64_t kept = list == free_large_.end() ? 0 : list->second.size;
    uint64_t loose =
        uint64_t{num_free_frames_} + num_idle_ + num_frames_in_free_large_ - kept * shape.frames;
    if (shape.tail == kNoTail) return std::min(most, kept + loose / shape.frames);
    // Tails share frames: one more slot needs a spare cell, or begins a frame of cells for the next
    // ones too.
    const uint64_t cells = cells_per_frame(shape.tail);
    uint64_t spare = free_small_[shape.tail].size;
    if (carving_[shape.tail] != kNoFrame) spare += cells - frames_[carving_[shape.tail]].num_carved;
    loose -= num_idle_of_[shape.tail];  // their cells are spare, or tails of `kept`
    const uint64_t more =
        std::min(loose / shape.frames, (loose * cells + spare) / (shape.frames * cells + 1));
    return std::min(most, kept + more);
  }
  const uint64_t cells = cells_per_frame(shape.tail);
  uint64_t slots = free_small_[shape.tail].size;
  if (carving_[shape.tail] != kNoFrame) slots += cells - frames_[carving_[shape.tail]].num_carved;
  slots += cells * (uint64_t{num_free_frames_} + num_idle_ - num_idle_of_[shape.tail] +
                    num_frames_in_free_large_);
  for (const auto& [other, list] : free_large_) {
    if (other.tail == shape.tail) slots += list.size;  // their tails, once they are broken
  }
  return std::min(most, slots);
}

Shape Pool::shape_of_slot(SlotId slot) const {
  const std::lock_guard lock(mutex_);
  const SizeClass size_class = slots_[slot].size_class;
  return size_class == kLargeClass ? large_.at(slot).shape : Shape{0, size_class};
}

Pool::FrameTenants Pool::tenants(uint32_t frame) const {
  const std::lock_guard lock(mutex_);
  const Frame& record = frames_[frame];
  FrameTenants result;
  const auto add = [&](SlotId slot) {
    const SlotState state = slots_[slot].state;
    if (state == SlotState::kGranted || state == SlotState::kCommitted) {
      result.tenants.push_back({slot, slots_[slot].entry});
    }
  };
  if (record.kind == FrameKind::kWhole) add(record.owner);
  for (uint32_t index = 0; record.kind == FrameKind::kCut && index < record.num_carved; ++index) {
    add(record.cells[index]);
  }
  result.in_use = !result.tenants.empty();
  return result;
}

std::vector<uint32_t> Pool::frames_of(SlotId slot) const {
  const std::lock_guard lock(mutex_);
  if (slots_[slot].size_class != kLargeClass) {
    return {static_cast<uint32_t>(segment_.header(slot).offset / kFrameBytes)};
  }
  std::vector<uint32_t> frames;
  for (const Extent& extent : large_.at(slot).extents) {
    for (uint64_t offset = extent.offset; offset < extent.offset + extent.bytes;
         offset += kFrameBytes) {
      frames.push_back(static_cast<uint32_t>(offset / kFrameBytes));
    }
  }
  return frames;
}

PoolUsage Pool::usage() const {
  const std::lock_guard lock(mutex_);
  PoolUsage usage;
  usage.capacity_bytes = uint64_t{num_populated_} * kFrameBytes;
  usage.taken_bytes = taken_bytes_;
  usage.free_bytes = usage.capacity_bytes - taken_bytes_;
  usage.free_frames = num_free_frames_;
  usage.slots = num_taken_;
  uint32_t run = 0;
  for (const Frame& frame : frames_) {
    run = frame.kind == FrameKind::kFree ? run + 1 : 0;
    usage.largest_free_run = std::max(usage.largest_free_run, run);
  }
  return usage;
}

// ---- audit -------------------------------------------------------------------------------------

std::string Pool::audit_frame(uint32_t frame) const {
  const Frame& record = frames_[frame];
  const std::string name = "frame " + std::to_string(frame);
  const bool bit = (free_bits_[frame / 64] >> (frame % 64) & 1) != 0;
  if (bit != (record.kind == FrameKind::kFree)) return name + ": free bit and kind differ";
  if (record.kind == FrameKind::kWhole && !large_.contains(record.owner))
    return name + ": owner is no large slot";
  if (record.kind != FrameKind::kCut) return {};
  uint32_t taken = 0;
  for (uint32_t index = 0; index < record.num_carved; ++index) {
    const SlotId slot = record.cells[index];
    const SlotState state = slots_[slot].state;
    if (state == SlotState::kVacant) return name + ": a cell belongs to a vacant slot";
    if (state != SlotState::kFree) ++taken;
    const uint64_t offset = uint64_t{frame} * kFrameBytes + index * cell_bytes(record.size_class);
    const auto large = large_.find(slot);
    const uint64_t stands_at =
        large == large_.end() ? segment_.header(slot).offset : large->second.extents.back().offset;
    if (stands_at != offset) return name + ": a cell and its slot disagree on the place";
  }
  if (taken != record.num_taken) return name + ": taken cells are miscounted";
  return {};
}

std::string Pool::audit_large(SlotId slot, const LargeSlot& large) const {
  const std::string name = "large slot " + std::to_string(slot);
  uint64_t bytes = 0;
  for (const Extent& extent : large.extents) bytes += extent.bytes;
  if (bytes != shape_bytes(large.shape)) return name + ": extents do not add up to its shape";
  uint32_t frames = 0;
  for (const Extent& extent : large.extents) {
    for (uint64_t offset = extent.offset;
         frames < large.shape.frames && offset < extent.offset + extent.bytes;
         offset += kFrameBytes, ++frames) {
      const Frame& record = frames_[offset / kFrameBytes];
      if (record.kind != FrameKind::kWhole || record.owner != slot)
        return name + ": a frame belongs to another";
    }
  }
  if (large.shape.tail != kNoTail) {
    const Cell cell = tail_cell(large);
    if (frames_[cell.frame].cells[cell.index] != slot)
      return name + ": the tail belongs to another";
  }
  return {};
}

std::string Pool::audit() const {
  const std::lock_guard lock(mutex_);
  uint32_t free_frames = 0;
  uint32_t idle_frames = 0;
  for (uint32_t frame = 0; frame < frames_.size(); ++frame) {
    std::string problem = audit_frame(frame);
    if (!problem.empty()) return problem;
    if (frames_[frame].kind == FrameKind::kFree) ++free_frames;
    if (frames_[frame].kind == FrameKind::kCut && frames_[frame].num_taken == 0) ++idle_frames;
  }
  if (free_frames != num_free_frames_) return "free frames are miscounted";
  if (idle_frames != num_idle_) return "idle frames are miscounted";
  uint64_t taken_bytes = 0;
  uint64_t taken = 0;
  uint64_t free_slots = 0;
  for (SlotId slot = 0; slot < slots_.size(); ++slot) {
    const SlotState state = slots_[slot].state;
    if (state == SlotState::kVacant) continue;
    const bool even = segment_.header(slot).generation.load(std::memory_order_relaxed) % 2 == 0;
    if (even != (state == SlotState::kCommitted))
      return "slot " + std::to_string(slot) + ": generation and state differ";
    if (state == SlotState::kFree) {
      ++free_slots;
      continue;
    }
    ++taken;
    taken_bytes += slot_bytes(slot);
  }
  if (taken != num_taken_ || taken_bytes != taken_bytes_) return "taken slots are miscounted";
  uint64_t listed = 0;
  for (const FreeList& list : free_small_) listed += list.size;
  for (const auto& [shape, list] : free_large_) listed += list.size;
  if (listed != free_slots) return "free slots and free lists differ";
  for (const auto& [slot, large] : large_) {
    std::string problem = audit_large(slot, large);
    if (!problem.empty()) return problem;
  }
  return {};
}

}  // namespace kvstore
