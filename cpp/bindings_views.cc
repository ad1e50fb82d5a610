// Leases, views and grants as Python sees them.
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>

#include "bindings.h"

namespace py = pybind11;

namespace kvstore {
namespace {

// A lease that views hang on: it ends with close() and the last export, whichever is later.
struct ViewHold {
  std::shared_ptr<Transport> store;
  std::shared_ptr<LeaseBatch> leases;
  pid_t pid;
  size_t exports = 0;
  bool closed = false;
  bool ended = false;

  void end_if_unused() {
    if (!closed || exports > 0 || getpid() != pid) return;
    ended = true;
    store->release(*leases);
  }
};

// One extent of a block. Only memoryviews over it are handed out; it counts them, which pybind11's
// buffers cannot.
struct ExtentObject {
  PyObject_HEAD std::shared_ptr<ViewHold>* hold;
  uint8_t* data;
  Py_ssize_t bytes;
};

int extent_getbuffer(PyObject* self, Py_buffer* view, int flags) {
  auto* extent = reinterpret_cast<ExtentObject*>(self);
  if ((*extent->hold)->ended) {
    PyErr_SetString(PyExc_BufferError, "the lease has ended; these bytes may be another block's");
    return -1;
  }
  if (PyBuffer_FillInfo(view, self, extent->data, extent->bytes, 1, flags) != 0) return -1;
  ++(*extent->hold)->exports;
  return 0;
}

void extent_releasebuffer(PyObject* self, Py_buffer*) {
  ViewHold& hold = **reinterpret_cast<ExtentObject*>(self)->hold;
  --hold.exports;
  hold.end_if_unused();
}

void extent_dealloc(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  delete reinterpret_cast<ExtentObject*>(self)->hold;
  type->tp_free(self);
  Py_DECREF(type);
}

PyTypeObject* extent_type() {
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(extent_dealloc)},
      {Py_bf_getbuffer, reinterpret_cast<void*>(extent_getbuffer)},
      {Py_bf_releasebuffer, reinterpret_cast<void*>(extent_releasebuffer)},
      {0, nullptr},
  };
  static PyType_Spec spec = {"kvstore._core.Extent", sizeof(ExtentObject), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  static PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  return reinterpret_cast<PyTypeObject*>(type);
}

py::object make_view(const std::shared_ptr<ViewHold>& hold, uint8_t* data, uint64_t bytes) {
  PyTypeObject* const type = extent_type();
  const py::object extent = py::reinterpret_steal<py::object>(type->tp_alloc(type, 0));
  if (!extent) throw py::error_already_set();
  auto* object = reinterpret_cast<ExtentObject*>(extent.ptr());
  object->hold = new std::shared_ptr<ViewHold>(hold);
  object->data = data;
  object->bytes = static_cast<Py_ssize_t>(bytes);
  return py::reinterpret_steal<py::object>(PyMemoryView_FromObject(extent.ptr()));
}

// Checksums are of whole parts.
void check_parts(uint64_t first, uint64_t bytes, uint64_t length, uint64_t part_bytes) {
  const bool to_the_end = bytes >= length - first;
  if (first % part_bytes == 0 && (to_the_end || bytes % part_bytes == 0)) return;
  raise_error("SpecMismatch", "this block was put in parts of " + std::to_string(part_bytes) +
                                  " bytes (another number of ranks?); read it whole");
}

// ---- leases ------------------------------------------------------------------------------------

class Leases {
 public:
  Leases(std::shared_ptr<Store> store, std::shared_ptr<Transport> transport,
         std::shared_ptr<LeaseBatch> batch)
      : store_(std::move(store)), transport_(std::move(transport)), batch_(std::move(batch)) {}
  ~Leases() {
    if (getpid() == store_->pid()) release();
  }
  Leases(const Leases&) = delete;
  Leases& operator=(const Leases&) = delete;

  std::vector<uint64_t> lengths() const {
    std::vector<uint64_t> lengths;
    for (const auto& item : batch_->items) lengths.push_back(item ? item->length : 0);
    return lengths;
  }

