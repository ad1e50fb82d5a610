// A node's memory as a client on its machine sees it.
//
// Threads: any.
// Owns: its mappings, which no forked child inherits. Blocks stay readable through it when the node
//   is dead: nobody reuses them then.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "segment.h"
#include "sockets.h"

namespace kvstore {

class Mapping {
 public:
  // Null with a reason.
  static std::shared_ptr<Mapping> map(Socket data, const Socket& headers, uint64_t pool_bytes,
                                      uint64_t header_bytes, std::string* error);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  uint8_t* readable() const { return readable_; }  // writing there ends the process
  uint8_t* writable();                             // mapped by the first call; null: cannot be
  uint64_t bytes() const { return bytes_; }
  // The slot's generation now; zero if there is no such slot.
  uint64_t generation(uint32_t slot) const;
  bool contains(const Extent& extent) const {
    return extent.offset <= bytes_ && extent.bytes <= bytes_ - extent.offset;
  }
  // Brings [first, first + bytes) into the page tables. REQUIRES: the node has backed it.
  void populate(uint64_t first, uint64_t bytes, bool for_writing);
  bool has_writable() const { return writable_.load() != nullptr; }

 private:
  Mapping();
  const pid_t owner_;  // in a forked child these addresses are somebody else's
  Socket data_;
  uint8_t* readable_ = nullptr;
  std::mutex mutex_;
  std::atomic<uint8_t*> writable_{nullptr};
  const SlotHeader* headers_ = nullptr;
  uint64_t bytes_ = 0;
  uint64_t header_bytes_ = 0;
};

}  // namespace kvstore
