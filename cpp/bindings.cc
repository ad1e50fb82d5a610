// Python's face of the core. Converts arguments, drops the interpreter's lock around waits and long
// copies, turns outcomes into objects and errors into kvstore.errors. No decisions in here.
#include "bindings.h"

#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "bindings_memory.h"
#include "crc32c.h"

namespace py = pybind11;

namespace kvstore {

void bind_keys(py::module_& m);

std::vector<BlockKey> to_keys(const py::buffer& keys) {
  const py::buffer_info info = keys.request();
  py::ssize_t stride = info.itemsize;
  for (py::ssize_t dim = info.ndim; dim-- > 0; stride *= info.shape[dim]) {
    if (info.shape[dim] > 1 && info.strides[dim] != stride)
      raise_error("InvalidArgument", "keys are not one contiguous piece of memory");
  }
  const auto bytes = static_cast<size_t>(info.size * info.itemsize);
  if (bytes % kKeyBytes != 0) raise_error("InvalidArgument", "keys are not (n, 32) bytes");
  std::vector<BlockKey> copied(bytes / kKeyBytes);
  memcpy(copied.data(), info.ptr, bytes);
  if (copied.size() > kBatchBlocksMax) {
    raise_error("InvalidArgument", "a batch of " + std::to_string(copied.size()) +
                                       " blocks; the limit is " + std::to_string(kBatchBlocksMax) +
                                       ", send it in several calls");
  }
  return copied;
}

Nanos deadline_after(int64_t timeout_ns) {
  const Nanos now = monotonic_now();
  return timeout_ns >= kNever - now ? kNever : now + timeout_ns;
}

CallLimits Store::limits_for(int64_t timeout_ns) const {
  if (timeout_ns == 0) return {kNever, &closed_, false};
  return {deadline_after(timeout_ns), &closed_, true};
}

py::bytes to_bytes(const std::vector<Status>& statuses) {
  return {reinterpret_cast<const char*>(statuses.data()), statuses.size()};
}

int64_t match_or_not(Transport& transport, const std::vector<BlockKey>& keys, size_t skip,
                     uint16_t ranks) {
  try {
    return static_cast<int64_t>(transport.match(keys, skip, ranks));
  } catch (const std::system_error&) {
    return -1;
  }
}

py::tuple to_python(const PutOutcome& outcome) {
  if (outcome.stale) {
    raise_error(
        "StaleKeys",
        "the namespace was cleared after these keys were made; make them again with store.keys()");
  }
  return py::make_tuple(to_bytes(outcome.statuses), outcome.parent_held, outcome.message);
}

py::tuple to_python(const GetOutcome& outcome, const std::vector<BlockMemory>& blocks) {
  if (outcome.too_small) {
    const auto [item, length] = *outcome.too_small;
    raise_error("InvalidArgument", "target " + std::to_string(item) + " has " +
                                       std::to_string(blocks[item].bytes()) +
                                       " bytes, its block has " + std::to_string(length));
  }
  const auto* bytes = reinterpret_cast<const char*>(outcome.bytes.data());
  return py::make_tuple(to_bytes(outcome.statuses),
                        py::bytes(bytes, outcome.bytes.size() * sizeof(uint64_t)));
}

uint64_t total_bytes(const std::vector<BlockMemory>& blocks) {
  uint64_t bytes = 0;
  for (const BlockMemory& block : blocks) bytes += block.bytes();
  return bytes;
}

void check_fork(pid_t owner) {
  if (getpid() != owner) {
    raise_error("ForkedStore", "this store belongs to process " + std::to_string(owner) +
                                   ", this is process " + std::to_string(getpid()) +
                                   "; open a store of its own after fork");
  }
}

PutArguments::PutArguments(const py::buffer& key_bytes, const Buffers& buffers, size_t skip,
                           bool chain, uint32_t version,
                           const std::vector<std::string>& texts_given, Transport& store)
    : keys(to_keys(key_bytes)), texts(texts_given) {
  for (const BlockMemory& block : buffers.blocks()) lengths.push_back(block.bytes());
  request.keys = keys;
  request.skip = skip;
  request.lengths = lengths;
  request.texts = texts;
  request.version = version == 0 && store.local() ? store.version() : version;
  request.chain = chain;
  if (skip + lengths.size() != keys.size())
    raise_error("InvalidArgument", "keys and blocks differ in number");
  if (!texts.empty() && texts.size() != keys.size())
    raise_error("InvalidArgument", "keys and texts differ in number");
}

void check_match(size_t keys, size_t skip, uint16_t ranks) {
  if (skip > keys) raise_error("InvalidArgument", "more blocks are skipped than there are keys");
  if (ranks == 0) raise_error("InvalidArgument", "a match asks for at least one rank");
}

void check_sizes(const std::vector<uint64_t>& lengths, Transport& transport) {
  const uint64_t pool_bytes = transport.pool_bytes();
  const uint64_t most = std::min(pool_bytes, kBlockBytesMax);
  for (size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] == 0)
      raise_error("InvalidArgument", "block " + std::to_string(i) + " has no bytes");
    if (lengths[i] > most || shape_bytes(shape_of(lengths[i])) > pool_bytes) {
      raise_error("BlockTooLarge", "block " + std::to_string(i) + " has " +
                                       std::to_string(lengths[i]) + " bytes, the whole pool has " +
                                       std::to_string(pool_bytes) +
                                       "; give the node more memory (dram=)");
    }
  }
}

