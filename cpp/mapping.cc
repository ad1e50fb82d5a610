#include "mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14; older headers lack it
#endif

namespace kvstore {
namespace {

constexpr uint64_t kPopulateBytes = uint64_t{32} << 20;  // in one step

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

namespace {

// Reading makes entries that can be written too, where the mapping can be, at a quarter of the
// price of writing. A hint: what does not come now comes with its first use.
void enter(uint8_t* start, uint64_t bytes) { madvise(start, bytes, MADV_POPULATE_READ); }

}  // namespace

bool Mapping::populate(uint64_t backed, const std::atomic<bool>& stopping) {
  const auto up_to = [&](uint8_t* memory, std::atomic<uint64_t>& done) {
    while (done.load() < backed && !stopping.load()) {
      const uint64_t step = std::min(kPopulateBytes, backed - done.load());
      enter(memory + done.load(), step);
      done.fetch_add(step);
    }
  };
  up_to(readable_, populated_);
  if (uint8_t* const second = writable_.load()) up_to(second, populated_writable_);
  return populated();
}

bool Mapping::populated() const {
  return populated_.load() == bytes_ && (!has_writable() || populated_writable_.load() == bytes_);
}

}  // namespace kvstore
