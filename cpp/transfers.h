// Calls that go on in the background: submit, then wait, poll or drain.
//
// Life of a transfer: submit() → queued → running → done, and finished once. cancel() makes it
//   finish early, never not.
// Threads: any; workers of its own, started with the first transfer. They need no interpreter.
// Owns: its workers and two event descriptors: one tells of transfers to drain, the other wakes
//   awaiting loops.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "transport_local.h"
#include "types.h"

namespace kvstore {

struct Transfer {
  uint64_t id = 0;
  std::function<void(Transfer&)> work;
  std::atomic<bool> cancelled{false};
  std::atomic<bool> done{false};
  // Results; constant once done.
  PutOutcome put;
  GetOutcome get;
  int64_t matched = 0;  // -1: the node could not be asked
};

class Transfers {
 public:
  static constexpr size_t kFinishedMax = 65536;

  Transfers();
  // Cancels what is left and waits for it.
  ~Transfers();
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  // With `here` the work is done before this returns: it is shorter than handing it over. Null if
  // kFinishedMax transfers have finished and nobody has collected them.
  std::shared_ptr<Transfer> submit(std::function<void(Transfer&)> work, bool here);
  // True once done; false at the deadline. Collects it: drain() will not name it any more.
  bool wait(Transfer& transfer, Nanos deadline);
  // Finished and not collected, in order of finishing.
  std::vector<std::shared_ptr<Transfer>> drain();
  void cancel_all();
  size_t num_unfinished() const;

  // Readable while something finished and was not drained; nobody is told before it is asked for.
  int event_fd();
  int await_fd() const { return await_fd_; }
  // Whether each finish shall also be signalled on await_fd.
  void set_awaiting(bool awaiting) { awaiting_.store(awaiting); }

 private:
  static constexpr unsigned kWorkers = 2;
  void work();
  void finish(const std::shared_ptr<Transfer>& transfer);

  const int event_fd_;
  const int await_fd_;
  std::atomic<bool> watched_{false};  // event_fd was asked for
  std::atomic<bool> awaiting_{false};
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  uint64_t next_id_ = 1;
  std::deque<std::shared_ptr<Transfer>> queued_;
  std::list<std::shared_ptr<Transfer>> running_;
  std::list<std::shared_ptr<Transfer>> finished_;
  bool stopping_ = false;
  std::condition_variable submitted_;
  std::condition_variable finished_one_;
  std::vector<std::thread> workers_;
};

}  // namespace kvstore