namespace {

std::shared_ptr<Node> open_node(uint64_t dram_bytes, bool lock_memory, uint64_t reserve_blocks,
                                double view_fraction, int64_t lease_ns, unsigned copy_threads,
                                bool log_evictions, int64_t grant_ns) {
  if (copy_threads > 4096) raise_error("InvalidArgument", "more than 4096 copy threads");
  NodeOptions options;
  options.dram_bytes = dram_bytes;
  options.lock_memory = lock_memory;
  options.reserve_blocks = reserve_blocks;
  options.view_fraction = view_fraction;
  options.lease = lease_ns;
  options.copy_threads = copy_threads;
  options.log_evictions = log_evictions;
  if (grant_ns > 0) options.grant = grant_ns;
  std::string error;
  std::shared_ptr<Node> node;
  try {
    node = Node::open(options, &error);
  } catch (const std::bad_alloc&) {
    error = "no memory for the tables of a pool of " + std::to_string(dram_bytes) + " bytes";
  } catch (const std::system_error& failed) {
    error = std::string("no threads for a pool: ") + failed.what();
  }
  if (node == nullptr) raise_error("NotEnoughMemory", error);
  return node;
}

}  // namespace

// ---- Store -------------------------------------------------------------------------------------

Store::Store(const std::shared_ptr<Node>& node, const std::string& digest, uint64_t part_bytes)
    : pid_(getpid()), node_(node) {
  if (part_bytes == 0) raise_error("InvalidArgument", "a part has at least one byte");
  try {
    transport_ =
        std::shared_ptr<Transport>(new LocalStore(node, digest, part_bytes), ForkAware{pid_});
  } catch (const std::length_error& full) {
    raise_error("KvstoreError", full.what());
  }
  start_transfers();
}

Store::Store(std::unique_ptr<Transport> transport, std::string place)
    : pid_(getpid()),
      place_(std::move(place)),
      way_(transport->name()),
      local_(transport->local()),
      transport_(transport.release(), ForkAware{pid_}) {
  start_transfers();
}

void Store::start_transfers() {
  try {
    transfers_ = std::shared_ptr<Transfers>(new Transfers(), ForkAware{pid_});
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
  }
}

Store::~Store() {
  if (getpid() == pid_) close();
}

void Store::close() {
  check_fork(pid_);
  if (closed_.exchange(true)) return;
  transfers_->cancel_all();
  transport_->wake();  // calls that wait see that the store is closing
  if (!inside_call()) finish_close();
}

