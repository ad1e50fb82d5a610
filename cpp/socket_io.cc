// How bytes move through a socket (sockets.h).
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "sockets.h"

namespace kvstore {
namespace {

constexpr size_t kPiecesMax = 1024;    // the kernel's own bound
constexpr size_t kDescriptorsMax = 4;  // passed beside one message

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

// Flags for the next call: the socket's own slice bounds it, unless the deadline is closer.
int wait_if_close(int fd, short events, const Patience& patience) {
  if (patience.deadline == kNever) return 0;
  const Nanos left = patience.deadline - monotonic_now();
  if (left >= kIoSlice) return 0;
  pollfd waiting{fd, events, 0};
  const timespec wait{0, std::max<Nanos>(left, 0)};
  ppoll(&waiting, 1, &wait, nullptr);
  return MSG_DONTWAIT;
}

msghdr message_of(std::span<const iovec> pieces) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces.data());  // the kernel only reads it
  message.msg_iovlen = std::min(pieces.size(), kPiecesMax);
  return message;
}

struct Control {
  alignas(cmsghdr) char bytes[CMSG_SPACE(kDescriptorsMax * sizeof(int))];
};

void take_descriptors(msghdr* message, std::vector<Socket>* descriptors) {
  for (cmsghdr* part = CMSG_FIRSTHDR(message); part != nullptr; part = CMSG_NXTHDR(message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof fd);
      descriptors->emplace_back(fd);
    }
  }
}

}  // namespace

std::span<iovec> skip_front(std::span<iovec> pieces, size_t bytes) {
  while (!pieces.empty() && bytes >= pieces.front().iov_len) {
    bytes -= pieces.front().iov_len;
    pieces = pieces.subspan(1);
  }
  if (bytes > 0) {
    pieces.front().iov_base = static_cast<uint8_t*>(pieces.front().iov_base) + bytes;
    pieces.front().iov_len -= bytes;
  }
  return pieces;
}

// ---- whole messages ----------------------------------------------------------------------------

Io send_all(int fd, std::span<iovec> pieces, const Patience& patience) {
  pieces = skip_front(pieces, 0);
  while (!pieces.empty()) {
    const msghdr message = message_of(pieces);
    const ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL | wait_if_close(fd, POLLOUT, patience));
    if (sent > 0) pieces = skip_front(pieces, static_cast<size_t>(sent));
    if (sent < 0 && !would_block(errno) && errno != EINTR) return Io::kLost;
    if (pieces.empty()) break;
    if (const Io over = patience_over(patience); over != Io::kDone) return over;
  }
  return Io::kDone;
}

namespace {

// Once; zero bytes: not yet.
Io receive_once(int fd, std::span<const iovec> pieces, int flags, std::vector<Socket>* descriptors,
                size_t* received) {
  msghdr message = message_of(pieces);
  Control control;
  if (descriptors != nullptr) {
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof control.bytes;
  }
  const ssize_t got = recvmsg(fd, &message, flags | MSG_CMSG_CLOEXEC);
  *received = got > 0 ? static_cast<size_t>(got) : 0;
  if (got > 0 && descriptors != nullptr) take_descriptors(&message, descriptors);
  return got == 0 || (got < 0 && !would_block(errno) && errno != EINTR) ? Io::kLost : Io::kDone;
}

}  // namespace

Io receive_all(int fd, std::span<iovec> pieces, const Patience& patience) {
  pieces = skip_front(pieces, 0);
  while (!pieces.empty()) {
    size_t received = 0;
    const int flags = MSG_WAITALL | wait_if_close(fd, POLLIN, patience);
    const Io io = receive_once(fd, pieces, flags, nullptr, &received);
    if (io != Io::kDone) return io;
    pieces = skip_front(pieces, received);
    if (pieces.empty()) break;
    if (const Io over = patience_over(patience); over != Io::kDone) return over;
  }
  return Io::kDone;
}

Io receive_some_of(int fd, std::span<uint8_t> out, size_t least, const Patience& patience,
                   std::vector<Socket>* descriptors, size_t* received) {
  *received = 0;
  while (*received < least) {
    const iovec piece{out.data() + *received, out.size() - *received};
    size_t now = 0;
    const int flags = wait_if_close(fd, POLLIN, patience);
    const Io io = receive_once(fd, {&piece, 1}, flags, descriptors, &now);
    if (io != Io::kDone) return io;
    *received += now;
    if (*received >= least) break;
    if (const Io over = patience_over(patience); over != Io::kDone) return over;
  }
  return Io::kDone;
}

bool spin_for_input(int fd, Nanos spin) {
  const Nanos until = monotonic_now() + spin;
  do {
    char byte;
    if (recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0 || !would_block(errno)) return true;
  } while (monotonic_now() < until);
  return false;
}

bool idle_and_alive(int fd) {
  char byte;
  return recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && would_block(errno);
}

// ---- the server's side -------------------------------------------------------------------------

Moved receive_some(int fd, std::span<iovec> pieces) {
  msghdr message = message_of(pieces);
  while (true) {
    const ssize_t got = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got > 0) return {Moved::kSome, static_cast<size_t>(got)};
    if (got < 0 && errno == EINTR) continue;
    return {got < 0 && would_block(errno) ? Moved::kNothing : Moved::kOver, 0};
  }
}

Moved send_some(int fd, std::span<const iovec> pieces, std::span<const int> descriptors) {
  msghdr message = message_of(pieces);
  Control control{};
  if (!descriptors.empty()) {
    message.msg_control = control.bytes;
    message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* const part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    memcpy(CMSG_DATA(part), descriptors.data(), descriptors.size_bytes());
  }
  while (true) {
    const ssize_t sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) return {Moved::kSome, static_cast<size_t>(sent)};
    if (errno == EINTR) continue;
    return {would_block(errno) ? Moved::kNothing : Moved::kOver, 0};
  }
}

}  // namespace kvstore
