// The caller's memory as the core sees it: per block, strided runs of pieces in logical order.
// Nothing is copied or owned; whoever made the description keeps the memory alive.
// Threads: a BlockMemory is immutable once made; any thread may read it. A MemoryCursor belongs to
// one thread. Addresses are integers here: runs are described relative to their block, so that the
// blocks of one array share one description.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace kvstore {

inline constexpr size_t kArrayDimsMax = 64;  // the buffer protocol's own bound

// A strided run: `count[0] x count[1] x ...` pieces of `piece_bytes` contiguous bytes each, the
// last dimension fastest. No dimensions: one contiguous piece. Dimensions that continue each other
// are merged when the run is made, so a contiguous array always has none.
struct StridedRun {
  struct Dim {
    uint64_t count;  // at least 2
    int64_t stride;  // bytes; negative or zero too
  };
  uintptr_t base = 0;        // address of the first piece, relative to the block's origin
  uint64_t piece_bytes = 0;  // zero: the run is empty and has no dimensions
  std::vector<Dim> dims;

  uint64_t bytes() const;
};

// Makes a run from an array's description (as the buffer protocol gives it; strides in bytes).
// `strides` empty: C order.
// REQUIRES: at most kArrayDimsMax dimensions; byte count and reach fit int64_t.
StridedRun make_run(uintptr_t base, uint64_t item_bytes, std::span<const int64_t> shape,
                    std::span<const int64_t> strides);

// Adds `run` behind `runs`: dropped if empty, merged where it continues the last one.
void append_run(std::vector<StridedRun>* runs, StridedRun run);

// One block's memory: runs one after the other, in the block's byte order. A contiguous block (the
// common one) is an address and a length; any other shares its runs with its siblings.
class BlockMemory {
 public:
  using Runs = std::vector<StridedRun>;

  BlockMemory() = default;
  BlockMemory(uintptr_t origin, uint64_t bytes) : origin_(origin), bytes_(bytes) {}
  BlockMemory(uintptr_t origin, std::shared_ptr<const Runs> runs);

  uint64_t bytes() const { return bytes_; }
  uintptr_t origin() const { return origin_; }  // of the one piece, where `runs` is null
  const Runs* runs() const { return runs_.get(); }
  // Half-open range of the addresses it touches.
  std::pair<uintptr_t, uintptr_t> bounds() const;

 private:
  uintptr_t origin_ = 0;
  uint64_t bytes_ = 0;
  std::shared_ptr<const Runs> runs_;  // null: contiguous
};

// Walks a block's memory from any byte offset, handing out contiguous pieces.
// REQUIRES: the BlockMemory outlives the cursor.
class MemoryCursor {
 public:
  MemoryCursor(const BlockMemory& memory, uint64_t offset);
  // The next contiguous piece, at most `bytes_max` long; empty at the end.
  // REQUIRES: bytes_max > 0.
  std::span<uint8_t> next(uint64_t bytes_max);

 private:
  void seek(uint64_t offset);
  bool next_piece();

  const BlockMemory::Runs* runs_;
  uintptr_t origin_;
  size_t run_ = 0;
  uintptr_t piece_ = 0;  // address of the current piece
  uint64_t used_ = 0;    // bytes of it handed out
  uint64_t piece_bytes_ = 0;
  std::array<uint64_t, kArrayDimsMax> index_;  // of the current piece; as many as the run has dims
};

// True where two of these blocks (or one block with itself) share a byte: such targets are refused.
// Exact; the work is a sort of the runs where bounds are disjoint, and grows with the number of
// pieces that alternate where they are not. Only layouts that fall apart into more than a million
// runs (dimensions that interleave without nesting) are called overlapping without a proof.
bool any_overlap(std::span<const BlockMemory> blocks);
// True where any byte of `a` is also a byte of `b`; what either shares with itself does not count.
bool any_overlap(std::span<const BlockMemory> a, std::span<const BlockMemory> b);

void zero(const BlockMemory& memory);

}  // namespace kvstore
