// Transfers as Python sees them.
#include <pybind11/stl.h>

#include <system_error>
#include <utility>

#include "bindings.h"

namespace py = pybind11;

namespace kvstore {
namespace {

// Moved into the worker's closure; ends with it, before the transfer is called done.
struct AsyncPut {
  AsyncPut(const py::buffer& keys, const Buffers& buffers, size_t skip, bool chain,
           uint32_t version, const std::vector<std::string>& texts,
           const std::shared_ptr<Transport>& at)
      : store(at),
        blocks(buffers.blocks()),
        arguments(keys, buffers, skip, chain, version, texts, *at),
        loan(at->loans(), blocks, false) {}
  std::shared_ptr<Transport> store;
  std::vector<BlockMemory> blocks;
  PutArguments arguments;
  Loans::Loan loan;
};

struct AsyncGet {
  AsyncGet(const py::buffer& key_bytes, const Buffers& buffers,
           const std::shared_ptr<Transport>& at)
      : store(at),
        keys(to_keys(key_bytes)),
        blocks(buffers.blocks()),
        loan(store->loans(), blocks, true) {}
  std::shared_ptr<Transport> store;
  std::vector<BlockKey> keys;
  std::vector<BlockMemory> blocks;
  Loans::Loan loan;
};

}  // namespace

std::shared_ptr<Transfer> Store::submit(std::function<void(Transfer&)> work, bool here,
                                        std::shared_ptr<Buffers> buffers, const py::object& owner) {
  const std::vector<Lent> gone = take_back_abandoned();
  std::shared_ptr<Transfer> transfer;
  try {
    transfer = transfers_->submit(std::move(work), here);
  } catch (const std::system_error& error) {
    raise_error("NotEnoughMemory", std::string("no thread for background calls: ") + error.what());
  }
  if (transfer == nullptr) {
    raise_error("KvstoreError", std::to_string(Transfers::kFinishedMax) +
                                    " transfers have finished and nobody has collected them; call "
                                    "drain(), or wait for each");
  }
  // In one step with the submission: an interrupt finds both done or neither.
  lent_[transfer->id] = {transfer, std::move(buffers), owner};
  owner.attr("_native") = transfer;
  return transfer;
}

// What comes out may run finalizers when it is dropped: last, when nothing here is half done.
Store::Lent Store::take_back(uint64_t id) {
  const auto at = lent_.find(id);
  if (at == lent_.end()) return {};
  Lent lent = std::move(at->second);
  lent_.erase(at);
  return lent;
}

std::vector<Store::Lent> Store::take_back_abandoned() {
  std::vector<Lent> gone;
  std::erase_if(abandoned_, [&](uint64_t id) {
    const auto at = lent_.find(id);
    if (at != lent_.end() && !at->second.transfer->done.load()) return false;
    if (at != lent_.end()) transfers_->wait(*at->second.transfer, 0);  // drain() names it no more
    gone.push_back(take_back(id));
    return true;
  });
  return gone;
}

std::shared_ptr<Transfer> Store::put_async(const py::buffer& keys,
                                           const std::shared_ptr<Buffers>& buffers, size_t skip,
                                           bool chain, uint32_t version,
                                           const std::vector<std::string>& texts,
                                           int64_t timeout_ns, const py::object& owner) {
  const Call call(*this);
  auto job = std::make_shared<AsyncPut>(keys, *buffers, skip, chain, version, texts, transport_);
  check_sizes(job->arguments.lengths, *transport_);
  if (!job->loan.granted()) raise_busy();
  return submit(
      [job, limits = limits_for(timeout_ns)](Transfer& transfer) mutable {
        limits.cancelled = &transfer.cancelled;
        if (transfer.cancelled.load()) {
          transfer.put.statuses.assign(job->blocks.size(), Status::kCancelled);
        } else {
          transfer.put = job->store->put(job->arguments.request, job->blocks, limits);
        }
      },
      false, buffers, owner);
}

std::shared_ptr<Transfer> Store::get_async(const py::buffer& keys,
                                           const std::shared_ptr<Buffers>& buffers,
                                           int64_t timeout_ns, const py::object& owner) {
  const Call call(*this);
  auto job = std::make_shared<AsyncGet>(keys, *buffers, transport_);
  if (job->keys.size() != job->blocks.size())
    raise_error("InvalidArgument", "keys and targets differ in number");
  if (!job->loan.granted()) raise_busy();
  return submit(
      [job, limits = limits_for(timeout_ns)](Transfer& transfer) mutable {
        limits.cancelled = &transfer.cancelled;
        if (transfer.cancelled.load()) {
          transfer.get.statuses.assign(job->blocks.size(), Status::kCancelled);
          transfer.get.bytes.assign(job->blocks.size(), 0);
        } else {
          transfer.get = job->store->get(job->keys, job->blocks, limits);
        }
      },
      false, buffers, owner);
}

std::shared_ptr<Transfer> Store::match_async(const py::buffer& keys, size_t skip, uint16_t ranks,
                                             const py::object& owner) {
  const Call call(*this);
  std::vector<BlockKey> wanted = to_keys(keys);
  check_match(wanted.size(), skip, ranks);
  // In process a match is a few microseconds of table look-ups: done before any hand-over would be.
  return submit(
      [store = transport_, wanted = std::move(wanted), skip, ranks](Transfer& transfer) {
        transfer.matched = match_or_not(*store, wanted, skip, ranks);
      },
      transport_->local(), nullptr, owner);
}

py::list Store::drain() {
  const Call call(*this);
  std::vector<Lent> collected = take_back_abandoned();
  py::list owners;
  for (const auto& transfer : transfers_->drain()) {
    collected.push_back(take_back(transfer->id));
    if (collected.back().owner) owners.append(collected.back().owner);
  }
  return owners;
}

bool Store::wait(const std::shared_ptr<Transfer>& transfer, int64_t timeout_ns) {
  check_fork(pid_);  // also after close(): what was submitted can still be asked for
  const Nanos deadline = deadline_after(timeout_ns);
  const bool done = transfer->done.load() ? transfers_->wait(*transfer, deadline)
                                          : wait_in_slices(deadline, [&](Nanos until) {
                                              return transfers_->wait(*transfer, until);
                                            });
  if (done) const Lent collected = take_back(transfer->id);
  return done;
}

void Store::cancel(Transfer& transfer) {
  check_fork(pid_);
  transfer.cancelled.store(true);
  calls_.fetch_add(1);
  if (!closed_.load()) transport_->wake();
  calls_.fetch_sub(1);
}

// Nobody will ask for it: ends it, and what was lent to it comes back once it has ended.
void Store::abandon(const std::shared_ptr<Transfer>& transfer) {
  cancel(*transfer);
  abandoned_.push_back(transfer->id);
}

int Store::event_fd() {
  const Call call(*this);
  return transfers_->event_fd();
}

int Store::await_fd() {
  const Call call(*this);
  return transfers_->await_fd();
}

void Store::set_awaiting(bool awaiting) {
  check_fork(pid_);
  transfers_->set_awaiting(awaiting);
}

void bind_async(py::module_& m, StoreClass& store) {
  store.def("put_async", &Store::put_async)
      .def("get_async", &Store::get_async)
      .def("match_async", &Store::match_async)
      .def("drain", &Store::drain)
      .def("wait", &Store::wait)
      .def("cancel", &Store::cancel)
      .def("abandon", &Store::abandon)
      .def("event_fd", &Store::event_fd)
      .def("await_fd", &Store::await_fd)
      .def("set_awaiting", &Store::set_awaiting);
  py::class_<Transfer, std::shared_ptr<Transfer>>(m, "Transfer")
      .def_readonly("id", &Transfer::id)
      .def_property_readonly("done", [](const Transfer& self) { return self.done.load(); })
      .def("put_result", [](const Transfer& self) { return to_python(self.put); })
      .def("get_result",
           [](const Transfer& self, const Buffers& buffers) {
             return to_python(self.get, buffers.blocks());
           })
      .def_property_readonly("matched", [](const Transfer& self) { return self.matched; });
}

}  // namespace kvstore
