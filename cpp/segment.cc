#include "segment.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <system_error>

#include "pool.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older headers lack it
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010  // Linux 5.1
#endif

namespace kvstore {
namespace {

// Memory the machine keeps for everything else, whatever the pool's size.
constexpr uint64_t kSpareBytes = uint64_t{64} << 20;

std::string errno_text(const std::string& what) {
  return what + ": " + std::generic_category().message(errno);
}

std::string mib(uint64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

std::string read_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

uint64_t machine_available() {
  std::ifstream file("/proc/meminfo");
  std::string word;
  uint64_t kib = 0;
  while (file >> word) {
    if (word == "MemAvailable:" && file >> kib) return kib << 10;
  }
  return UINT64_MAX;  // no /proc: the kernel decides when pages are taken
}

// The smallest room left from a group up to the root of its hierarchy.
uint64_t group_available(const std::string& root, std::string group, const char* limit_name,
                         const char* used_name) {
  uint64_t room = UINT64_MAX;
  while (!group.empty()) {
    const std::string folder = root + (group == "/" ? std::string() : group);
    const std::string limit = read_line(folder + limit_name);
    const std::string used = read_line(folder + used_name);
    if (!limit.empty() && limit != "max" && !used.empty()) {
      const uint64_t most = strtoull(limit.c_str(), nullptr, 10);
      const uint64_t now = strtoull(used.c_str(), nullptr, 10);
      room = std::min(room, most > now ? most - now : 0);
    }
    if (group == "/") break;
    const size_t slash = group.rfind('/');
    group = slash == 0 ? "/" : group.substr(0, slash);
  }
  return room;
}

// Of this process's memory cgroup, v2 ("0::/group") or v1 ("4:memory:/group").
uint64_t cgroup_available() {
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  uint64_t room = UINT64_MAX;
  while (std::getline(file, line)) {
    const size_t colon = line.find(':');
    const size_t second = line.find(':', colon + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(colon + 1, second - colon - 1);
    const std::string group = line.substr(second + 1);
    if (controllers.empty()) {
      room = std::min(room,
                      group_available("/sys/fs/cgroup", group, "/memory.max", "/memory.current"));
    } else if (controllers == "memory") {
      room = std::min(room, group_available("/sys/fs/cgroup/memory", group,
                                            "/memory.limit_in_bytes", "/memory.usage_in_bytes"));
    }
  }
  return room;
}

uint64_t free_huge_bytes() {
  const std::string folder = "/sys/kernel/mm/hugepages/hugepages-2048kB/";
  const std::string free_pages = read_line(folder + "free_hugepages");
  const std::string reserved = read_line(folder + "resv_hugepages");
  if (free_pages.empty() || reserved.empty()) return 0;
  const uint64_t free_count = strtoull(free_pages.c_str(), nullptr, 10);
  const uint64_t reserved_count = strtoull(reserved.c_str(), nullptr, 10);
  return free_count > reserved_count ? (free_count - reserved_count) * kFrameBytes : 0;
}

bool shared_memory_may_use_huge_pages() {
  const std::string line = read_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  return line.find("[advise]") != std::string::npos || line.find("[always]") != std::string::npos ||
         line.find("[within_size]") != std::string::npos;
}

bool may_lock_any_amount() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2]{};
  if (syscall(SYS_capget, &header, data) != 0) return false;
  return (data[0].effective & (1U << CAP_IPC_LOCK)) != 0;
}

bool check_limits(const Segment::Options& options, uint64_t bytes, std::string* error) {
  const uint64_t room = memory_available();
  if (bytes > room || room - bytes < kSpareBytes) {
    *error = "not enough memory for a pool of " + mib(bytes) + ": " + mib(room) +
             " available (machine and cgroup), of which " + mib(kSpareBytes) +
             " stay free; choose a smaller dram= or free memory";
    return false;
  }
  if (options.lock_memory && !may_lock_any_amount()) {
    rlimit limit{};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    if (limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < bytes) {
      *error = "the limit on locked memory is " + mib(limit.rlim_cur) + ", the pool needs " +
               mib(bytes) +
               "; raise it (ulimit -l, or LimitMEMLOCK= in the unit) or open without lock_memory";
      return false;
    }
  }
  return true;
}

}  // namespace

uint64_t memory_available() { return std::min(machine_available(), cgroup_available()); }

PrivateSlab::PrivateSlab(size_t bytes)
    : bytes_((bytes + kBytes - 1) / kBytes * kBytes),
      mapping_(mmap(nullptr, bytes_ + kBytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
  if (mapping_ == MAP_FAILED) throw std::bad_alloc();
  const uintptr_t start = reinterpret_cast<uintptr_t>(mapping_);
  data_ = reinterpret_cast<uint8_t*>((start + kBytes - 1) / kBytes * kBytes);
  madvise(data_, bytes_, MADV_HUGEPAGE);
}

PrivateSlab::~PrivateSlab() { munmap(mapping_, bytes_ + kBytes); }

std::unique_ptr<Segment> Segment::create(const Options& options, std::string* error) {
  const uint64_t frames = std::max<uint64_t>(1, (options.bytes + kFrameBytes - 1) / kFrameBytes);
  if (frames > UINT32_MAX / 2) {
    *error = "a pool of " + mib(frames * kFrameBytes) + " is beyond the limit of 4 PiB";
    return nullptr;
  }
  if (!check_limits(options, frames * kFrameBytes, error)) return nullptr;
  std::unique_ptr<Segment> segment(new Segment());
  segment->num_frames_ = static_cast<uint32_t>(frames);
  segment->lock_memory_ = options.lock_memory;
  if (!segment->map_data(frames * kFrameBytes, error)) return nullptr;
  if (!segment->map_headers(error)) return nullptr;
  return segment;
}

bool Segment::map_data(uint64_t bytes, std::string* error) {
  if (free_huge_bytes() >= bytes) {
    data_fd_ = memfd_create("kvstore-data", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);
    if (data_fd_ >= 0) pages_ = "hugetlb";
  }
  if (data_fd_ < 0) data_fd_ = memfd_create("kvstore-data", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (data_fd_ < 0 || ftruncate(data_fd_, static_cast<off_t>(bytes)) != 0 ||
      fcntl(data_fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    *error = errno_text("cannot make the pool's memory file");
    return false;
  }
  // Addresses first, one frame too many, so that frames can be aligned to huge pages.
  reservation_bytes_ = bytes + kFrameBytes;
  reservation_ = mmap(nullptr, reservation_bytes_, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reservation_ == MAP_FAILED) {
    reservation_ = nullptr;
    *error = errno_text("cannot reserve " + mib(bytes) + " of addresses");
    return false;
  }
  const uintptr_t start = reinterpret_cast<uintptr_t>(reservation_);
  uint8_t* aligned =
      reinterpret_cast<uint8_t*>((start + kFrameBytes - 1) / kFrameBytes * kFrameBytes);
  void* mapped = mmap(aligned, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, data_fd_, 0);
  if (mapped == MAP_FAILED) {
    *error = errno_text("cannot map the pool's memory");
    return false;
  }
  data_ = aligned;
  madvise(data_, bytes, MADV_DONTFORK);
  if (data_fd_ >= 0 && pages_[0] == '4' && shared_memory_may_use_huge_pages() &&
      madvise(data_, bytes, MADV_HUGEPAGE) == 0) {
    pages_ = "transparent huge";
  }
  return true;
}

bool Segment::map_headers(std::string* error) {
  // As long as it can ever need to be; pages appear when a header is first written.
  slots_max_ = static_cast<uint32_t>(
      std::min<uint64_t>(uint64_t{num_frames_} * kSlotsPerFrameMax, uint64_t{kNoSlot} - 1));
  header_bytes_ = uint64_t{slots_max_} * sizeof(SlotHeader);
  header_fd_ = memfd_create("kvstore-headers", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (header_fd_ < 0 || ftruncate(header_fd_, static_cast<off_t>(header_bytes_)) != 0) {
    *error = errno_text("cannot make the header file");
    return false;
  }
  void* mapped = mmap(nullptr, header_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                      header_fd_, 0);
  if (mapped == MAP_FAILED) {
    *error = errno_text("cannot map the headers");
    return false;
  }
  headers_ = static_cast<SlotHeader*>(mapped);
  madvise(mapped, header_bytes_, MADV_DONTFORK);
  // From here on nobody, this process included, can map the headers writable again.
  if (fcntl(header_fd_, F_ADD_SEALS,
            F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    *error = errno_text("cannot seal the headers");
    return false;
  }
  return true;
}

Segment::~Segment() {
  if (reservation_ != nullptr) munmap(reservation_, reservation_bytes_);
  if (headers_ != nullptr) munmap(headers_, header_bytes_);
  if (data_fd_ >= 0) close(data_fd_);
  if (header_fd_ >= 0) close(header_fd_);
}

bool Segment::populate(uint32_t first, uint32_t count, std::string* error) {
  uint8_t* start = data_ + uint64_t{first} * kFrameBytes;
  const uint64_t bytes = uint64_t{count} * kFrameBytes;
  // Touching unbacked shared memory would end in SIGBUS when there is none; these calls return an
  // error.
  int done;
  do {
    done = madvise(start, bytes, MADV_POPULATE_WRITE);
  } while (done != 0 && (errno == EINTR || errno == EAGAIN));
  if (done != 0 && errno == EINVAL) {  // a kernel without it
    do {
      done = fallocate(data_fd_, 0, static_cast<off_t>(uint64_t{first} * kFrameBytes),
                       static_cast<off_t>(bytes));
    } while (done != 0 && errno == EINTR);
  }
  if (done != 0) {
    *error = errno_text("cannot back " + mib(bytes) + " of the pool with memory");
    return false;
  }
  if (lock_memory_ && mlock(start, bytes) != 0) {
    *error = errno_text("cannot lock " + mib(bytes) + " of the pool in memory");
    return false;
  }
  return true;
}

}  // namespace kvstore
