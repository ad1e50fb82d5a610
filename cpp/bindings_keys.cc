// Keys and checksums for Python: converts, drops the lock where the work is long, nothing else.
// kvstore/keys.py is the only caller and checks what people pass; what is checked here keeps a
// mistake of ours from reading beyond a buffer.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bindings.h"
#include "bindings_arrays.h"
#include "chain.h"
#include "crc32c.h"
#include "sha256.h"

namespace py = pybind11;

namespace kvstore {
namespace {

// About 50 us of work, from which on the interpreter's lock is dropped (taking it back beside a
// busy thread costs up to 5 ms, so not for less).
constexpr size_t kLongHashBytes = size_t{64} << 10;
constexpr size_t kLongChecksumBytes = size_t{1} << 20;

// Runs `work` without the interpreter's lock if it is long.
template <typename Work>
void run_unlocked_if(bool is_long, Work work) {
  without_gil_if(is_long, work);
}

// An array's items as they lie.
template <typename Item>
std::span<const Item> items_of(const py::buffer_info& array, const char* name) {
  const bool plain = array.ndim == 1 && array.itemsize == sizeof(Item) &&
                     (array.size < 2 || array.strides[0] == array.itemsize) &&
                     reinterpret_cast<uintptr_t>(array.ptr) % alignof(Item) == 0;
  if (!plain) {
    raise_error("InvalidArgument", std::string(name) + " must be one contiguous row of " +
                                       std::to_string(sizeof(Item)) + "-byte integers");
  }
  return {static_cast<const Item*>(array.ptr), static_cast<size_t>(array.size)};
}

ChainHash chain_hash(const py::bytes& hash) {
  const auto bytes = static_cast<std::string_view>(hash);
  ChainHash result;
  if (bytes.size() != result.size()) {
    raise_error("InvalidArgument",
                "a chain starts from 28 bytes, not " + std::to_string(bytes.size()));
  }
  std::memcpy(result.data(), bytes.data(), result.size());
  return result;
}

// New bytes of `count` keys, to be filled.
py::bytes room_for(size_t count) {
  PyObject* bytes = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count * kKeyBytes));
  if (bytes == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::bytes>(bytes);
}

std::span<BlockKey> keys_in(const py::bytes& room, size_t count) {
  return {reinterpret_cast<BlockKey*>(PyBytes_AS_STRING(room.ptr())), count};
}

py::bytes chain_keys_of(const py::bytes& parent, const py::buffer& tokens, size_t block_tokens,
                        const std::optional<py::list>& extra, uint16_t rank, uint16_t world_size) {
  const py::buffer_info array = tokens.request();
  const auto row = items_of<uint32_t>(array, "tokens");
  const ChainHash start = chain_hash(parent);
  if (block_tokens == 0) raise_error("InvalidArgument", "block_tokens is 0");
  const size_t count = row.size() / block_tokens;

  py::tuple held;  // keeps the extra keys alive, whatever becomes of the list
  std::vector<std::string_view> more;
  size_t bytes = count * (block_tokens * sizeof(uint32_t) + 64);
  if (extra) {
    held = py::tuple(*extra);
    if (held.size() != count) raise_error("InvalidArgument", "extra needs one item per block");
    for (const py::handle item : held) {
      more.push_back(item.is_none() ? std::string_view() : item.cast<std::string_view>());
      bytes += more.back().size();
    }
  }
  py::bytes room = room_for(count);
  const auto keys = keys_in(room, count);
  run_unlocked_if(bytes >= kLongHashBytes, [&] {
    chain_keys(start, row, block_tokens, more, Shard{rank, world_size}, keys);
  });
  return room;
}

py::bytes id_keys_of(const py::bytes& root, const py::buffer& ids, uint16_t rank,
                     uint16_t world_size) {
  const py::buffer_info array = ids.request();
  const auto row = items_of<uint64_t>(array, "ids");
  const ChainHash start = chain_hash(root);
  py::bytes room = room_for(row.size());
  const auto keys = keys_in(room, row.size());
  run_unlocked_if(row.size() * 64 >= kLongHashBytes,
                  [&] { id_keys(start, row, Shard{rank, world_size}, keys); });
  return room;
}

// Integers from 0 to `Item`'s largest, and what they are called in messages.
template <typename Item>
constexpr const char* kItemName = nullptr;
template <>
constexpr const char* kItemName<uint32_t> = "token";
template <>
constexpr const char* kItemName<uint64_t> = "id";

template <typename Item>
[[noreturn]] void refuse_item(size_t position, py::handle item) {
  const std::string shown = show(item);
  const std::string name = kItemName<Item>;
  raise_error("InvalidArgument", name + " " + std::to_string(position) + " is " + shown + " (" +
                                     Py_TYPE(item.ptr())->tp_name + "); " + name +
                                     "s are integers from 0 to " +
                                     std::to_string(std::numeric_limits<Item>::max()));
}

// An integer by Python's own rule (__index__), bool apart: True is no token.
template <typename Item>
Item item_of(size_t position, PyObject* item) {
  py::object number;  // holds what __index__ returned
  if (!PyLong_CheckExact(item)) {
    if (!PyBool_Check(item)) number = py::reinterpret_steal<py::object>(PyNumber_Index(item));
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) throw py::error_already_set();
    PyErr_Clear();
    if (!number) refuse_item<Item>(position, item);
  }
  const unsigned long long value = PyLong_AsUnsignedLongLong(number ? number.ptr() : item);
  const bool out_of_range = value == ~0ull && PyErr_Occurred();
  PyErr_Clear();
  if (out_of_range || value > std::numeric_limits<Item>::max()) refuse_item<Item>(position, item);
  return static_cast<Item>(value);
}

