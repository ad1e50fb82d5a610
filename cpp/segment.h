// One memfd on one NUMA node: the payload memory of a node, with its slot headers in a memfd of
// their own.
//
// Threads: everything is constant after create() but the pages themselves. populate() may run
//   beside any use of frames populated before. Headers are written by the owner of the slot only
//   (see pool.h for who that is).
// Owns: both descriptors and both mappings. Neither mapping is inherited by a forked child.
// Invariants: the data memfd cannot be resized; the header memfd cannot be mapped writable by
//   anybody else.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "types.h"

namespace kvstore {

// What stands beside every slot. A peer that maps the headers reads them; only the owner writes.
struct SlotHeader {
  std::atomic<uint64_t> generation;  // odd: granted or free; even: committed
  uint64_t length;                   // bytes of the block
  uint64_t offset;                   // of the first extent in the segment
  uint32_t num_extents;
  uint32_t content_id;  // CRC32C of the part table
  BlockKey key;
};
static_assert(sizeof(SlotHeader) == 64);

class Segment {
 public:
  struct Options {
    uint64_t bytes = 0;        // rounded up to whole frames
    bool lock_memory = false;  // mlock every frame as it is populated
  };

  // Null with a reason a person can act on, if the machine or the cgroup is short of memory, or the
  // limit on locked memory is too low. Reserves addresses only: returns at once for any size.
  static std::unique_ptr<Segment> create(const Options& options, std::string* error);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Backs frames [first, first + count) with memory. False with a reason if there is none.
  bool populate(uint32_t first, uint32_t count, std::string* error);

  uint8_t* data() const { return data_; }
  SlotHeader& header(uint32_t slot) const { return headers_[slot]; }
  uint32_t num_frames() const { return num_frames_; }
  uint32_t slots_max() const { return slots_max_; }
  uint64_t bytes() const { return uint64_t{num_frames_} * kFrameBytes; }
  const char* pages() const { return pages_; }  // "hugetlb", "transparent huge" or "4 KiB"
  int data_fd() const { return data_fd_; }
  int header_fd() const { return header_fd_; }
  uint64_t header_bytes() const { return header_bytes_; }

 private:
  Segment() = default;
  bool map_data(uint64_t bytes, std::string* error);
  bool map_headers(std::string* error);

  uint8_t* data_ = nullptr;
  void* reservation_ = nullptr;  // the mapping `data_` is aligned inside
  uint64_t reservation_bytes_ = 0;
  SlotHeader* headers_ = nullptr;
  uint64_t header_bytes_ = 0;
  uint32_t num_frames_ = 0;
  uint32_t slots_max_ = 0;
  int data_fd_ = -1;
  int header_fd_ = -1;
  bool lock_memory_ = false;
  const char* pages_ = "4 KiB";
};

// Zeroed private memory for tables, one huge page where the system gives them: a table larger than
// the processor's page cache spends more time on finding pages than on reading them.
class PrivateSlab {
 public:
  static constexpr size_t kBytes = size_t{2} << 20;
  // kBytes, or a multiple that holds `bytes`. Throws bad_alloc.
  explicit PrivateSlab(size_t bytes);
  ~PrivateSlab();
  PrivateSlab(const PrivateSlab&) = delete;
  PrivateSlab& operator=(const PrivateSlab&) = delete;
  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
  void* mapping_;
  uint8_t* data_;
};

// Bytes this process may still take, by the machine and by every cgroup above it.
uint64_t memory_available();

}  // namespace kvstore
