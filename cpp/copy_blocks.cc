#include "copy_blocks.h"

#include <algorithm>
#include <atomic>
#include <span>

#include "crc32c.h"

namespace kvstore {
namespace {

// What one thread copies at a time: parts of one block, about this many bytes.
constexpr uint64_t kUnitBytes = uint64_t{1} << 20;
// Below this many bytes in all, waking a helper costs more than it brings.
constexpr uint64_t kAloneBytes = uint64_t{512} << 10;
// What the kernel enters at once, unless told otherwise.
constexpr size_t kAroundBytes = size_t{64} << 10;

struct Unit {
  size_t item;
  uint64_t first;
  uint64_t end;
};

// Cuts [first, end) of a block into units along part borders.
void add_units(size_t item, uint64_t first, uint64_t end, uint64_t part_bytes,
               std::vector<Unit>* units) {
  const uint64_t step = std::max<uint64_t>(1, kUnitBytes / part_bytes) * part_bytes;
  for (uint64_t at = first; at < end; at += step)
    units->push_back({item, at, std::min(end, at + step)});
}

// Walks a slot's memory from a byte offset, like MemoryCursor walks the caller's.
class SlotCursor {
 public:
  SlotCursor(uint8_t* base, std::span<const Extent> extents, uint64_t offset)
      : base_(base), extents_(extents) {
    while (offset > 0 && offset >= extents_[at_].bytes) offset -= extents_[at_++].bytes;
    used_ = offset;
  }
  std::span<uint8_t> next(uint64_t bytes_max) {
    if (used_ == extents_[at_].bytes) {
      ++at_;
      used_ = 0;
    }
    const uint64_t bytes = std::min(bytes_max, extents_[at_].bytes - used_);
    uint8_t* const start = base_ + extents_[at_].offset + used_;
    used_ += bytes;
    return {start, bytes};
  }

 private:
  uint8_t* base_;
  std::span<const Extent> extents_;
  size_t at_ = 0;
  uint64_t used_ = 0;
};

enum class Direction { kWrite, kRead };

// A first read enters all the pages around into this process's page tables, to be written too; a
// first write enters one.
void enter_by_reading(std::span<const uint8_t> memory) {
  for (size_t at = 0; at < memory.size(); at += kAroundBytes)
    static_cast<void>(*static_cast<const volatile uint8_t*>(&memory[at]));
}

// Copies [unit.first, unit.end) between a slot and the caller, part by part, with one checksum per
// part.
template <Direction direction, class PerPart>
void copy_unit(uint8_t* base, std::span<const Extent> extents, const BlockMemory& memory,
               uint64_t memory_offset, const Unit& unit, uint64_t part_bytes, PerPart&& per_part) {
  SlotCursor slot(base, extents, unit.first);
  MemoryCursor caller(memory, memory_offset);
  std::span<uint8_t> theirs;
  for (uint64_t at = unit.first; at < unit.end;) {
    const uint64_t part = at / part_bytes;
    const uint64_t part_end = std::min(unit.end, (part + 1) * part_bytes);
    uint32_t crc = 0;
    while (at < part_end) {
      if (theirs.empty()) theirs = caller.next(unit.end - at);
      const std::span<uint8_t> ours = slot.next(std::min<uint64_t>(theirs.size(), part_end - at));
      if (direction == Direction::kWrite) enter_by_reading(ours);
      crc = direction == Direction::kWrite
                ? copy_crc32c(crc, ours.data(), theirs.data(), ours.size())
                : copy_crc32c(crc, theirs.data(), ours.data(), ours.size());
      theirs = theirs.subspan(ours.size());
      at += ours.size();
    }
    per_part(part, crc);
  }
}

}  // namespace

Status early_end(const CallLimits& limits) {
  if (limits.stopped()) return Status::kCancelled;
  return limits.passed() ? Status::kTimedOut : Status::kOk;
}

Status write_blocks(uint8_t* segment, Copier& copier, uint64_t part_bytes, GrantBatch& grants,
                    const std::vector<BlockMemory>& blocks, ByteRange range,
                    const CallLimits& limits) {
  std::vector<Unit> units;
  uint64_t bytes = 0;
  for (size_t i = 0; i < grants.items.size(); ++i) {
    if (grants.statuses[i] != Status::kOk) continue;
    const uint64_t end = std::min(grants.items[i].length - range.first, range.bytes) + range.first;
    add_units(i, range.first, end, part_bytes, &units);
    bytes += end - range.first;
  }
  std::atomic<Status> ended{Status::kOk};
  copier.run(units.size(), bytes < kAloneBytes, [&](size_t number) {
    if (ended.load(std::memory_order_relaxed) != Status::kOk) return;
    if (const Status early = early_end(limits); early != Status::kOk) {
      ended.store(early);
      return;
    }
    const Unit& unit = units[number];
    GrantBatch::Item& item = grants.items[unit.item];
    copy_unit<Direction::kWrite>(segment, item.extents, blocks[unit.item], unit.first - range.first,
                                 unit, part_bytes,
                                 [&](uint64_t part, uint32_t crc) { item.parts[part] = crc; });
  });
  return ended.load();
}

GetOutcome read_blocks(uint8_t* segment, Copier& copier, const LeaseBatch& leases, size_t first,
                       const std::vector<BlockMemory>& blocks, ByteRange range,
                       const CallLimits& limits) {
  GetOutcome outcome;
  outcome.statuses.assign(blocks.size(), Status::kMiss);
  outcome.bytes.assign(blocks.size(), 0);
  std::vector<Unit> units;
  uint64_t bytes = 0;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const std::optional<Found>& found = leases.items[first + i];
    if (!found) continue;
    outcome.statuses[i] = Status::kOk;
    const uint64_t end = std::min(found->length - range.first, range.bytes) + range.first;
    outcome.bytes[i] = end - range.first;
    if (outcome.bytes[i] > blocks[i].bytes() && !outcome.too_small)
      outcome.too_small = {i, found->length};
    add_units(i, range.first, end, found->part_bytes, &units);
    bytes += outcome.bytes[i];
  }
  if (outcome.too_small) return outcome;
  std::vector<std::atomic<Status>> failed(blocks.size());
  for (auto& status : failed) status.store(Status::kOk, std::memory_order_relaxed);
  copier.run(units.size(), bytes < kAloneBytes, [&](size_t number) {
    const Unit& unit = units[number];
    if (const Status early = early_end(limits); early != Status::kOk) {
      failed[unit.item].store(early, std::memory_order_relaxed);
      return;
    }
    const Found& found = *leases.items[first + unit.item];
    copy_unit<Direction::kRead>(segment, found.extents, blocks[unit.item], unit.first - range.first,
                                unit, found.part_bytes, [&](uint64_t part, uint32_t crc) {
                                  if (found.parts[part] != crc)
                                    failed[unit.item].store(Status::kCorrupt);
                                });
  });
  for (size_t i = 0; i < blocks.size(); ++i) {
    const Status status = failed[i].load(std::memory_order_relaxed);
    if (status == Status::kOk) continue;
    zero(blocks[i]);
    outcome.statuses[i] = status;
    outcome.bytes[i] = 0;
  }
  return outcome;
}

}  // namespace kvstore
