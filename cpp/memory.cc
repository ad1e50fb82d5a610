#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory_resource>
#include <optional>

namespace kvstore {

uint64_t StridedRun::bytes() const {
  uint64_t total = piece_bytes;
  for (const Dim& dim : dims) total *= dim.count;
  return total;
}

StridedRun make_run(uintptr_t base, uint64_t item_bytes, std::span<const int64_t> shape,
                    std::span<const int64_t> strides) {
  std::array<StridedRun::Dim, kArrayDimsMax> dims;  // innermost first
  size_t dims_count = 0;
  uint64_t piece_bytes = item_bytes;
  uint64_t c_stride = item_bytes;
  for (size_t axis = shape.size(); axis-- > 0;) {
    const auto count = static_cast<uint64_t>(shape[axis]);
    const auto stride = strides.empty() ? static_cast<int64_t>(c_stride) : strides[axis];
    c_stride *= count;
    if (count == 0) return StridedRun{base, 0, {}};
    if (count == 1) continue;
    StridedRun::Dim* inner = dims_count > 0 ? &dims[dims_count - 1] : nullptr;
    if (inner == nullptr && static_cast<uint64_t>(stride) == piece_bytes) {
      piece_bytes *= count;
    } else if (inner != nullptr && static_cast<uint64_t>(stride) ==
                                       inner->count * static_cast<uint64_t>(inner->stride)) {
      inner->count *= count;
    } else {
      dims[dims_count++] = {count, stride};
    }
  }
  if (piece_bytes == 0) dims_count = 0;
  StridedRun run{base, piece_bytes, {}};
  run.dims.assign(std::make_reverse_iterator(dims.begin() + dims_count), dims.rend());
  return run;
}

void append_run(std::vector<StridedRun>* runs, StridedRun run) {
  if (run.piece_bytes == 0) return;
  if (!runs->empty() && run.dims.empty() && runs->back().dims.empty() &&
      runs->back().base + runs->back().piece_bytes == run.base) {
    runs->back().piece_bytes += run.piece_bytes;
  } else {
    runs->push_back(std::move(run));
  }
}

std::pair<uintptr_t, uintptr_t> BlockMemory::bounds() const {
  if (runs_ == nullptr) return {origin_, origin_ + bytes_};
  uintptr_t low = UINTPTR_MAX;
  uintptr_t high = 0;
  for (const StridedRun& run : *runs_) {
    uintptr_t first = origin_ + run.base;
    uintptr_t last = first + run.piece_bytes;
    for (const StridedRun::Dim& dim : run.dims) {
      const int64_t reach = static_cast<int64_t>(dim.count - 1) * dim.stride;
      (reach < 0 ? first : last) += static_cast<uintptr_t>(reach);
    }
    low = std::min(low, first);
    high = std::max(high, last);
  }
  return {low, high};
}

BlockMemory::BlockMemory(uintptr_t origin, std::shared_ptr<const Runs> runs) : origin_(origin) {
  for (const StridedRun& run : *runs) bytes_ += run.bytes();
  if (runs->size() == 1 && runs->front().dims.empty()) {
    origin_ += runs->front().base;
  } else {
    runs_ = std::move(runs);
  }
}

// ---- cursor ------------------------------------------------------------------------------------

MemoryCursor::MemoryCursor(const BlockMemory& memory, uint64_t offset)
    : runs_(memory.runs()), origin_(memory.origin()) {
  if (runs_ != nullptr) {
    seek(offset);
  } else {
    piece_ = origin_;
    piece_bytes_ = memory.bytes();
    used_ = std::min(offset, piece_bytes_);
  }
}

void MemoryCursor::seek(uint64_t offset) {
  for (; run_ < runs_->size(); ++run_) {
    const uint64_t run_bytes = (*runs_)[run_].bytes();
    if (offset < run_bytes) break;
    offset -= run_bytes;
  }
  if (run_ == runs_->size()) return;
  const StridedRun& run = (*runs_)[run_];
  piece_ = origin_ + run.base;
  piece_bytes_ = run.piece_bytes;
  used_ = offset % piece_bytes_;
  uint64_t piece_number = offset / piece_bytes_;
  for (size_t i = run.dims.size(); i-- > 0;) {
    index_[i] = piece_number % run.dims[i].count;
    piece_number /= run.dims[i].count;
    piece_ += index_[i] * static_cast<uint64_t>(run.dims[i].stride);
  }
}

bool MemoryCursor::next_piece() {
  if (runs_ == nullptr || run_ == runs_->size()) return false;
  const StridedRun& run = (*runs_)[run_];
  for (size_t i = run.dims.size(); i-- > 0;) {
    const auto stride = static_cast<uint64_t>(run.dims[i].stride);
    if (++index_[i] < run.dims[i].count) {
      piece_ += stride;
      used_ = 0;
      return true;
    }
    piece_ -= (run.dims[i].count - 1) * stride;
    index_[i] = 0;
  }
  piece_bytes_ = used_ = 0;
  ++run_;
  seek(0);
  return run_ < runs_->size();
}

std::span<uint8_t> MemoryCursor::next(uint64_t bytes_max) {
  if (used_ == piece_bytes_ && !next_piece()) return {};
  const uint64_t bytes = std::min(bytes_max, piece_bytes_ - used_);
  auto* start = reinterpret_cast<uint8_t*>(piece_ + used_);
  used_ += bytes;
  return {start, bytes};
}

void zero(const BlockMemory& memory) {
  MemoryCursor cursor(memory, 0);
  for (auto piece = cursor.next(UINT64_MAX); !piece.empty(); piece = cursor.next(UINT64_MAX)) {
    std::memset(piece.data(), 0, piece.size());
  }
}

// ---- overlap -----------------------------------------------------------------------------------
//
// 1. A run becomes a *lattice*: the set of its bytes. Order and direction are forgotten and what
//    touches is merged, so a transposed array is one piece again.
// 2. Each lattice gives *lanes*, whose pieces can be visited in ascending order without a list.
// 3. Lanes are sorted; those with disjoint bounds are done.
// 4. Where bounds intersect, a sweep merges the lanes' pieces by address, skipping what one lane
//    has to itself.

namespace {

constexpr size_t kLooseLanesMax = size_t{1} << 20;

using Arena = std::pmr::monotonic_buffer_resource;  // lattices are many, small and die together
using Dims = std::pmr::vector<StridedRun::Dim>;

struct Lattice {
  explicit Lattice(Arena* arena) : nested(arena), loose(arena) {}

