// What the binding files share: the store as Python holds it, and conversions.
// Threads: the interpreter's lock is held unless said otherwise.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "bindings_memory.h"
#include "transfers.h"
#include "transport_local.h"

namespace kvstore {

// A copy below this takes about 50 us: giving up the interpreter's lock would cost more when
// another thread wants it.
inline constexpr uint64_t kShortCopyBytes = uint64_t{256} << 10;

template <class Work>
void without_gil_if(bool condition, Work&& work) {
  if (condition) {
    const pybind11::gil_scoped_release unlocked;
    work();
  } else {
    work();
  }
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

std::vector<BlockKey> to_keys(const pybind11::buffer& keys);
Nanos deadline_after(int64_t timeout_ns);
CallLimits limits_for(int64_t timeout_ns);  // zero: wait for nothing
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
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // One call under way: close() waits for it. Raises ForkedStore or StoreClosed.
  class Call {
   public:
    explicit Call(Store& store);
    ~Call() { store_.calls_.fetch_sub(1); }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    Transport* operator->() const { return store_.transport_.get(); }
    const std::shared_ptr<Transport>& transport() const { return store_.transport_; }

   private:
    Store& store_;
  };

  void close();
  pybind11::tuple put(const pybind11::buffer& keys, const Buffers& buffers, size_t skip, bool chain,
                      uint32_t version, const std::vector<std::string>& texts, int64_t timeout_ns);
  pybind11::tuple get(const pybind11::buffer& keys, const Buffers& buffers, int64_t timeout_ns);
  size_t match(const pybind11::buffer& keys, size_t skip, uint16_t ranks);
  pybind11::bytes exists(const pybind11::buffer& keys);
  size_t apply(KeyOperation operation, const pybind11::buffer& keys);
  uint32_t clear();
  pybind11::list list();
  pybind11::dict usage();
  std::string audit();
  bool settle(int64_t timeout_ns);
  pybind11::bytes evicted();

  // Transfers (bindings_async.cc).
  std::shared_ptr<Transfer> put_async(const pybind11::buffer& keys, const Buffers& buffers,
                                      size_t skip, bool chain, uint32_t version,
                                      const std::vector<std::string>& texts, int64_t timeout_ns);
  std::shared_ptr<Transfer> get_async(const pybind11::buffer& keys, const Buffers& buffers,
                                      int64_t timeout_ns);
  std::shared_ptr<Transfer> match_async(const pybind11::buffer& keys, size_t skip, uint16_t ranks);
  std::vector<std::shared_ptr<Transfer>> drain();
  bool wait(Transfer& transfer, int64_t timeout_ns);
  void cancel(Transfer& transfer);
  int event_fd();
  int await_fd();
  void set_awaiting(bool awaiting);

  std::shared_ptr<Node> node();  // embedded stores only
  // Whether a call that copies this much lets other Python threads run meanwhile.
  bool gives_up_lock(uint64_t bytes) const {
    return bytes >= kShortCopyBytes || !transport_->local();
  }
  pid_t pid() const { return pid_; }
  bool closed() const { return closed_.load(); }

 private:
  std::shared_ptr<Transfer> submit(std::function<void(Transfer&)> work, bool here);

  const pid_t pid_;
  std::shared_ptr<Node> node_;  // null where it is elsewhere
  std::shared_ptr<Transport> transport_;
  std::shared_ptr<Transfers> transfers_;
  std::atomic<uint32_t> calls_{0};
  std::atomic<bool> closed_{false};
};

using StoreClass = pybind11::class_<Store, std::shared_ptr<Store>>;
void bind_views(pybind11::module_& m, StoreClass& store);  // leases and grants
void bind_async(pybind11::module_& m, StoreClass& store);  // transfers

}  // namespace kvstore
