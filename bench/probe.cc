// What the kernel's sockets give without a store: the base that bench/wire.py compares with.
//
//   probe serve PATH BYTES        listens on 127.0.0.1 and on the unix socket PATH, prints the port
//   probe drive PORT PATH BYTES   connects to both and does what standard input asks, a line each:
//     stream acked|free BLOCK_BYTES BATCH COUNT, then COUNT numbers of blocks of the source and
//         COUNT of the target             -> seconds
//     trips tcp|unix REQUEST_BYTES REPLY_BYTES COUNT     -> nanoseconds of each, in one line
//
// A stream sends blocks of a source of BYTES into their places in a target of BYTES, a checksum for
// each part on both sides while its bytes are in the cache, and compares them. "acked": a byte
// comes back for each batch, as a call returns; "free": one at the end. Both processes have one
// thread.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#include "crc32c.h"

namespace {

constexpr size_t kPartBytes = 1 << 20;
constexpr size_t kCallBytes = 1 << 20;  // at least so many for each system call, if there are
constexpr size_t kIovMax = 1024;        // Linux's

struct Order {  // what the driver is about to do; as it is in memory, both run the same program
  uint32_t kind;
  uint32_t batch;
  uint64_t count;
  uint64_t block_bytes;  // of trips: of the request
  uint64_t reply_bytes;
};
constexpr uint32_t kAcked = 1;
constexpr uint32_t kFree = 2;
constexpr uint32_t kTrips = 3;

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::exit(1);
}

int check(int result, const char* what) {
  if (result < 0) fail(what);
  return result;
}

// Memory that is there, with words that differ from place to place.
uint8_t* allocate(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) fail("mmap");
  auto* words = static_cast<uint64_t*>(memory);
  uint64_t state = 1;
  for (size_t i = 0; i < bytes / 8; i++) words[i] = state = state * 6364136223846793005 + 1;
  return static_cast<uint8_t*>(memory);
}

void advance(std::vector<iovec>& pieces, size_t& first, size_t bytes) {
  while (bytes > 0) {
    const size_t taken = std::min(bytes, pieces[first].iov_len);
    pieces[first].iov_base = static_cast<uint8_t*>(pieces[first].iov_base) + taken;
    pieces[first].iov_len -= taken;
    bytes -= taken;
    if (pieces[first].iov_len == 0) first++;
  }
}

void send_all(int fd, std::vector<iovec>& pieces) {
  for (size_t first = 0; first < pieces.size();) {
    const ssize_t sent = writev(fd, &pieces[first], int(std::min(kIovMax, pieces.size() - first)));
    if (sent <= 0) fail("writev");
    advance(pieces, first, size_t(sent));
  }
  pieces.clear();
}

void send_bytes(int fd, const void* data, size_t bytes) {
  std::vector<iovec> pieces = {{const_cast<void*>(data), bytes}};
  send_all(fd, pieces);
}

// False if the other side closed before the first byte.
bool receive(int fd, void* data, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t got = read(fd, static_cast<uint8_t*>(data) + done, bytes - done);
    if (got == 0 && done == 0) return false;
    if (got <= 0) fail("read");
    done += size_t(got);
  }
  return true;
}

// The parts of blocks [first, last) in order.
std::vector<iovec> parts_of(uint8_t* memory, size_t block_bytes, const uint32_t* first,
                            const uint32_t* last) {
  std::vector<iovec> parts;
  for (; first != last; first++) {
    uint8_t* block = memory + *first * block_bytes;
    for (size_t at = 0; at < block_bytes; at += kPartBytes)
      parts.push_back({block + at, std::min(kPartBytes, block_bytes - at)});
  }
  return parts;
}

void send_batch(int fd, const std::vector<iovec>& parts) {
  std::vector<uint32_t> sums;
  std::vector<iovec> pieces;
  size_t bytes = 0;
  for (const iovec& part : parts) {
    sums.push_back(kvstore::crc32c(0, part.iov_base, part.iov_len));
    pieces.push_back(part);
    bytes += part.iov_len;
    if (bytes < kCallBytes && pieces.size() < kIovMax) continue;
    send_all(fd, pieces);
    bytes = 0;
  }
  pieces.push_back({sums.data(), sums.size() * sizeof(sums[0])});
  send_all(fd, pieces);
}

void receive_batch(int fd, std::vector<iovec> parts) {
  std::vector<uint32_t> sums(parts.size());
  std::vector<uint32_t> sent(parts.size());
  for (size_t first = 0; first < parts.size();) {
    size_t last = first;
    for (size_t bytes = 0; last < parts.size() && last - first < kIovMax && bytes < kCallBytes;)
      bytes += parts[last++].iov_len;
    const ssize_t got = readv(fd, &parts[first], int(last - first));
    if (got <= 0) fail("readv");
    for (size_t left = size_t(got); left > 0;) {
      const size_t taken = std::min(left, parts[first].iov_len);
      sums[first] = kvstore::crc32c(sums[first], parts[first].iov_base, taken);
      left -= taken;
      advance(parts, first, taken);
    }
  }
  if (!receive(fd, sent.data(), sent.size() * sizeof(sent[0])) || sent != sums) {
    std::fprintf(stderr, "probe: checksums differ\n");
    std::exit(1);
  }
}

// ---- the two roles -----------------------------------------------------------------------------

void answer_trips(int fd, const Order& order) {
  std::vector<uint8_t> request(order.block_bytes);
  std::vector<uint8_t> reply(order.reply_bytes);
  for (uint64_t i = 0; i < order.count; i++) {
    if (!receive(fd, request.data(), request.size())) fail("trips");
    send_bytes(fd, reply.data(), reply.size());
  }
}

