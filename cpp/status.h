// What can happen to one item of a batch. A code exists only where a caller would do something
// else. Python's `kvstore.Status` mirrors this list value by value (a test compares the two).
#pragma once

#include <cstdint>

namespace kvstore {

enum class Status : uint8_t {
  kOk = 0,              // done; the byte count is the block's length
  kExists = 1,          // put: the key was committed before (first writer wins)
  kMiss = 2,            // not held here
  kOutOfSpace = 3,      // no room before the deadline, or everything in the way is held
  kCorrupt = 4,         // a checksum did not match
  kUnavailable = 5,     // the holder could not be asked, or the lease was revoked
  kTimedOut = 6,        // the deadline passed first
  kCancelled = 7,       // the caller cancelled
  kOutcomeUnknown = 8,  // the reply was lost; it may have happened
  kStale = 9,           // the namespace was cleared after these keys were made
};

inline constexpr int kStatusCount = 10;

}  // namespace kvstore
