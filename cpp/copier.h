// Several threads for one large batch of copies. The caller works too; helpers join while there is
// work.
// Threads: run() from any thread, also at the same time. Helpers need nothing but the work's own
//   memory.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace kvstore {

class Copier {
 public:
  // `threads` in all, the caller of run() included; 0: chosen by the number of cores.
  explicit Copier(unsigned threads);
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  unsigned threads() const { return static_cast<unsigned>(helpers_.size()) + 1; }

  // Calls work(i) once for each i below `num_units`, and returns when all have returned. With
  // `alone` no helper is woken: below a few hundred KiB waking one costs more than it brings.
  void run(size_t num_units, bool alone, const std::function<void(size_t)>& work);

 private:
  struct Job {
    const std::function<void(size_t)>* work;
    size_t num_units;
    std::atomic<size_t> next{0};
    size_t num_inside = 0;  // helpers at work on it; guarded by mutex_
  };
  void help();
  void stop();

  std::mutex mutex_;
  // Guarded by mutex_.
  std::deque<Job*> jobs_;
  bool stopping_ = false;
  std::condition_variable wake_;
  std::condition_variable left_;
  std::vector<std::thread> helpers_;
};

}  // namespace kvstore