void answer_stream(int fd, const Order& order, uint8_t* target) {
  std::vector<uint32_t> places(order.count);
  if (!receive(fd, places.data(), places.size() * sizeof(places[0]))) fail("stream");
  const uint8_t done = 1;
  send_bytes(fd, &done, 1);
  for (size_t at = 0; at < places.size(); at += order.batch) {
    const size_t end = std::min(places.size(), at + order.batch);
    receive_batch(fd, parts_of(target, order.block_bytes, &places[at], places.data() + end));
    if (order.kind == kAcked) send_bytes(fd, &done, 1);
  }
  if (order.kind == kFree) send_bytes(fd, &done, 1);
}

void set_no_delay(int fd) {
  const int on = 1;
  check(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on), "TCP_NODELAY");
}

sockaddr_in loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

sockaddr_un named(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) fail("path too long");
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return address;
}

template <class Address>
int listen_on(int family, const Address& address) {
  const int fd = check(socket(family, SOCK_STREAM, 0), "socket");
  check(bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), "bind");
  check(listen(fd, 1), "listen");
  return fd;
}

template <class Address>
int connect_to(int family, const Address& address) {
  const int fd = check(socket(family, SOCK_STREAM, 0), "socket");
  check(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), "connect");
  return fd;
}

void serve(const std::string& path, size_t bytes) {
  uint8_t* target = allocate(bytes);
  const int tcp_listener = listen_on(AF_INET, loopback(0));
  const int unix_listener = listen_on(AF_UNIX, named(path));
  sockaddr_in bound{};
  socklen_t size = sizeof bound;
  check(getsockname(tcp_listener, reinterpret_cast<sockaddr*>(&bound), &size), "getsockname");
  std::printf("%d\n", ntohs(bound.sin_port));
  std::fflush(stdout);
  const int tcp = check(accept(tcp_listener, nullptr, nullptr), "accept");
  const int local = check(accept(unix_listener, nullptr, nullptr), "accept");
  set_no_delay(tcp);
  for (;;) {
    pollfd ready[] = {{tcp, POLLIN, 0}, {local, POLLIN, 0}};
    check(poll(ready, 2, -1), "poll");
    const int fd = ready[0].revents != 0 ? tcp : local;
    Order order{};
    if (!receive(fd, &order, sizeof order)) return;  // the driver has gone
    if (order.kind == kTrips)
      answer_trips(fd, order);
    else
      answer_stream(fd, order, target);
  }
}

using Clock = std::chrono::steady_clock;

void drive_stream(int fd, uint8_t* source) {
  std::string kind;
  Order order{};
  std::cin >> kind >> order.block_bytes >> order.batch >> order.count;
  order.kind = kind == "acked" ? kAcked : kFree;
  std::vector<uint32_t> from(order.count);
  std::vector<uint32_t> to(order.count);
  for (uint32_t& each : from) std::cin >> each;
  for (uint32_t& each : to) std::cin >> each;
  send_bytes(fd, &order, sizeof order);
  send_bytes(fd, to.data(), to.size() * sizeof(to[0]));
  uint8_t done = 0;
  if (!receive(fd, &done, 1)) fail("stream");
  const auto began = Clock::now();
  for (size_t at = 0; at < from.size(); at += order.batch) {
    const size_t end = std::min(from.size(), at + order.batch);
    send_batch(fd, parts_of(source, order.block_bytes, &from[at], from.data() + end));
    if (order.kind == kAcked && !receive(fd, &done, 1)) fail("ack");
  }
  if (order.kind == kFree && !receive(fd, &done, 1)) fail("ack");
  std::printf("%.9f\n", std::chrono::duration<double>(Clock::now() - began).count());
}

void drive_trips(int tcp, int local) {
  std::string kind;
  Order order{};
  std::cin >> kind >> order.block_bytes >> order.reply_bytes >> order.count;
  order.kind = kTrips;
  const int fd = kind == "tcp" ? tcp : local;
  std::vector<uint8_t> request(order.block_bytes);
  std::vector<uint8_t> reply(order.reply_bytes);
  std::vector<int64_t> times(order.count);
  send_bytes(fd, &order, sizeof order);
  for (int64_t& each : times) {
    const auto began = Clock::now();
    send_bytes(fd, request.data(), request.size());
    if (!receive(fd, reply.data(), reply.size())) fail("reply");
    each = std::chrono::nanoseconds(Clock::now() - began).count();
  }
  for (const int64_t each : times) std::printf("%lld ", static_cast<long long>(each));
  std::printf("\n");
}

void drive(uint16_t port, const std::string& path, size_t bytes) {
  uint8_t* source = allocate(bytes);
  const int tcp = connect_to(AF_INET, loopback(port));
  const int local = connect_to(AF_UNIX, named(path));
  set_no_delay(tcp);
  std::printf("ready\n");
  std::fflush(stdout);
  for (std::string what; std::cin >> what;) {
    if (what == "stream")
      drive_stream(tcp, source);
    else
      drive_trips(tcp, local);
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string role = argc > 1 ? argv[1] : "";
  if (role == "serve" && argc == 4) {
    serve(argv[2], std::strtoull(argv[3], nullptr, 10));
  } else if (role == "drive" && argc == 5) {
    drive(uint16_t(std::atoi(argv[2])), argv[3], std::strtoull(argv[4], nullptr, 10));
  } else {
    std::fprintf(stderr, "usage: probe serve PATH BYTES | probe drive PORT PATH BYTES\n");
    return 2;
  }
  return 0;
}
