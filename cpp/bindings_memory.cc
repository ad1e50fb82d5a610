#include "bindings_memory.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "types.h"

namespace py = pybind11;

namespace kvstore {

namespace {

bool is_integer(py::handle object) {
  if (PyLong_Check(object.ptr())) return !PyBool_Check(object.ptr());
  // Arrays have an __index__ too: only numpy's scalars are meant.
  return PyIndex_Check(object.ptr()) != 0 && !py::isinstance<py::array>(object) &&
         py::isinstance(object, py::module_::import("numpy").attr("integer"));
}

bool is_pointer_piece(py::handle object) {
  if (!PyTuple_Check(object.ptr()) || PyTuple_GET_SIZE(object.ptr()) != 2) return false;
  return is_integer(PyTuple_GET_ITEM(object.ptr(), 0)) &&
         is_integer(PyTuple_GET_ITEM(object.ptr(), 1));
}

bool is_list(py::handle object) {
  return PyList_Check(object.ptr()) || PyTuple_Check(object.ptr());
}

// A list as it is now: reading an item may run Python code that changes the list.
py::tuple snapshot(py::handle list) {
  return py::reinterpret_steal<py::tuple>(PySequence_Tuple(list.ptr()));
}

// One call's argument, cut into blocks.
class BlockReader {
 public:
  BlockReader(Exports* exports, const BufferRules& rules, std::vector<BlockMemory>* blocks)
      : rules_(rules), reader_(exports, rules.writable, rules.dtype_name), blocks_(blocks) {}

  void read(py::handle object) {
    const bool overlap = is_list(object) ? read_items(snapshot(object)) : read_array(object);
    if (!overlap) return;
    raise_error("InvalidArgument",
                "target blocks overlap: two of them, or two items of one, share memory");
  }

 private:
  // These return true where a target overlaps itself.
  bool read_array(py::handle object);
  bool read_items(const py::tuple& items);

  void read_pieces(const py::tuple& pieces, size_t block);
  void add_array(py::handle object, const Place& place);
  void add_pointer(py::handle pair, const Place& place);
  void add_run(StridedRun run, const Place& place);
  void end_block(size_t block);

  void cut_rows();
  void check_count(size_t given) const;
  void check_bytes(uint64_t bytes, size_t block) const;