void Store::finish_close() {
  if (finished_) return;
  finished_ = true;
  // Calls under way have deadlines, and transfers were told to end: both let go of their slots by
  // themselves.
  without_gil_if(true, [&] {
    while (calls_.load() > 0 || transfers_->num_unfinished() > 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    transport_->end();
    transport_.reset();
    node_.reset();  // the memory goes with the last store and the last view
  });
}

bool Store::inside_call() const {
  for (const Call* call = Call::innermost_; call != nullptr; call = call->outer_) {
    if (&call->store_ == this) return true;
  }
  return false;
}

std::shared_ptr<Node> Store::node() {
  const Call call(*this);
  if (node_ == nullptr)
    raise_error("InvalidArgument", "the node of this store is another process; connect to it");
  return node_;
}

thread_local const Store::Call* Store::Call::innermost_ = nullptr;

Store::Call::Call(Store& store) : store_(store), outer_(innermost_) {
  check_fork(store.pid_);
  store_.calls_.fetch_add(1);
  if (store_.closed_.load()) {
    store_.calls_.fetch_sub(1);
    raise_error("StoreClosed",
                "the store is closed; make another with kvstore.open(...) or kvstore.connect(...)");
  }
  innermost_ = this;
}

Store::Call::~Call() {
  innermost_ = outer_;
  store_.calls_.fetch_sub(1);
  if (store_.closed_.load() && !store_.finished_ && !store_.inside_call()) store_.finish_close();
}

py::tuple Store::put(const py::buffer& keys, const Buffers& buffers, size_t skip, bool chain,
                     uint32_t version, const std::vector<std::string>& texts, int64_t timeout_ns) {
  const Call call(*this);
  const PutArguments arguments(keys, buffers, skip, chain, version, texts, *transport_);
  check_sizes(arguments.lengths, *transport_);
  const Loans::Loan loan(transport_->loans(), buffers.blocks(), false);
  if (!loan.granted()) raise_busy();
  const CallLimits limits = limits_for(timeout_ns);
  PutOutcome outcome;
  if (!transport_->local()) {
    without_gil_if(true,
                   [&] { outcome = transport_->put(arguments.request, buffers.blocks(), limits); });
    return to_python(outcome);
  }
  // In process the lock is given up only if the put has to wait or the copy is long.
  const auto grants = transport_->reserve(arguments.request, limits);
  reserve_more(*grants, chain, limits);
  without_gil_if(total_bytes(buffers.blocks()) >= kShortCopyBytes, [&] {
    const Status written = transport_->write(*grants, buffers.blocks(), {}, limits.for_copy());
    outcome =
        transport_->commit(*grants, written == Status::kOk ? grants->items.size() : 0, written);
  });
  if (limits.stopped()) outcome.cancel_rest();
  return to_python(outcome);
}

// Waits for room where some is lacking. Ctrl-C ends the put.
void Store::reserve_more(GrantBatch& grants, bool chain, const CallLimits& limits) {
  const auto lacking = [&] {
    return limits.waits && std::ranges::count(grants.statuses, Status::kOutOfSpace) > 0;
  };
  bool more = lacking();
  while (more) {
    CallLimits slice = limits;
    slice.deadline = std::min(limits.deadline, monotonic_now() + kSignalPause);
    without_gil_if(true, [&] { more = transport_->reserve_more(grants, chain, slice); });
    more = more && lacking() && !limits.passed();
    if (more && PyErr_CheckSignals() != 0) {
      transport_->commit(grants, 0, Status::kCancelled);
      throw py::error_already_set();
    }
  }
}

py::tuple Store::get(const py::buffer& keys, const Buffers& buffers, int64_t timeout_ns) {
  const Call call(*this);
  const std::vector<BlockKey> wanted = to_keys(keys);
  if (wanted.size() != buffers.blocks().size())
    raise_error("InvalidArgument", "keys and targets differ in number");
  const Loans::Loan loan(transport_->loans(), buffers.blocks(), true);
  if (!loan.granted()) raise_busy();
  GetOutcome outcome;
  without_gil_if(gives_up_lock(total_bytes(buffers.blocks())), [&] {
    outcome = transport_->get(wanted, buffers.blocks(), limits_for(timeout_ns));
  });
  return to_python(outcome, buffers.blocks());
}

int64_t Store::match(const py::buffer& keys, size_t skip, uint16_t ranks) {
  const Call call(*this);
  const std::vector<BlockKey> wanted = to_keys(keys);
  check_match(wanted.size(), skip, ranks);
  int64_t matched = 0;
  without_gil_if(gives_up_lock(0),
                 [&] { matched = match_or_not(*transport_, wanted, skip, ranks); });
  return matched;
}

py::bytes Store::exists(const py::buffer& keys) {
  const Call call(*this);
  const std::vector<BlockKey> wanted = to_keys(keys);
  std::vector<bool> held;
  without_gil_if(gives_up_lock(0), [&] { held = transport_->exists(wanted); });
  return {std::string(held.begin(), held.end())};
}

uint32_t Store::clear() {
  const Call call(*this);
  uint32_t version = 0;
  without_gil_if(true, [&] { version = transport_->clear(); });
  return version;
}

py::list Store::list() {
  const Call call(*this);
  std::vector<Listed> blocks;
  without_gil_if(true, [&] { blocks = transport_->list(); });
  py::list listed;
  for (const Listed& block : blocks) {
    const auto* key = reinterpret_cast<const char*>(block.key.bytes.data());
    listed.append(py::make_tuple(py::bytes(key, kKeyBytes), block.length, py::bytes(block.text),
                                 block.pinned));
  }
  return listed;
}

py::dict Store::usage() {
  const Call call(*this);
  UsageReport report;
  without_gil_if(gives_up_lock(0), [&] { report = transport_->usage(); });
  py::dict usage;
  for (const auto& [name, count] : report.counts) usage[name.c_str()] = count;
  const bool populating = usage.contains("populating") && usage["populating"].cast<uint64_t>() != 0;
  usage["populating"] = populating;
  usage["pages"] = report.pages;
  return usage;
}

size_t Store::apply(KeyOperation operation, const py::buffer& keys) {
  const Call call(*this);
  const std::vector<BlockKey> named = to_keys(keys);
  size_t held = 0;
  without_gil_if(gives_up_lock(0), [&] { held = transport_->apply(operation, named); });
  return held;
}

std::string Store::audit() {
  const Call call(*this);
  std::string problem;
  without_gil_if(true, [&] { problem = transport_->audit(); });
  return problem;
}

bool Store::settle(int64_t timeout_ns) {
  const Call call(*this);
  return wait_in_slices(deadline_after(timeout_ns),
                        [&](Nanos until) { return transport_->settle(until); });
}

py::bytes Store::evicted() {
  const Call call(*this);
  const std::vector<BlockKey> keys = transport_->take_evicted();
  return {reinterpret_cast<const char*>(keys.data()), keys.size() * kKeyBytes};
}

}  // namespace kvstore

