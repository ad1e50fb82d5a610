#include "sockets.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <mutex>
#include <system_error>
#include <unordered_set>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // Linux 6.5; older headers lack it
#endif

namespace kvstore {
namespace {

constexpr int kBacklog = 1024;

// ---- fork --------------------------------------------------------------------------------------

std::mutex open_mutex;
std::unordered_set<int>& open_sockets() {  // guarded by open_mutex; lives to the very end
  static auto* const sockets = new std::unordered_set<int>();
  return *sockets;
}

void close_in_child() {
  for (const int fd : open_sockets()) close(fd);
  open_sockets().clear();
  open_mutex.unlock();
}

void track(int fd) {
  static const int registered =
      pthread_atfork([] { open_mutex.lock(); }, [] { open_mutex.unlock(); }, close_in_child);
  static_cast<void>(registered);
  const std::lock_guard lock(open_mutex);
  open_sockets().insert(fd);
}

// ---- addresses ---------------------------------------------------------------------------------

bool fill_unix(const std::string& path, sockaddr_un* out, std::string* error) {
  *out = {};
  out->sun_family = AF_UNIX;
  if (path.size() >= sizeof out->sun_path) {
    *error = "the path of a unix socket has at most " + std::to_string(sizeof out->sun_path - 1) +
             " bytes, not " + std::to_string(path.size()) + ": " + path;
    return false;
  }
  std::copy(path.begin(), path.end(), out->sun_path);
  return true;
}

using Resolved = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

Resolved resolve(const Address& address, bool passive, std::string* error) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (passive ? AI_PASSIVE : 0);
  addrinfo* found = nullptr;
  const int failed =
      getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (failed != 0) {
    *error = address.host + ": " + gai_strerror(failed);
    found = nullptr;
  }
  return {found, freeaddrinfo};
}

std::string numeric(const sockaddr* address, socklen_t bytes, uint16_t* port) {
  char host[NI_MAXHOST], service[NI_MAXSERV];
  if (getnameinfo(address, bytes, host, sizeof host, service, sizeof service,
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return {};
  std::from_chars(service, service + strlen(service), *port);
  return host;
}

template <class T>
void set_option(int fd, int level, int option, T value) {
  // A hint: where a kernel has it not, the connection works without.
  setsockopt(fd, level, option, &value, sizeof value);
}

// A peer whose machine is gone is noticed after some 25 seconds, in the middle of a message too.
void tune_tcp(int fd) {
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
  set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 25'000U);
}

void set_blocking(int fd, bool blocking) {
  const int flags = fcntl(fd, F_GETFL);
  fcntl(fd, F_SETFL, blocking ? flags & ~O_NONBLOCK : flags | O_NONBLOCK);
}

void limit_calls(int fd) {
  const timeval slice{0, static_cast<suseconds_t>(kIoSlice / 1000)};
  set_option(fd, SOL_SOCKET, SO_RCVTIMEO, slice);
  set_option(fd, SOL_SOCKET, SO_SNDTIMEO, slice);
}

}  // namespace

Io patience_over(const Patience& patience) {
  if (patience.cancelled != nullptr && patience.cancelled->load()) return Io::kCancelled;
  if (patience.deadline != kNever && monotonic_now() >= patience.deadline) return Io::kTimedOut;
  return Io::kDone;
}

std::string errno_text(int error) { return std::generic_category().message(error); }

void random_bytes(std::span<uint8_t> out) {
  while (!out.empty()) {
    const ssize_t got = getrandom(out.data(), out.size(), 0);
    if (got > 0) out = out.subspan(static_cast<size_t>(got));
  }
}

// ---- Socket ------------------------------------------------------------------------------------

Socket::Socket(int fd) : fd_(fd) {
  if (fd >= 0) track(fd);
}

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.fd_;
    other.fd_ = -1;
  }
  return *this;
}

void Socket::reset() {
  if (fd_ < 0) return;
  const std::lock_guard lock(open_mutex);
  if (open_sockets().erase(fd_) > 0) close(fd_);  // else a fork has closed it: the number is free
  fd_ = -1;
}

// ---- Address -----------------------------------------------------------------------------------

std::optional<Address> Address::parse(const std::string& text, std::string* error) {
  Address address;
  if (text.starts_with("unix:") || text.starts_with("/")) {
    address.path = text.starts_with("unix:") ? text.substr(5) : text;
    sockaddr_un fits;
    if (address.path.empty()) *error = "unix: without a path";
    if (address.path.empty() || !fill_unix(address.path, &fits, error)) return std::nullopt;
    return address;
  }
  const size_t colon = text.rfind(':');
  const std::string port = colon == std::string::npos ? "" : text.substr(colon + 1);
  address.host = text.substr(0, colon);
  const bool bracketed = address.host.starts_with('[') && address.host.ends_with(']');
  if (bracketed) address.host = address.host.substr(1, address.host.size() - 2);
  const auto [end, failed] = std::from_chars(port.data(), port.data() + port.size(), address.port);
  if (port.empty() || failed != std::errc{} || end != port.data() + port.size() ||
      address.host.empty() || (!bracketed && address.host.find(':') != std::string::npos)) {
    *error = "\"" + text.substr(0, 200) +
             "\" is no address; write host:port, [::1]:port or the path of a unix socket";
    return std::nullopt;
  }
  return address;
}