  py::tuple read(size_t first, const Buffers& buffers, uint64_t range_first, uint64_t range_bytes,
                 int64_t timeout_ns) {
    const Store::Call call(*store_);
    check_open();
    // Kept beside the call: another thread may give the lease back meanwhile.
    const std::shared_ptr<LeaseBatch> batch = batch_;
    const std::vector<BlockMemory>& blocks = buffers.blocks();
    if (first + blocks.size() > batch->items.size()) {
      raise_error("InvalidArgument", "more targets than leased blocks");
    }
    for (size_t i = 0; i < blocks.size(); ++i) {
      const auto& item = batch->items[first + i];
      if (!item) continue;
      if (range_first >= item->length)
        raise_error("InvalidArgument", "the part lies beyond the block's end");
      check_parts(range_first, range_bytes, item->length, item->part_bytes);
    }
    const Loans::Loan loan(call->loans(), blocks, true);
    if (!loan.granted()) raise_busy();
    GetOutcome outcome;
    without_gil_if(store_->gives_up_lock(total_bytes(blocks)), [&] {
      outcome = call->read(*batch, first, blocks, {range_first, range_bytes},
                           store_->limits_for(timeout_ns));
    });
    if (outcome.revoked) {
      raise_error("LeaseRevoked",
                  "the lease passed its deadline and its memory was needed; match again");
    }
    return to_python(outcome, blocks);
  }

  // One list of memoryviews a block, one memoryview an extent.
  py::list views() {
    const Store::Call call(*store_);
    check_open();
    if (hold_ == nullptr) {
      bool view_granted = false;
      without_gil_if(store_->gives_up_lock(0), [&] { view_granted = call->make_view(*batch_); });
      if (!view_granted) {
        raise_error("ViewsRefused",
                    "views would hold " + std::to_string(batch_->bytes) +
                        " more bytes, the limit is " + std::to_string(call->view_bytes_max()) +
                        " in all; use read(), close other views, or open with a larger "
                        "view_fraction");
      }
      hold_ = std::make_shared<ViewHold>(ViewHold{call.transport(), batch_, store_->pid()});
    }
    py::list blocks;
    for (size_t i = 0; i < batch_->items.size(); ++i) {
      py::list extents;
      for (const std::span<uint8_t> piece : call->view(*batch_, i)) {
        extents.append(make_view(hold_, piece.data(), piece.size()));
      }
      blocks.append(std::move(extents));
    }
    return blocks;
  }

  py::bytes verify() {
    const Store::Call call(*store_);
    check_open();
    std::vector<Status> statuses;
    without_gil_if(true, [&] { statuses = call->verify(*batch_); });
    return to_bytes(statuses);
  }

  py::bytes ticket() {
    const Store::Call call(*store_);
    check_open();
    AttemptId ticket;
    without_gil_if(store_->gives_up_lock(0), [&] { ticket = call->ticket(*batch_); });
    return {reinterpret_cast<const char*>(&ticket), sizeof ticket};
  }

  // Whether the lease was held until now. With views exported it lives on until the last is gone.
  // The store may be closed before.
  bool release() {
    check_fork(store_->pid());
    if (released_) return held_;
    released_ = true;
    if (hold_ != nullptr) {
      hold_->closed = true;
      hold_->end_if_unused();
    } else {
      without_gil_if(store_->gives_up_lock(0),
                     [&] { held_ = transport_->release(*batch_) == Released::kHeld; });
    }
    transport_.reset();
    return held_;
  }

  size_t num_exported() const { return hold_ == nullptr ? 0 : hold_->exports; }

 private:
  void check_open() const {
    if (released_) raise_error("StoreClosed", "the lease was given back; match again");
  }

  const std::shared_ptr<Store> store_;
  std::shared_ptr<Transport> transport_;  // until released
  const std::shared_ptr<LeaseBatch> batch_;
  std::shared_ptr<ViewHold> hold_;
  bool released_ = false;
  bool held_ = true;
};

// ---- grants ------------------------------------------------------------------------------------

class Grants {
 public:
  Grants(std::shared_ptr<Store> store, std::shared_ptr<GrantBatch> batch)
      : store_(std::move(store)), batch_(std::move(batch)) {}
  ~Grants() {
    // A store that was closed before has given the slots back.
    if (getpid() == store_->pid() && !ended_ && !store_->closed()) end(0);
  }
  Grants(const Grants&) = delete;
  Grants& operator=(const Grants&) = delete;

  py::bytes statuses() const { return to_bytes(batch_->statuses); }

  // kOk, kTimedOut or kCancelled for the whole range.
  int write(const Buffers& buffers, uint64_t range_first, uint64_t range_bytes,
            int64_t timeout_ns) {
    const Store::Call call(*store_);
    check_open();
    if (buffers.blocks().size() != batch_->items.size()) {
      raise_error("InvalidArgument", "blocks and keys differ in number");
    }
    for (size_t i = 0; i < batch_->items.size(); ++i) {
      const uint64_t length = batch_->items[i].length;
      const uint64_t offered = buffers.blocks()[i].bytes();
      if (range_first >= length) {
        raise_error("InvalidArgument", "the part lies beyond the block's end");
      }
      check_parts(range_first, range_bytes, length, batch_->part_bytes);
      const uint64_t needed = std::min(range_bytes, length - range_first);
      if (offered != needed) {
        raise_error("InvalidArgument", "block " + std::to_string(i) + " offers " +
                                           std::to_string(offered) + " bytes for a part of " +
                                           std::to_string(needed));
      }
    }
    const Loans::Loan loan(call->loans(), buffers.blocks(), false);
    if (!loan.granted()) raise_busy();
    Status written = Status::kOk;
    ++num_writing_;
    without_gil_if(store_->gives_up_lock(total_bytes(buffers.blocks())), [&] {
      written = call->write(*batch_, buffers.blocks(), {range_first, range_bytes},
                            store_->limits_for(timeout_ns));
    });
    --num_writing_;
    return static_cast<int>(written);
  }