  uint64_t piece_bytes = 0;
  uint64_t shift = 0;         // from the run's base down to its lowest byte
  Dims nested;                // strides ascending, each clear of what lies inside
  uint64_t nested_reach = 0;  // from their lowest byte past the highest
  Dims loose;                 // the others: one lane per combination
  uint64_t lanes = 1;
  bool repeats = false;  // two elements share a byte, for certain
};

Lattice make_lattice(const StridedRun& run, Arena* arena) {
  Lattice lattice(arena);
  lattice.piece_bytes = run.piece_bytes;
  lattice.nested_reach = run.piece_bytes;
  Dims dims(run.dims.begin(), run.dims.end(), arena);
  for (auto& dim : dims) {
    if (dim.stride < 0) lattice.shift += (dim.count - 1) * static_cast<uint64_t>(-dim.stride);
    dim.stride = std::abs(dim.stride);
  }
  std::sort(dims.begin(), dims.end(), [](auto& a, auto& b) { return a.stride < b.stride; });
  for (const auto& dim : dims) {
    const auto stride = static_cast<uint64_t>(dim.stride);
    const uint64_t reach = (dim.count - 1) * stride;
    StridedRun::Dim* inner = lattice.nested.empty() ? nullptr : &lattice.nested.back();
    const uint64_t steps = inner != nullptr && stride % static_cast<uint64_t>(inner->stride) == 0
                               ? stride / static_cast<uint64_t>(inner->stride)
                               : 0;
    if (inner == nullptr && stride <= lattice.piece_bytes) {
      lattice.repeats |= stride < lattice.piece_bytes;
      lattice.piece_bytes += reach;
    } else if (steps > 0 && steps <= inner->count) {
      lattice.repeats |= steps < inner->count;
      inner->count += (dim.count - 1) * steps;
    } else if (stride >= lattice.nested_reach) {
      lattice.nested.push_back(dim);
    } else {
      lattice.loose.push_back(dim);
      if (__builtin_mul_overflow(lattice.lanes, dim.count, &lattice.lanes)) {
        lattice.lanes = UINT64_MAX;
      }
      continue;
    }
    lattice.nested_reach += reach;
  }
  return lattice;
}

// Pieces of nested dimensions, in ascending order. `lattice` null: one piece, all of it.
struct Lane {
  uintptr_t start;  // of the next piece to visit
  uintptr_t base;
  uintptr_t end;
  const Lattice* lattice;
  uint32_t side;

  uint64_t piece_bytes() const { return lattice == nullptr ? end - base : lattice->piece_bytes; }

