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

CallLimits limits_for(int64_t timeout_ns) {
  if (timeout_ns == 0)
    return {kNever, nullptr, false};  // wait for nothing, but do what can be done
  return {deadline_after(timeout_ns), nullptr, true};
}

py::bytes to_bytes(const std::vector<Status>& statuses) {
  return {reinterpret_cast<const char*>(statuses.data()), statuses.size()};
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
                           const std::vector<std::string>& texts_given, const LocalStore& store)
    : keys(to_keys(key_bytes)), texts(texts_given) {
  for (const BlockMemory& block : buffers.blocks()) lengths.push_back(block.bytes());
  request.keys = keys;
  request.skip = skip;
  request.lengths = lengths;
  request.texts = texts;
  request.version = version == 0 ? store.version() : version;
  request.chain = chain;
  if (skip + lengths.size() != keys.size())
    raise_error("InvalidArgument", "keys and blocks differ in number");
}

void check_sizes(const std::vector<uint64_t>& lengths, Node& node) {
  const uint64_t most = std::min(node.segment().bytes(), kBlockBytesMax);
  for (size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] > most || shape_bytes(shape_of(lengths[i])) > node.segment().bytes()) {
      raise_error("BlockTooLarge", "block " + std::to_string(i) + " has " +
                                       std::to_string(lengths[i]) + " bytes, the whole pool has " +
                                       std::to_string(node.segment().bytes()) +
                                       "; open the store with a larger dram=");
    }
  }
}

namespace {

std::shared_ptr<Node> open_node(uint64_t dram_bytes, bool lock_memory, uint64_t reserve_blocks,
                                double view_fraction, int64_t lease_ns, unsigned copy_threads,
                                bool log_evictions) {
  NodeOptions options;
  options.dram_bytes = dram_bytes;
  options.lock_memory = lock_memory;
  options.reserve_blocks = reserve_blocks;
  options.view_fraction = view_fraction;
  options.lease = lease_ns;
  options.copy_threads = copy_threads;
  options.log_evictions = log_evictions;
  std::string error;
  auto node = Node::open(options, &error);
  if (node == nullptr) raise_error("NotEnoughMemory", error);
  return node;
}

}  // namespace

// ---- Store -------------------------------------------------------------------------------------

Store::Store(const std::shared_ptr<Node>& node, const std::string& digest, uint64_t part_bytes)
    : pid_(getpid()) {
  local_ = std::shared_ptr<LocalStore>(new LocalStore(node, digest, part_bytes), ForkAware{pid_});
  transfers_ = std::shared_ptr<Transfers>(new Transfers(), ForkAware{pid_});
}

Store::~Store() {
  if (getpid() == pid_) close();
}