  const BufferRules& rules_;
  ArrayReader reader_;
  std::vector<BlockMemory>* blocks_;
  ArrayView view_;
  // Of the block being read.
  BlockMemory::Runs runs_;
  uint64_t bytes_ = 0;
};

// ---- one array ---------------------------------------------------------------------------------

bool BlockReader::read_array(py::handle object) {
  reader_.read(object, {}, &view_);
  if (view_.dims == 0) {
    raise_error("InvalidArgument", reader_.describe({}) + " has no axis that counts blocks");
  }
  const auto given = static_cast<size_t>(view_.shape[0]);
  if (view_.dims == 1 && given != rules_.num_blocks) cut_rows();
  check_count(static_cast<size_t>(view_.shape[0]));
  if (rules_.num_blocks == 0) return false;

  const auto shape = view_.shape_span(), strides = view_.strides_span();
  StridedRun row = make_run(0, view_.item_bytes, shape.subspan(1), strides.subspan(1));
  const uint64_t bytes = row.bytes();
  check_bytes(bytes, 0);
  const bool contiguous = row.dims.empty();
  BlockMemory::Runs rows;
  if (!contiguous) rows.push_back(std::move(row));
  const auto runs = std::make_shared<const BlockMemory::Runs>(std::move(rows));
  blocks_->reserve(rules_.num_blocks);
  for (size_t i = 0; i < rules_.num_blocks; ++i) {
    const uintptr_t origin = view_.data + i * static_cast<uint64_t>(strides[0]);
    if (contiguous) {
      blocks_->emplace_back(origin, bytes);
    } else {
      blocks_->emplace_back(origin, runs);
    }
  }
  if (!rules_.writable) return false;
  // All blocks as one run: decided by its few dimensions, however many blocks there are.
  const BlockMemory whole(0, std::make_shared<const BlockMemory::Runs>(BlockMemory::Runs{
                                 make_run(view_.data, view_.item_bytes, shape, strides)}));
  return any_overlap({&whole, 1});
}

// Makes one row a block of a flat array that holds all blocks' bytes; other arrays stay.
void BlockReader::cut_rows() {
  const size_t num_blocks = rules_.num_blocks;
  const uint64_t total = static_cast<uint64_t>(view_.shape[0]) * view_.item_bytes;
  if (num_blocks == 0 || (!rules_.block_bytes && num_blocks > 1)) return;
  const uint64_t block_bytes = rules_.block_bytes.value_or(total);
  if (total % num_blocks != 0 || total / num_blocks != block_bytes) {
    raise_error("SpecMismatch", reader_.describe({}) + " has " + std::to_string(total) +
                                    " bytes, expected " + std::to_string(num_blocks) +
                                    " blocks of " + std::to_string(block_bytes));
  }
  if (view_.strides[0] == static_cast<int64_t>(view_.item_bytes)) {
    view_.strides[0] = 1;
    view_.item_bytes = 1;
  }
  if (view_.item_bytes == 0 || block_bytes % view_.item_bytes != 0) {
    raise_error("InvalidArgument", reader_.describe({}) + " has items of " +
                                       std::to_string(view_.item_bytes) +
                                       " bytes that cross the borders of blocks");
  }
  view_.dims = 2;
  view_.shape[0] = static_cast<int64_t>(num_blocks);
  view_.shape[1] = static_cast<int64_t>(block_bytes / view_.item_bytes);
  view_.strides[1] = view_.strides[0];
  view_.strides[0] = static_cast<int64_t>(static_cast<uint64_t>(view_.strides[0]) *
                                          (block_bytes / view_.item_bytes));
}

// ---- a list of items ---------------------------------------------------------------------------

bool BlockReader::read_items(const py::tuple& items) {
  check_count(items.size());
  blocks_->reserve(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    const py::handle item = PyTuple_GET_ITEM(items.ptr(), static_cast<py::ssize_t>(i));
    if (is_pointer_piece(item)) {
      add_pointer(item, {i, {}});
    } else if (is_list(item)) {
      read_pieces(snapshot(item), i);
    } else {
      add_array(item, {i, {}});
    }
    end_block(i);
  }
  return rules_.writable && any_overlap(*blocks_);
}

void BlockReader::read_pieces(const py::tuple& pieces, size_t block) {
  runs_.reserve(pieces.size());
  for (size_t i = 0; i < pieces.size(); ++i) {
    const py::handle piece = PyTuple_GET_ITEM(pieces.ptr(), static_cast<py::ssize_t>(i));
    if (is_pointer_piece(piece)) {
      add_pointer(piece, {block, i});
    } else {
      add_array(piece, {block, i});
    }
  }
}

void BlockReader::add_array(py::handle object, const Place& place) {
  reader_.read(object, place, &view_);
  add_run(make_run(view_.data, view_.item_bytes, view_.shape_span(), view_.strides_span()), place);
}

void BlockReader::add_pointer(py::handle pair, const Place& place) {
  std::array<uint64_t, 2> numbers;
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto number = py::reinterpret_steal<py::object>(
        PyNumber_Index(PyTuple_GET_ITEM(pair.ptr(), static_cast<py::ssize_t>(i))));
    numbers[i] = number ? PyLong_AsUnsignedLongLong(number.ptr()) : 0;
    if (PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      raise_error("InvalidArgument", reader_.describe(place) + " is " + show(pair) +
                                         ": neither pointer nor length may be negative or beyond "
                                         "64 bits");
    }
  }
  const auto [pointer, bytes] = numbers;
  if (pointer == 0 || bytes > UINTPTR_MAX - pointer) {
    raise_error("InvalidArgument", reader_.describe(place) + " is " + show(pair) +
                                       ": no memory of a process is there");
  }
  add_run(make_run(pointer, bytes, {}, {}), place);
}

void BlockReader::add_run(StridedRun run, const Place& place) {
  const uint64_t bytes = run.bytes();
  if (bytes > kBlockBytesMax || bytes_ + bytes > kBlockBytesMax) {
    raise_error("BlockTooLarge", reader_.describe(place) + " takes its block beyond " +
                                     std::to_string(kBlockBytesMax) + " bytes");
  }
  bytes_ += bytes;
  append_run(&runs_, std::move(run));
}

void BlockReader::end_block(size_t block) {
  check_bytes(bytes_, block);
  if (runs_.size() == 1 && runs_.front().dims.empty()) {
    blocks_->emplace_back(runs_.front().base, bytes_);
  } else {
    blocks_->emplace_back(0, std::make_shared<const BlockMemory::Runs>(std::move(runs_)));
  }
  runs_.clear();
  bytes_ = 0;
}

// ---- checks ------------------------------------------------------------------------------------

void BlockReader::check_count(size_t given) const {
  if (given == rules_.num_blocks) return;
  raise_error("InvalidArgument", reader_.describe({}) + " has " + std::to_string(given) +
                                     " blocks, expected " + std::to_string(rules_.num_blocks));
}

void BlockReader::check_bytes(uint64_t bytes, size_t block) const {
  if (bytes == 0) {
    raise_error("InvalidArgument",
                reader_.describe({block, {}}) +
                    " has 0 bytes: an empty block has no KV; leave it and its key out");
  }
  if (rules_.block_bytes && bytes != *rules_.block_bytes) {
    raise_error("SpecMismatch", reader_.describe({block, {}}) + " has " + std::to_string(bytes) +
                                    " bytes, expected " + std::to_string(*rules_.block_bytes));
  }
  if (bytes > kBlockBytesMax) {
    raise_error("BlockTooLarge", reader_.describe({block, {}}) + " has " + std::to_string(bytes) +
                                     " bytes, the most is " + std::to_string(kBlockBytesMax));
  }
}

py::bytes gather(const Buffers& buffers, size_t block) {
  const BlockMemory& memory = buffers.blocks().at(block);
  auto bytes = py::reinterpret_steal<py::bytes>(
      PyBytes_FromStringAndSize(nullptr, static_cast<py::ssize_t>(memory.bytes())));
  if (!bytes) throw py::error_already_set();
  char* to = PyBytes_AS_STRING(bytes.ptr());
  MemoryCursor cursor(memory, 0);
  for (auto piece = cursor.next(UINT64_MAX); !piece.empty(); piece = cursor.next(UINT64_MAX)) {
    to = std::copy(piece.begin(), piece.end(), to);
  }
  return bytes;
}

}  // namespace

