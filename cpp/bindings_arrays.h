// One Python array, tensor or buffer: where its memory is, and the hold on it.
// Threads: everything here needs the interpreter's lock.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "memory.h"

namespace kvstore {

// Raises `kvstore.errors.<class_name>(message)`.
[[noreturn]] void raise_error(const char* class_name, const std::string& message);
// A value as a message names it: short, whatever it is.
std::string show(pybind11::handle value);

// An array as it describes itself. Byte count and reach are known to fit int64_t.
struct ArrayView {
  uintptr_t data = 0;
  uint64_t item_bytes = 0;
  size_t dims = 0;
  std::array<int64_t, kArrayDimsMax> shape;
  std::array<int64_t, kArrayDimsMax> strides;  // bytes

  std::span<const int64_t> shape_span() const { return {shape.data(), dims}; }
  std::span<const int64_t> strides_span() const { return {strides.data(), dims}; }
};

struct TensorNames;

// Where in the caller's argument something is, for messages.
struct Place {
  std::optional<size_t> block;
  std::optional<size_t> piece;
};

// Python objects held for the sake of their memory. A buffer export also forbids a resize; arrays
// and tensors, which refuse one while they are referenced, are held by reference (much cheaper).
class Exports {
 public:
  Exports() = default;
  Exports(const Exports&) = delete;
  Exports& operator=(const Exports&) = delete;
  ~Exports() { release(); }

  void hold(pybind11::object object) { objects_.push_back(std::move(object)); }
  // False with Python's error set, where the object refuses.
  bool hold_buffer(pybind11::handle object, int flags);
  const Py_buffer& last_buffer() const { return buffers_.back(); }
  void release();

 private:
  std::vector<pybind11::object> objects_;
  std::deque<Py_buffer> buffers_;  // never moved: an export may point into itself
};

// Reads arrays of one argument, checking what each must fulfil by itself: CPU memory that can be
// described, the dtype, writable if a target.
class ArrayReader {
 public:
  ArrayReader(Exports* exports, bool writable, std::optional<std::string> dtype_name);
  ~ArrayReader();

  void read(pybind11::handle object, const Place& place, ArrayView* view);
  // "source block 3, piece 1"
  std::string describe(const Place& place) const;

 private:
  enum class Kind { kNumpy, kTorch, kOther };

  Kind kind_of(pybind11::handle object);
  void read_numpy(pybind11::handle object, const Place& place, ArrayView* view);
  void read_torch(pybind11::handle object, const Place& place, ArrayView* view);
  void read_other(pybind11::handle object, const Place& place, ArrayView* view);
  bool read_buffer(pybind11::handle object, const Place& place, ArrayView* view);
  void read_array_interface(pybind11::handle object, pybind11::handle interface, const Place& place,
                            ArrayView* view);
  void read_dlpack(pybind11::handle object, const Place& place, ArrayView* view);

  void check_dtype(std::string_view name, const Place& place) const;
  void check_view(const ArrayView& view, const Place& place) const;
  [[noreturn]] void refuse(const Place& place, const std::string& why) const;

  Exports* exports_;
  bool writable_;
  std::optional<std::string> dtype_name_;
  // The last type and dtype seen: a batch mostly repeats them.
  pybind11::object last_type_;
  Kind last_kind_ = Kind::kOther;
  pybind11::object last_dtype_;
  std::unique_ptr<TensorNames> tensor_names_;  // made for the first tensor
};

}  // namespace kvstore
