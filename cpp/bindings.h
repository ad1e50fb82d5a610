// What the binding files share: the store as Python holds it, and conversions.
// Threads: the interpreter's lock is held unless said otherwise.
#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "bindings_memory.h"
#include "transfers.h"
#include "transport_local.h"

namespace kvstore {

// A copy below this takes about 50 us: giving up the interpreter's lock would cost more when
// another thread wants it.
inline constexpr uint64_t kShortCopyBytes = uint64_t{256} << 10;

// Waits give signal handlers their turn this often.
inline constexpr Nanos kSignalPause = 100 * kMillisecond;

// Takes the interpreter's lock back. In a daemon thread the interpreter may have ended meanwhile,
// and ends such a thread by unwinding its stack: through frames that cannot be unwound, which would
// end the process. So the thread stays here, as newer Pythons let it.
inline void take_gil_back(PyThreadState* state) {
  try {
    PyEval_RestoreThread(state);
  } catch (abi::__forced_unwind&) {
    while (true) pause();
  }
}

template <class Work>
void without_gil_if(bool condition, Work&& work) {
  if (!condition) return work();
  PyThreadState* const state = PyEval_SaveThread();
  try {
    work();
  } catch (...) {
    take_gil_back(state);
    throw;
  }
  take_gil_back(state);
}

// In a forked child threads are gone and locks may be held by nobody: what the parent owns is left
// alone.
struct ForkAware {
  pid_t owner;
  template <class T>
  void operator()(T* object) const {
    if (getpid() == owner) delete object;
  }
};

// done(until) waits for something without the lock; true once it is there. Ctrl-C ends the wait.
template <class Done>
bool wait_in_slices(Nanos deadline, Done&& done) {
  while (true) {
    bool is_done = false;
    const Nanos now = monotonic_now();
    const Nanos until = deadline - now > kSignalPause ? now + kSignalPause : deadline;
    without_gil_if(true, [&] { is_done = done(until); });
    if (is_done || until >= deadline) return is_done;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
  }
}

std::vector<BlockKey> to_keys(const pybind11::buffer& keys);
Nanos deadline_after(int64_t timeout_ns);
// -1 where the node cannot be asked.
int64_t match_or_not(Transport& transport, const std::vector<BlockKey>& keys, size_t skip,
                     uint16_t ranks);
void check_match(size_t keys, size_t skip, uint16_t ranks);
pybind11::bytes to_bytes(const std::vector<Status>& statuses);
pybind11::tuple to_python(const PutOutcome& outcome);
pybind11::tuple to_python(const GetOutcome& outcome, const std::vector<BlockMemory>& blocks);
uint64_t total_bytes(const std::vector<BlockMemory>& blocks);
void check_fork(pid_t owner);
void check_sizes(const std::vector<uint64_t>& lengths, Transport& transport);
[[noreturn]] inline void raise_busy() {
  raise_error(
      "BufferBusy",
      "this memory is lent to a transfer that is not done; wait for it, or use other memory");
}

// A put's arguments as the core takes them; owns what the request's spans point to, so it must not
// move.
struct PutArguments {
  PutArguments(const pybind11::buffer& key_bytes, const Buffers& buffers, size_t skip, bool chain,
               uint32_t version, const std::vector<std::string>& texts_given, Transport& store);
  PutArguments(const PutArguments&) = delete;
  PutArguments& operator=(const PutArguments&) = delete;

  std::vector<BlockKey> keys;
  std::vector<uint64_t> lengths;
  std::vector<std::string> texts;
  PutRequest request;
};

class Store {
 public:
  Store(const std::shared_ptr<Node>& node, const std::string& digest, uint64_t part_bytes);
  // A node elsewhere, at `place`.
  Store(std::unique_ptr<Transport> transport, std::string place);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // One call under way: close() waits for it. Raises ForkedStore or StoreClosed. A close() from
  // within it (a finalizer that the garbage collector runs) takes effect when it returns.
  class Call {
   public:
    explicit Call(Store& store);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    Transport* operator->() const { return store_.transport_.get(); }
    const std::shared_ptr<Transport>& transport() const { return store_.transport_; }

