// Memory lent to calls under way, so that nobody fills what another reads or fills.
// Threads: any.
// Owns: nothing: a loan points to the caller's list of blocks, which outlives it.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "memory.h"

namespace kvstore {

class Loans {
 public:
  class Loan {
   public:
    Loan(Loans& loans, const std::vector<BlockMemory>& memory, bool writable);
    ~Loan();
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;
    bool granted() const { return granted_; }  // false: it overlaps with another, one being written

   private:
    Loans& loans_;
    const std::vector<BlockMemory>& memory_;
    const bool writable_;
    uintptr_t low_ = UINTPTR_MAX;
    uintptr_t high_ = 0;
    bool granted_ = false;
  };

 private:
  std::mutex mutex_;
  std::vector<const Loan*> granted_;  // guarded by mutex_
};

}  // namespace kvstore