  // Moves `start` to the last piece that starts at or before `address`; returns the start of the
  // piece after that, if there is one.
  // REQUIRES: address >= start.
  std::optional<uintptr_t> skip_to(uintptr_t address);
};

std::optional<uintptr_t> Lane::skip_to(uintptr_t address) {
  if (lattice == nullptr) return std::nullopt;
  const auto& dims = lattice->nested;
  uint64_t rest = address - base;
  uint64_t after = 0;  // the successor, relative to base; 0 while all dimensions are at their end
  start = base;
  for (size_t i = dims.size(); i-- > 0;) {
    const auto stride = static_cast<uint64_t>(dims[i].stride);
    const uint64_t index = std::min(rest / stride, dims[i].count - 1);
    rest -= index * stride;
    // Digits inside this one start again in the successor, unless one of them can still rise.
    if (index + 1 < dims[i].count) after = start - base + (index + 1) * stride;
    start += index * stride;
  }
  return after == 0 ? std::nullopt : std::optional(base + after);
}

class LaneList {
 public:
  // False where the blocks are known to overlap themselves (asked only if `refuse_repeats`), or
  // would need too many lanes.
  bool add(std::span<const BlockMemory> blocks, uint32_t side, bool refuse_repeats) {
    lanes_.reserve(lanes_.size() + blocks.size());
    const BlockMemory::Runs* known = nullptr;
    for (const BlockMemory& block : blocks) {
      if (block.bytes() == 0) continue;
      if (block.runs() == nullptr) {
        const uintptr_t base = block.origin();
        lanes_.push_back({base, base, base + block.bytes(), nullptr, side});
        continue;
      }
      if (block.runs() != known) {
        known = block.runs();
        auto& lattices = lattices_.emplace_back();
        lattices.reserve(known->size());
        for (const StridedRun& run : *known) lattices.push_back(make_lattice(run, &arena_));
      }
      for (size_t i = 0; i < known->size(); ++i) {
        const Lattice& lattice = lattices_.back()[i];
        if (lattice.piece_bytes == 0) continue;
        if (lattice.repeats && refuse_repeats) return false;
        if (lattice.lanes > kLooseLanesMax - loose_lanes_) return false;
        loose_lanes_ += lattice.lanes - 1;
        add_lanes(lattice, block.origin() + (*known)[i].base - lattice.shift, side);
      }
    }
    return true;
  }

  // True where two pieces overlap; of different sides only, if there are two.
  bool overlap(bool two_sides);

 private:
  void add_lanes(const Lattice& lattice, uintptr_t base, uint32_t side) {
    for (uint64_t number = 0; number < lattice.lanes; ++number) {
      uintptr_t lane = base;
      uint64_t rest = number;
      for (const auto& dim : lattice.loose) {
        lane += rest % dim.count * static_cast<uint64_t>(dim.stride);
        rest /= dim.count;
      }
      const Lattice* pieces = lattice.nested.empty() ? nullptr : &lattice;
      const uint64_t reach = pieces == nullptr ? lattice.piece_bytes : lattice.nested_reach;
      lanes_.push_back({lane, lane, lane + reach, pieces, side});
    }
  }

  std::vector<Lane> lanes_;
  Arena arena_;
  std::pmr::deque<std::pmr::vector<Lattice>> lattices_{&arena_};  // lanes point into these
  size_t loose_lanes_ = 0;
};

// Merges the pieces of lanes by address. A piece overlaps one before it if it starts before the end
// of what was visited.
bool sweep(std::span<Lane> lanes, bool two_sides) {
  auto later = [](const Lane& a, const Lane& b) { return a.start > b.start; };
  std::make_heap(lanes.begin(), lanes.end(), later);
  std::array<uintptr_t, 2> visited_end{};
  size_t live = lanes.size();
  while (live > 0) {
    std::pop_heap(lanes.begin(), lanes.begin() + live, later);
    Lane& lane = lanes[live - 1];
    if (lane.start < visited_end[two_sides ? 1 - lane.side : 0]) return true;
    if (live == 1) return false;
    // Its pieces up to the next lane's start lie among its own: only the last of them counts.
    const std::optional<uintptr_t> after = lane.skip_to(lanes.front().start);
    uintptr_t& end = visited_end[two_sides ? lane.side : 0];
    end = std::max(end, lane.start + lane.piece_bytes());
    if (after) {
      lane.start = *after;
      std::push_heap(lanes.begin(), lanes.begin() + live, later);
    } else {
      --live;
    }
  }
  return false;
}

bool LaneList::overlap(bool two_sides) {
  auto earlier = [](const Lane& a, const Lane& b) { return a.base < b.base; };
  if (!std::is_sorted(lanes_.begin(), lanes_.end(), earlier)) {
    std::sort(lanes_.begin(), lanes_.end(), earlier);
  }
  for (size_t first = 0; first < lanes_.size();) {
    uintptr_t end = lanes_[first].end;
    bool mixed = !two_sides;
    size_t last = first + 1;
    for (; last < lanes_.size() && lanes_[last].base < end; ++last) {
      end = std::max(end, lanes_[last].end);
      mixed |= lanes_[last].side != lanes_[first].side;
    }
    if (last - first > 1 && mixed &&
        sweep(std::span(lanes_).subspan(first, last - first), two_sides)) {
      return true;
    }
    first = last;
  }
  return false;
}

}  // namespace

bool any_overlap(std::span<const BlockMemory> blocks) {
  LaneList lanes;
  return !lanes.add(blocks, 0, true) || lanes.overlap(false);
}

bool any_overlap(std::span<const BlockMemory> a, std::span<const BlockMemory> b) {
  LaneList lanes;
  return !lanes.add(a, 0, false) || !lanes.add(b, 1, false) || lanes.overlap(true);
}

}  // namespace kvstore
