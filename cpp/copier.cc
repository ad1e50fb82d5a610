#include "copier.h"

#include <algorithm>

namespace kvstore {
namespace {

// Four threads saturate one socket's memory on the machines we know; more only take cores from the
// engine.
constexpr unsigned kThreadsMax = 4;

}  // namespace

Copier::Copier(unsigned threads) {
  if (threads == 0) threads = std::clamp(std::thread::hardware_concurrency(), 1U, kThreadsMax);
  try {
    for (unsigned i = 1; i < threads; ++i) helpers_.emplace_back([this] { help(); });
  } catch (...) {
    stop();
    throw;
  }
}

Copier::~Copier() { stop(); }

void Copier::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void Copier::run(size_t num_units, bool alone, const std::function<void(size_t)>& work) {
  if (alone || helpers_.empty() || num_units < 2) {
    for (size_t i = 0; i < num_units; ++i) work(i);
    return;
  }
  Job job{&work, num_units};
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(&job);
  }
  wake_.notify_all();
  for (size_t i = job.next.fetch_add(1); i < num_units; i = job.next.fetch_add(1)) work(i);
  std::unique_lock lock(mutex_);
  std::erase(jobs_, &job);  // nobody joins from here on
  left_.wait(lock, [&] { return job.num_inside == 0; });
}

void Copier::help() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    Job* const job = jobs_.front();
    ++job->num_inside;
    lock.unlock();
    for (size_t i = job->next.fetch_add(1); i < job->num_units; i = job->next.fetch_add(1))
      (*job->work)(i);
    lock.lock();
    std::erase(jobs_, job);
    if (--job->num_inside == 0) left_.notify_all();
  }
}

}  // namespace kvstore