Buffers::Buffers(py::handle blocks, const BufferRules& rules) {
  BlockReader(&exports_, rules, &blocks_).read(blocks);
}

void Buffers::release() {
  blocks_.clear();
  exports_.release();
}

void bind_memory(py::module_& m) {
  py::class_<Buffers, std::shared_ptr<Buffers>>(m, "Buffers")
      .def(py::init([](const py::object& blocks, size_t num_blocks,
                       std::optional<uint64_t> block_bytes, bool writable,
                       std::optional<std::string> dtype_name) {
             return std::make_unique<Buffers>(
                 blocks, BufferRules{num_blocks, block_bytes, writable, std::move(dtype_name)});
           }),
           py::arg("blocks"), py::arg("num_blocks"), py::arg("block_bytes") = py::none(),
           py::arg("writable") = false, py::arg("dtype_name") = py::none())
      .def_property_readonly("num_blocks", [](const Buffers& self) { return self.blocks().size(); })
      .def("block_bytes", [](const Buffers& self, size_t i) { return self.blocks().at(i).bytes(); })
      .def("gather", &gather, "The block's bytes in logical order.")
      .def("overlaps",
           [](const Buffers& self, const Buffers& other) {
             return any_overlap(self.blocks(), other.blocks());
           })
      .def("release", &Buffers::release);
}

}  // namespace kvstore