void Store::close() {
  check_fork(pid_);
  if (closed_.exchange(true)) return;
  const py::gil_scoped_release unlocked;
  transfers_->cancel_all();
  local_->node().room_freed();  // wakes what waits for room
  // Calls under way have deadlines, and transfers were told to end: both let go of their slots by
  // themselves.
  while (calls_.load() > 0 || transfers_->num_unfinished() > 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  local_->session().end();
  local_->node().room_freed();
  local_.reset();  // the memory goes with the last store and the last view
}

Store::Call::Call(Store& store) : store_(store) {
  check_fork(store.pid_);
  store_.calls_.fetch_add(1);
  if (store_.closed_.load()) {
    store_.calls_.fetch_sub(1);
    raise_error("StoreClosed", "the store is closed; open it again with kvstore.open(...)");
  }
}

py::tuple Store::put(const py::buffer& keys, const Buffers& buffers, size_t skip, bool chain,
                     uint32_t version, const std::vector<std::string>& texts, int64_t timeout_ns) {
  const Call call(*this);
  const PutArguments arguments(keys, buffers, skip, chain, version, texts, *local_);
  check_sizes(arguments.lengths, local_->node());
  const Node::Loan loan(local_->node(), buffers.blocks(), false);
  if (!loan.granted()) raise_busy();
  const CallLimits limits = limits_for(timeout_ns);
  const auto grants = local_->reserve(arguments.request);
  const bool waits =
      std::ranges::count(grants->statuses, Status::kOutOfSpace) > 0 && timeout_ns > 0;
  PutOutcome outcome;
  const auto finish = [&] {
    if (waits) local_->reserve_more(*grants, chain, limits);
    const Status written = local_->write(*grants, buffers.blocks(), {}, limits.for_copy());
    outcome = local_->commit(*grants, written == Status::kOk ? grants->items.size() : 0, written);
  };
  without_gil_if(waits || total_bytes(buffers.blocks()) >= kShortCopyBytes, finish);
  return to_python(outcome);
}

py::tuple Store::get(const py::buffer& keys, const Buffers& buffers, int64_t timeout_ns) {
  const Call call(*this);
  const std::vector<BlockKey> wanted = to_keys(keys);
  const Node::Loan loan(local_->node(), buffers.blocks(), true);
  if (!loan.granted()) raise_busy();
  GetOutcome outcome;
  without_gil_if(total_bytes(buffers.blocks()) >= kShortCopyBytes,
                 [&] { outcome = local_->get(wanted, buffers.blocks(), limits_for(timeout_ns)); });
  return to_python(outcome, buffers.blocks());
}

size_t Store::match(const py::buffer& keys, size_t skip, uint16_t ranks) {
  const Call call(*this);
  return local_->match(to_keys(keys), skip, ranks);
}

py::bytes Store::exists(const py::buffer& keys) {
  const Call call(*this);
  const std::vector<BlockKey> wanted = to_keys(keys);
  std::string held(wanted.size(), '\0');
  const Blocks& blocks = local_->node().blocks();
  blocks.for_each(wanted, [&](size_t i, uint64_t hashed) {
    held[i] = blocks.holds(wanted[i], hashed, local_->session().space()) ? 1 : 0;
    return true;
  });
  return {held};
}

uint32_t Store::clear() {
  const Call call(*this);
  const py::gil_scoped_release unlocked;
  return local_->clear();
}

py::list Store::list() {
  const Call call(*this);
  py::list listed;
  for (const Listed& block : local_->node().blocks().list(local_->session().space())) {
    const auto* key = reinterpret_cast<const char*>(block.key.bytes.data());
    listed.append(py::make_tuple(py::bytes(key, kKeyBytes), block.length, py::bytes(block.text),
                                 block.pinned));
  }
  return listed;
}

py::dict Store::usage() {
  const Call call(*this);
  Node& node = local_->node();
  const Namespace& space = local_->session().space();
  const PoolUsage pool = node.pool().usage();
  const BlockCounters& counters = node.blocks().counters();
  py::dict usage;
  usage["blocks"] = space.blocks.load();
  usage["bytes"] = space.bytes.load();
  usage["version"] = space.version.load();
  usage["capacity_bytes"] = pool.capacity_bytes;
  usage["pool_bytes"] = node.segment().bytes();
  usage["free_bytes"] = pool.free_bytes;
  usage["taken_bytes"] = pool.taken_bytes;
  usage["largest_free_bytes"] = uint64_t{pool.largest_free_run} * kFrameBytes;
  usage["slots"] = pool.slots;
  usage["granted_blocks"] = node.num_granted();
  usage["stuck_bytes"] = node.stuck_bytes();
  usage["leased_blocks"] = node.blocks().num_leased();
  usage["pinned_blocks"] = node.blocks().num_pinned();
  usage["view_bytes"] = node.limits().view_bytes.load();
  usage["view_bytes_max"] = node.limits().view_bytes_max;
  usage["requested"] = counters.requested.load();
  usage["hits"] = counters.hits.load();
  usage["commits"] = counters.commits.load();
  usage["evictions"] = counters.evictions.load();
  usage["removals"] = counters.removals.load();
  usage["corrupt"] = counters.corrupt.load();
  usage["scrubbed"] = counters.scrubbed.load();
  usage["pages"] = node.segment().pages();
  usage["populating"] = node.populating();
  return usage;
}

std::string Store::audit() {
  const Call call(*this);
  return local_->node().audit();
}

bool Store::settle(int64_t timeout_ns) {
  const Call call(*this);
  const py::gil_scoped_release unlocked;
  return local_->node().settle(deadline_after(timeout_ns));
}

py::bytes Store::evicted() {
  const Call call(*this);
  const std::vector<BlockKey> keys = local_->node().blocks().take_evicted();
  return {reinterpret_cast<const char*>(keys.data()), keys.size() * kKeyBytes};
}

}  // namespace kvstore

PYBIND11_MODULE(_core, m) {
  using kvstore::LocalStore;
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
      py::arg("copy_threads"), py::arg("log_evictions"));

  kvstore::StoreClass store(m, "Store");
  store
      .def(py::init<const std::shared_ptr<Node>&, const std::string&, uint64_t>(), py::arg("node"),
           py::arg("digest"), py::arg("part_bytes"))
      .def("close", &Store::close)
      .def("version", [](Store& self) { return Store::Call(self)->version(); })
      .def("node", [](Store& self) { return Store::Call(self)->shared_node(); })
      .def("put", &Store::put)
      .def("get", &Store::get)
      .def("match", &Store::match)
      .def("exists", &Store::exists)
      .def("remove",
           [](Store& self, const py::buffer& keys) {
             return Store::Call(self)->remove(kvstore::to_keys(keys));
           })
      .def("touch",
           [](Store& self, const py::buffer& keys) {
             return Store::Call(self)->touch(kvstore::to_keys(keys));
           })
      .def("pin",
           [](Store& self, const py::buffer& keys) {
             return Store::Call(self)->pin(kvstore::to_keys(keys));
           })
      .def("unpin",
           [](Store& self, const py::buffer& keys) {
             return Store::Call(self)->unpin(kvstore::to_keys(keys));
           })
      .def("clear", &Store::clear)
      .def("list", &Store::list)
      .def("usage", &Store::usage)
      .def("audit", &Store::audit)
      .def("settle", &Store::settle)
      .def("evicted", &Store::evicted);
  kvstore::bind_views(m, store);
  kvstore::bind_async(m, store);
}
