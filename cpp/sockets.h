// Sockets: addresses, connecting, listening, and whole messages with a deadline.
//
// Threads: functions of their arguments; a Socket belongs to one thread at a time.
// Owns: a Socket its descriptor. None outlives a fork: the child closes its copies at once, so that
//   a peer sees the end of the process it talks to.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "types.h"

namespace kvstore {

class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd);
  ~Socket() { reset(); }
  Socket(Socket&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Socket& operator=(Socket&& other) noexcept;
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

// Where a node listens: "host:port", "[::1]:port", or the path of a unix socket ("/run/kv.sock",
// "unix:kv.sock").
struct Address {
  std::string host;
  uint16_t port = 0;
  std::string path;  // unix; host and port are unused then

  static std::optional<Address> parse(const std::string& text, std::string* error);
  bool local() const { return !path.empty(); }
  std::string text() const;
};

// How long, and for whom, one call waits.
struct Patience {
  Nanos deadline = kNever;
  const std::atomic<bool>* cancelled = nullptr;
};

// A call looks at both this often while it waits.
inline constexpr Nanos kIoSlice = 50 * kMillisecond;

enum class Io : uint8_t { kDone, kTimedOut, kCancelled, kLost, kRefused };  // by the peer's words

// kDone: not yet.
Io patience_over(const Patience& patience);

// Blocking sockets whose system calls return after kIoSlice at most.
Socket connect_to(const Address& address, const Patience& patience, std::string* error);
// Not blocking, and its address as bound (a port of 0 is chosen by the system).
Socket listen_on(const Address& address, Address* bound, std::string* error);

// Sends, or fills, all of it. `pieces` are used up.
Io send_all(int fd, std::span<iovec> pieces, const Patience& patience);
Io receive_all(int fd, std::span<iovec> pieces, const Patience& patience);
// Receives at least `least` bytes into `out`, and what else is there by then. `descriptors`: those
// passed beside the bytes, or null.
Io receive_some_of(int fd, std::span<uint8_t> out, size_t least, const Patience& patience,
                   std::vector<Socket>* descriptors, size_t* received);
// Waits for the first byte without sleeping, up to `spin`; true if it came.
bool spin_for_input(int fd, Nanos spin);
// Whether the peer has gone, or has said something nobody asked for; at once.
bool idle_and_alive(int fd);

// ---- the server's side: never waits ------------------------------------------------------------

struct Moved {
  enum Kind : uint8_t { kSome, kNothing, kOver } kind = kNothing;  // kOver: the peer has gone
  size_t bytes = 0;
};
Moved receive_some(int fd, std::span<iovec> pieces);
Moved send_some(int fd, std::span<const iovec> pieces, std::span<const int> descriptors = {});
// None: nobody waits. `exhausted`: this process, or the machine, has no descriptors left.
std::optional<Socket> accept_from(int listener, bool* exhausted);

// The process at the other end of a unix socket, as the kernel knows it. A pid of 0: one that has
// no name here (another container).
struct PeerProcess {
  pid_t pid = 0;
  Socket pidfd;  // readable once it is dead; none if it has no name
};
PeerProcess peer_process(int fd);

// What is left of `pieces` once that many bytes have moved.
std::span<iovec> skip_front(std::span<iovec> pieces, size_t bytes);
std::string errno_text(int error);
void random_bytes(std::span<uint8_t> out);  // from the kernel: names and nonces nobody guesses

}  // namespace kvstore