std::string Address::text() const {
  if (local()) return path;
  const bool six = host.find(':') != std::string::npos;
  return (six ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

// ---- connect and listen ------------------------------------------------------------------------

namespace {

bool finish_connect(int fd, const Patience& patience, std::string* error) {
  while (true) {
    const Io over = patience_over(patience);
    if (over != Io::kDone) {
      *error = over == Io::kCancelled ? "cancelled" : "no answer in time";
      return false;
    }
    const Nanos left = patience.deadline == kNever ? kIoSlice : patience.deadline - monotonic_now();
    const timespec slice{0, std::clamp<Nanos>(left, 0, kIoSlice)};
    pollfd waiting{fd, POLLOUT, 0};
    if (ppoll(&waiting, 1, &slice, nullptr) <= 0) continue;
    int failed = 0;
    socklen_t bytes = sizeof failed;
    getsockopt(fd, SOL_SOCKET, SO_ERROR, &failed, &bytes);
    if (failed != 0) *error = errno_text(failed);
    return failed == 0;
  }
}

Socket connect_one(int family, const sockaddr* address, socklen_t bytes, const Patience& patience,
                   std::string* error) {
  Socket socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) {
    *error = errno_text(errno);
    return {};
  }
  if (family != AF_UNIX) tune_tcp(socket.fd());
  if (connect(socket.fd(), address, bytes) != 0) {
    // A unix socket whose backlog is full says EAGAIN; a later try finds room.
    if (errno != EINPROGRESS) *error = errno_text(errno);
    if (errno != EINPROGRESS || !finish_connect(socket.fd(), patience, error)) return {};
  }
  set_blocking(socket.fd(), true);
  limit_calls(socket.fd());
  return socket;
}

Socket listen_one(int family, const sockaddr* address, socklen_t bytes, std::string* error) {
  Socket socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) {
    *error = errno_text(errno);
    return {};
  }
  if (family != AF_UNIX) set_option(socket.fd(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (family == AF_INET6) set_option(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, 1);
  if (bind(socket.fd(), address, bytes) != 0 || listen(socket.fd(), kBacklog) != 0) {
    *error = errno_text(errno);
    return {};
  }
  return socket;
}

// Whether somebody answers at the path.
bool answers(const sockaddr_un& address) {
  const Socket probe(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!probe) return true;
  return connect(probe.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 ||
         errno != ECONNREFUSED;
}

}  // namespace

Socket connect_to(const Address& address, const Patience& patience, std::string* error) {
  if (address.local()) {
    sockaddr_un name;
    if (!fill_unix(address.path, &name, error)) return {};
    return connect_one(AF_UNIX, reinterpret_cast<const sockaddr*>(&name), sizeof name, patience,
                       error);
  }
  const Resolved found = resolve(address, false, error);
  for (const addrinfo* each = found.get(); each != nullptr; each = each->ai_next) {
    Socket socket = connect_one(each->ai_family, each->ai_addr, each->ai_addrlen, patience, error);
    if (socket) return socket;
  }
  return {};
}

Socket listen_on(const Address& address, Address* bound, std::string* error) {
  *bound = address;
  if (address.local()) {
    sockaddr_un name;
    if (!fill_unix(address.path, &name, error)) return {};
    struct stat what;
    // What a node left that was killed; never a file, nor a socket somebody listens on.
    if (lstat(address.path.c_str(), &what) == 0 && S_ISSOCK(what.st_mode) && !answers(name))
      unlink(address.path.c_str());
    return listen_one(AF_UNIX, reinterpret_cast<const sockaddr*>(&name), sizeof name, error);
  }
  const Resolved found = resolve(address, true, error);
  if (found == nullptr) return {};
  Socket socket = listen_one(found->ai_family, found->ai_addr, found->ai_addrlen, error);
  if (!socket) return {};
  sockaddr_storage name{};
  socklen_t bytes = sizeof name;
  getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&name), &bytes);
  bound->host = numeric(reinterpret_cast<const sockaddr*>(&name), bytes, &bound->port);
  return socket;
}

std::optional<Socket> accept_from(int listener, bool* exhausted) {
  *exhausted = false;
  while (true) {
    Socket socket(accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket) {
      int domain = AF_UNIX;
      socklen_t bytes = sizeof domain;
      getsockopt(socket.fd(), SOL_SOCKET, SO_DOMAIN, &domain, &bytes);
      if (domain != AF_UNIX) tune_tcp(socket.fd());
      return socket;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    *exhausted = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
    return std::nullopt;
  }
}

PeerProcess peer_process(int fd) {
  PeerProcess process;
  ucred known{};
  socklen_t bytes = sizeof known;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &known, &bytes) != 0 || known.pid <= 0)
    return process;
  int pidfd = -1;
  bytes = sizeof pidfd;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &bytes) != 0)
    pidfd = static_cast<int>(syscall(SYS_pidfd_open, known.pid, 0));
  if (pidfd < 0) return process;
  process.pid = known.pid;
  process.pidfd = Socket(pidfd);
  return process;
}

}  // namespace kvstore
