// Python's objects as block memories. Bindings without brains: describe, check, hold.
// Threads: everything here needs the interpreter's lock, but for reading `blocks()`.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bindings_arrays.h"
#include "memory.h"

namespace kvstore {

// What the blocks of a call must be.
struct BufferRules {
  size_t num_blocks = 0;
  std::optional<uint64_t> block_bytes;    // none: each block any size from 1
  bool writable = false;                  // a target: writable, and no byte twice
  std::optional<std::string> dtype_name;  // none: opaque, any dtype
};

// The memory of a call's blocks, and the hold on the Python objects it lies in: they live and keep
// their size until `release` or destruction.
// Owner: the caller of the native work keeps this alive until that work is over, and lets the last
// reference go with the interpreter's lock held.
class Buffers {
 public:
  // `blocks` is one array of shape (n, ...) whose axis 0 counts the blocks; or one flat array of n
  // blocks' bytes; or a list or tuple of n items, an item being an array or a list of pieces, a
  // piece an array or a tuple (pointer, length).
  // Throws InvalidArgument, SpecMismatch or BlockTooLarge (of kvstore.errors); then holds nothing.
  Buffers(pybind11::handle blocks, const BufferRules& rules);
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  // Empty once released.
  const std::vector<BlockMemory>& blocks() const { return blocks_; }
  void release();

 private:
  Exports exports_;
  std::vector<BlockMemory> blocks_;
};

void bind_memory(pybind11::module_& m);

}  // namespace kvstore