PYBIND11_MODULE(_core, m) {
  using kvstore::KeyOperation;
  using kvstore::Node;
  using kvstore::Store;
  m.doc() = "The native core of kvstore. Use it through `kvstore`.";
  m.attr("__version__") = KVSTORE_VERSION;
  kvstore::bind_keys(m);
  kvstore::bind_memory(m);

  m.attr("BATCH_BLOCKS_MAX") = kvstore::kBatchBlocksMax;
  m.attr("FRAME_BYTES") = kvstore::kFrameBytes;
  m.def(
      "slots_per_frame",
      [](uint64_t block_bytes) {
        const kvstore::Shape shape = kvstore::shape_of(block_bytes);
        return shape.frames > 0 ? 0 : kvstore::cells_per_frame(shape.tail);
      },
      py::arg("block_bytes"));
  m.def("slot_bytes",
        [](uint64_t bytes) { return kvstore::shape_bytes(kvstore::shape_of(bytes)); });

  py::class_<Node, std::shared_ptr<Node>>(m, "Node").def(
      py::init(&kvstore::open_node), py::kw_only(), py::arg("dram_bytes"), py::arg("lock_memory"),
      py::arg("reserve_blocks"), py::arg("view_fraction"), py::arg("lease_ns"),
      py::arg("copy_threads"), py::arg("log_evictions"), py::arg("grant_ns") = 0);

  kvstore::StoreClass store(m, "Store");
  store
      .def(py::init<const std::shared_ptr<Node>&, const std::string&, uint64_t>(), py::arg("node"),
           py::arg("digest"), py::arg("part_bytes"))
      .def("close", &Store::close)
      .def("version", [](Store& self) { return Store::Call(self)->version(); })
      .def("node", &Store::node)
      .def("put", &Store::put)
      .def("get", &Store::get)
      .def("match", &Store::match)
      .def("exists", &Store::exists)
      .def("remove", [](Store& self,
                        const py::buffer& keys) { return self.apply(KeyOperation::kRemove, keys); })
      .def("touch", [](Store& self,
                       const py::buffer& keys) { return self.apply(KeyOperation::kTouch, keys); })
      .def("pin",
           [](Store& self, const py::buffer& keys) { return self.apply(KeyOperation::kPin, keys); })
      .def("unpin", [](Store& self,
                       const py::buffer& keys) { return self.apply(KeyOperation::kUnpin, keys); })
      .def("clear", &Store::clear)
      .def("list", &Store::list)
      .def("usage", &Store::usage)
      .def("audit", &Store::audit)
      .def("settle", &Store::settle)
      .def("evicted", &Store::evicted);
  kvstore::bind_views(m, store);
  kvstore::bind_async(m, store);
  kvstore::bind_remote(m, store);
}
