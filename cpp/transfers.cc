#include "transfers.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace kvstore {
namespace {

void signal(int fd) {
  const uint64_t one = 1;
  // Fails only if the count is at its maximum: then the reader is told already.
  [[maybe_unused]] const ssize_t written = write(fd, &one, sizeof one);
}

void quiet(int fd) {
  uint64_t count;
  [[maybe_unused]] const ssize_t got = read(fd, &count, sizeof count);
}

}  // namespace

Transfers::Transfers()
    : event_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      await_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (event_fd_ >= 0 && await_fd_ >= 0) return;
  const int error = errno;
  if (event_fd_ >= 0) ::close(event_fd_);
  throw std::system_error(error, std::generic_category(), "no event descriptor");
}

Transfers::~Transfers() {
  cancel_all();
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  submitted_.notify_all();
  for (std::thread& worker : workers_) worker.join();  // they run the queue empty first
  close(event_fd_);
  close(await_fd_);
}

std::shared_ptr<Transfer> Transfers::submit(std::function<void(Transfer&)> work, bool here) {
  auto transfer = std::make_shared<Transfer>();
  transfer->work = std::move(work);
  std::unique_lock lock(mutex_);
  if (finished_.size() >= kFinishedMax) return nullptr;
  transfer->id = next_id_++;
  if (here) {
    running_.push_back(transfer);
    lock.unlock();
    try {
      transfer->work(*transfer);
    } catch (...) {
      lock.lock();
      running_.remove(transfer);
      throw;
    }
    finish(transfer);
    return transfer;
  }
  while (workers_.size() < kWorkers) {
    try {
      workers_.emplace_back([this] { this->work(); });
    } catch (const std::system_error&) {
      if (workers_.empty()) throw;
      break;  // one will do
    }
  }
  queued_.push_back(transfer);
  lock.unlock();
  submitted_.notify_one();
  return transfer;
}

void Transfers::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    submitted_.wait(lock, [this] { return stopping_ || !queued_.empty(); });
    if (queued_.empty()) return;
    const std::shared_ptr<Transfer> transfer = queued_.front();
    queued_.pop_front();
    running_.push_back(transfer);
    lock.unlock();
    transfer->work(*transfer);
    finish(transfer);
    lock.lock();
  }
}

void Transfers::finish(const std::shared_ptr<Transfer>& transfer) {
  transfer->work =
      nullptr;  // what it held (keys, the loan on the caller's memory) goes before anybody hears
  {
    const std::lock_guard lock(mutex_);
    running_.remove(transfer);
    finished_.push_back(transfer);
    transfer->done.store(true);
  }
  finished_one_.notify_all();
  if (watched_.load()) signal(event_fd_);
  if (awaiting_.load()) signal(await_fd_);
}

bool Transfers::wait(Transfer& transfer, Nanos deadline) {
  std::unique_lock lock(mutex_);
  const auto done = [&] { return transfer.done.load(); };
  if (deadline == kNever) {
    finished_one_.wait(lock, done);
  } else {
    const auto until = std::chrono::steady_clock::time_point(std::chrono::nanoseconds(deadline));
    if (!finished_one_.wait_until(lock, until, done)) return false;
  }
  finished_.remove_if([&](const auto& other) { return other.get() == &transfer; });
  return true;
}

std::vector<std::shared_ptr<Transfer>> Transfers::drain() {
  if (watched_.load()) quiet(event_fd_);
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Transfer>> finished(finished_.begin(), finished_.end());
  finished_.clear();
  return finished;
}

int Transfers::event_fd() {
  if (!watched_.exchange(true)) {
    const std::lock_guard lock(mutex_);
    if (!finished_.empty()) signal(event_fd_);
  }
  return event_fd_;
}

void Transfers::cancel_all() {
  const std::lock_guard lock(mutex_);
  for (const auto& transfer : queued_) transfer->cancelled.store(true);
  for (const auto& transfer : running_) transfer->cancelled.store(true);
}

size_t Transfers::num_unfinished() const {
  const std::lock_guard lock(mutex_);
  return queued_.size() + running_.size();
}

}  // namespace kvstore
