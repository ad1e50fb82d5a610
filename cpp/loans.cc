#include "loans.h"

#include <algorithm>

namespace kvstore {

Loans::Loan::Loan(Loans& loans, const std::vector<BlockMemory>& memory, bool writable)
    : loans_(loans), memory_(memory), writable_(writable) {
  for (const BlockMemory& block : memory) {
    const auto [first, last] = block.bounds();
    low_ = std::min(low_, first);
    high_ = std::max(high_, last);
  }
  const std::lock_guard lock(loans_.mutex_);
  for (const Loan* other : loans_.granted_) {
    if ((writable_ || other->writable_) && low_ < other->high_ && other->low_ < high_ &&
        any_overlap(memory_, other->memory_)) {
      return;
    }
  }
  loans_.granted_.push_back(this);
  granted_ = true;
}

Loans::Loan::~Loan() {
  if (!granted_) return;
  const std::lock_guard lock(loans_.mutex_);
  std::erase(loans_.granted_, this);
}

}  // namespace kvstore