  py::tuple commit() {
    check_open();
    return to_python(end(batch_->items.size()));
  }

  void abort() {
    check_fork(store_->pid());
    if (!ended_) end(0);
  }

 private:
  void check_open() const {
    check_fork(store_->pid());
    if (ended_) raise_error("StoreClosed", "the put has been committed or given up");
  }

  PutOutcome end(size_t end) {
    const Store::Call call(*store_);
    if (num_writing_ > 0) {
      raise_error("InvalidArgument", "another thread is still writing a part of this put");
    }
    ended_ = true;
    PutOutcome outcome;
    without_gil_if(store_->gives_up_lock(0),
                   [&] { outcome = call->commit(*batch_, end, Status::kCancelled); });
    return outcome;
  }

  const std::shared_ptr<Store> store_;
  const std::shared_ptr<GrantBatch> batch_;
  // Guarded by the interpreter's lock.
  unsigned num_writing_ = 0;
  bool ended_ = false;
};

// ---- made by the store -------------------------------------------------------------------------

std::shared_ptr<Leases> lookup(const std::shared_ptr<Store>& store, const py::buffer& keys,
                               size_t skip, bool run) {
  const Store::Call call(*store);
  const std::vector<BlockKey> wanted = to_keys(keys);
  std::shared_ptr<LeaseBatch> batch;
  without_gil_if(store->gives_up_lock(0), [&] { batch = call->lookup(wanted, skip, run); });
  return std::make_shared<Leases>(store, call.transport(), std::move(batch));
}

std::shared_ptr<Leases> redeem(const std::shared_ptr<Store>& store, const std::string& ticket) {
  const Store::Call call(*store);
  AttemptId name;
  if (ticket.size() != sizeof name) raise_error("InvalidArgument", "a ticket has 16 bytes");
  memcpy(&name, ticket.data(), sizeof name);
  std::shared_ptr<LeaseBatch> batch;
  without_gil_if(store->gives_up_lock(0), [&] { batch = call->redeem(name); });
  return batch == nullptr ? nullptr
                          : std::make_shared<Leases>(store, call.transport(), std::move(batch));
}

std::shared_ptr<Grants> reserve(const std::shared_ptr<Store>& store, const py::buffer& keys,
                                const std::vector<uint64_t>& lengths, size_t skip, bool chain,
                                uint32_t version, const std::vector<std::string>& texts,
                                int64_t timeout_ns) {
  const Store::Call call(*store);
  const std::vector<BlockKey> named = to_keys(keys);
  if (skip + lengths.size() != named.size())
    raise_error("InvalidArgument", "keys and lengths differ in number");
  if (!texts.empty() && texts.size() != named.size())
    raise_error("InvalidArgument", "keys and texts differ in number");
  check_sizes(lengths, *call.transport());
  PutRequest request{named, skip, lengths, texts, version, chain};
  if (version == 0 && call->local()) request.version = call->version();
  const CallLimits limits = store->limits_for(timeout_ns);
  std::shared_ptr<GrantBatch> batch;
  without_gil_if(store->gives_up_lock(0), [&] { batch = call->reserve(request, limits); });
  store->reserve_more(*batch, chain, limits);
  return std::make_shared<Grants>(store, std::move(batch));
}

}  // namespace

void bind_views(py::module_& m, StoreClass& store) {
  store.def("lookup", &lookup).def("redeem", &redeem).def("reserve", &reserve);
  py::class_<Leases, std::shared_ptr<Leases>>(m, "Leases")
      .def("lengths", &Leases::lengths)
      .def("read", &Leases::read)
      .def("views", &Leases::views)
      .def("verify", &Leases::verify)
      .def("ticket", &Leases::ticket)
      .def("release", &Leases::release)
      .def("num_exported", &Leases::num_exported);
  py::class_<Grants, std::shared_ptr<Grants>>(m, "Grants")
      .def("statuses", &Grants::statuses)
      .def("write", &Grants::write)
      .def("commit", &Grants::commit)
      .def("abort", &Grants::abort);
}

}  // namespace kvstore
