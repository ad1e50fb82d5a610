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
#include <vector>

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
  bool has_writable() const { return writable_.load() != nullptr; }

  // Enters memory into this process's page tables before a copy has to, up to what the node has
  // backed; true once it is all there. REQUIRES: one thread at a time.
  bool populate(uint64_t backed, const std::atomic<bool>& stopping);
  bool populated() const;  // all of it

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
  std::atomic<uint64_t> populated_{0};           // from the front
  std::atomic<uint64_t> populated_writable_{0};  // of the second mapping
};

}  // namespace kvstore
