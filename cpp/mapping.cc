#include "mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14; older headers lack these
#define MADV_POPULATE_WRITE 23
#endif

namespace kvstore {
namespace {

// Long enough, and never shorter: else reading it could end the process.
bool holds(const Socket& file, uint64_t bytes) {
  struct stat what;
  if (fstat(file.fd(), &what) != 0 || static_cast<uint64_t>(what.st_size) < bytes) return false;
  return (fcntl(file.fd(), F_GET_SEALS) & F_SEAL_SHRINK) != 0;
}

void* map_shared(int fd, uint64_t bytes, int access) {
  void* const mapped = mmap(nullptr, bytes, access, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (mapped == MAP_FAILED) return nullptr;
  madvise(mapped, bytes, MADV_DONTFORK);
  madvise(mapped, bytes, MADV_HUGEPAGE);  // where the node's memory has them
  return mapped;
}

}  // namespace

std::shared_ptr<Mapping> Mapping::map(Socket data, const Socket& headers, uint64_t pool_bytes,
                                      uint64_t header_bytes, std::string* error) {
  if (!holds(data, pool_bytes) || !holds(headers, header_bytes)) {
    *error = "the node's memory is not as it should be";
    return nullptr;
  }
  std::shared_ptr<Mapping> mapping(new Mapping());
  mapping->bytes_ = pool_bytes;
  mapping->header_bytes_ = header_bytes;
  mapping->readable_ = static_cast<uint8_t*>(map_shared(data.fd(), pool_bytes, PROT_READ));
  mapping->headers_ =
      static_cast<const SlotHeader*>(map_shared(headers.fd(), header_bytes, PROT_READ));
  if (mapping->readable_ == nullptr || mapping->headers_ == nullptr) {
    *error = "cannot map the node's memory: " + errno_text(errno);
    return nullptr;
  }
  mapping->data_ = std::move(data);
  return mapping;
}

Mapping::Mapping() : owner_(getpid()) {}

Mapping::~Mapping() {
  if (getpid() != owner_) return;
  if (readable_ != nullptr) munmap(readable_, bytes_);
  if (writable_ != nullptr) munmap(writable_, bytes_);
  if (headers_ != nullptr) munmap(const_cast<SlotHeader*>(headers_), header_bytes_);
}

uint8_t* Mapping::writable() {
  if (uint8_t* const mapped = writable_.load()) return mapped;
  const std::lock_guard lock(mutex_);
  if (writable_.load() == nullptr)
    writable_.store(static_cast<uint8_t*>(map_shared(data_.fd(), bytes_, PROT_READ | PROT_WRITE)));
  return writable_.load();
}

uint64_t Mapping::generation(uint32_t slot) const {
  if (slot >= header_bytes_ / sizeof(SlotHeader)) return 0;
#ifndef __SANITIZE_THREAD__                             // it does not know fences
  std::atomic_thread_fence(std::memory_order_acquire);  // what was copied was copied before
#endif
  return headers_[slot].generation.load(std::memory_order_acquire);
}

void Mapping::populate(uint64_t first, uint64_t bytes, bool for_writing) {
  uint8_t* const start = for_writing ? writable_.load() : readable_;
  // A hint: pages that are not there yet come with their first use.
  if (start != nullptr)
    madvise(start + first, bytes, for_writing ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
}

}  // namespace kvstore