   private:
    Store& store_;
    const Call* const outer_;  // of this thread, any store's
    static thread_local const Call* innermost_;
    friend class Store;
  };

  void close();
  pybind11::tuple put(const pybind11::buffer& keys, const Buffers& buffers, size_t skip, bool chain,
                      uint32_t version, const std::vector<std::string>& texts, int64_t timeout_ns);
  pybind11::tuple get(const pybind11::buffer& keys, const Buffers& buffers, int64_t timeout_ns);
  int64_t match(const pybind11::buffer& keys, size_t skip, uint16_t ranks);  // -1: cannot be asked
  pybind11::bytes exists(const pybind11::buffer& keys);
  size_t apply(KeyOperation operation, const pybind11::buffer& keys);
  uint32_t clear();
  pybind11::list list();
  pybind11::dict usage();
  std::string audit();
  bool settle(int64_t timeout_ns);
  pybind11::bytes evicted();

  // Transfers (bindings_async.cc). `owner` is Python's object for it.
  std::shared_ptr<Transfer> put_async(const pybind11::buffer& keys,
                                      const std::shared_ptr<Buffers>& buffers, size_t skip,
                                      bool chain, uint32_t version,
                                      const std::vector<std::string>& texts, int64_t timeout_ns,
                                      const pybind11::object& owner);
  std::shared_ptr<Transfer> get_async(const pybind11::buffer& keys,
                                      const std::shared_ptr<Buffers>& buffers, int64_t timeout_ns,
                                      const pybind11::object& owner);
  std::shared_ptr<Transfer> match_async(const pybind11::buffer& keys, size_t skip, uint16_t ranks,
                                        const pybind11::object& owner);
  pybind11::list drain();  // owners
  bool wait(const std::shared_ptr<Transfer>& transfer, int64_t timeout_ns);
  void cancel(Transfer& transfer);
  void abandon(const std::shared_ptr<Transfer>& transfer);
  int event_fd();
  int await_fd();
  void set_awaiting(bool awaiting);

  std::shared_ptr<Node> node();                     // embedded stores only
  CallLimits limits_for(int64_t timeout_ns) const;  // zero: wait for nothing
  void reserve_more(GrantBatch& grants, bool chain, const CallLimits& limits);
  // Whether a call that copies this much lets other Python threads run meanwhile.
  bool gives_up_lock(uint64_t bytes) const { return bytes >= kShortCopyBytes || !local_; }
  pid_t pid() const { return pid_; }
  bool closed() const { return closed_.load(); }
  const std::string& place() const { return place_; }
  const std::string& way() const { return way_; }

 private:
  // What Python has lent to a transfer, and the object that stands for it there: kept until it is
  // collected.
  struct Lent {
    std::shared_ptr<Transfer> transfer;
    std::shared_ptr<Buffers> buffers;
    pybind11::object owner;
  };
  std::shared_ptr<Transfer> submit(std::function<void(Transfer&)> work, bool here,
                                   std::shared_ptr<Buffers> buffers, const pybind11::object& owner);
  Lent take_back(uint64_t id);
  std::vector<Lent> take_back_abandoned();
  bool inside_call() const;
  void finish_close();

  void start_transfers();

  const pid_t pid_;
  std::string place_ = "local";
  std::string way_ = "local";  // these two also after close()
  bool local_ = true;
  std::shared_ptr<Node> node_;  // null where it is elsewhere
  std::shared_ptr<Transport> transport_;
  std::shared_ptr<Transfers> transfers_;
  std::atomic<uint32_t> calls_{0};
  std::atomic<bool> closed_{false};
  bool finished_ = false;
  // Guarded by the interpreter's lock.
  std::unordered_map<uint64_t, Lent> lent_;
  std::vector<uint64_t> abandoned_;  // nobody will collect these
};

using StoreClass = pybind11::class_<Store, std::shared_ptr<Store>>;
void bind_views(pybind11::module_& m, StoreClass& store);   // leases and grants
void bind_async(pybind11::module_& m, StoreClass& store);   // transfers
void bind_remote(pybind11::module_& m, StoreClass& store);  // a node elsewhere, and serving one

}  // namespace kvstore