// A list of Python integers as one row of `Item`. In native code because numpy takes longer over
// 131,072 of them than hashing them takes, and turns True into a token.
template <typename Item>
py::bytes pack(const py::object& list) {
  const auto items =
      py::reinterpret_steal<py::object>(PySequence_Fast(list.ptr(), "pass a list of integers"));
  if (!items) throw py::error_already_set();
  std::vector<Item> row;
  row.reserve(static_cast<size_t>(PySequence_Fast_GET_SIZE(items.ptr())));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.ptr()); ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(items.ptr(), i);
    if (PyLong_CheckExact(item)) {
      row.push_back(item_of<Item>(row.size(), item));
    } else {  // held: __index__ may change the list, which is why its size is read each time
      const auto held = py::reinterpret_borrow<py::object>(item);
      row.push_back(item_of<Item>(row.size(), held.ptr()));
    }
  }
  return {reinterpret_cast<const char*>(row.data()), row.size() * sizeof(Item)};
}

py::bytes sha256_of(const py::bytes& data) {
  const auto bytes = static_cast<std::string_view>(data);
  Sha256Digest digest;
  run_unlocked_if(bytes.size() >= kLongHashBytes,
                  [&] { digest = sha256(bytes.data(), bytes.size()); });
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

uint32_t crc32c_of(const py::buffer& data, uint32_t crc) {
  Py_buffer view;
  if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) throw py::error_already_set();
  run_unlocked_if(static_cast<size_t>(view.len) >= kLongChecksumBytes,
                  [&] { crc = crc32c(crc, view.buf, static_cast<size_t>(view.len)); });
  PyBuffer_Release(&view);
  return crc;
}

}  // namespace

void bind_keys(py::module_& m) {
  m.def("chain_keys", &chain_keys_of, py::arg("parent"), py::arg("tokens"), py::arg("block_tokens"),
        py::arg("extra"), py::arg("rank"), py::arg("world_size"));
  m.def("id_keys", &id_keys_of, py::arg("root"), py::arg("ids"), py::arg("rank"),
        py::arg("world_size"));
  m.def("pack_tokens", &pack<uint32_t>, py::arg("tokens"));
  m.def("pack_ids", &pack<uint64_t>, py::arg("ids"));
  m.def("sha256", &sha256_of, py::arg("data"));
  m.def("crc32c", &crc32c_of, py::arg("data"), py::arg("crc") = 0);
  m.def("sha256_path", &sha256_path);
  m.def("crc32c_path", &crc32c_path);
}

}  // namespace kvstore
