#include "link.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace kvstore {
namespace {

constexpr Nanos kSpin = kMillisecond / 20;  // before sleeping, where cores are free

iovec piece_of(const void* data, size_t bytes) {
  return {const_cast<void*>(data), bytes};  // the kernel only reads what is sent
}

}  // namespace

std::string shown(std::string text) {
  std::ranges::replace_if(text, [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

std::unique_ptr<Link> Link::open(const Wanted& wanted, const Patience& patience, Io* failed,
                                 std::string* error, wire::Why* why) {
  Socket socket = connect_to(wanted.address, patience, error);
  if (!socket) {
    const Io over = patience_over(patience);
    *failed = over == Io::kDone ? Io::kLost : over;
    *error = wanted.address.text() + ": " + *error;
    return nullptr;
  }
  std::unique_ptr<Link> link(new Link(std::move(socket)));
  *failed = link->greet(wanted, patience);
  if (*failed == Io::kDone) return link;
  *error = wanted.address.text() + ": ";
  if (*failed == Io::kRefused) {
    *error += link->refusal_;
    if (why != nullptr) *why = link->why_;
  } else {
    *error += *failed == Io::kLost ? "the connection ended before the node had said who it is"
                                   : "no answer in time";
  }
  return nullptr;
}

Io Link::greet(const Wanted& wanted, const Patience& patience) {
  wire::Hello hello = wanted.hello;
  random_bytes(hello.nonce);
  wire::Challenge challenge;
  Io io = ask(hello, &challenge, patience);
  if (io != Io::kDone) return io;
  if (!wire::equal(challenge.proof, wire::prove(wanted.token, true, hello, challenge))) {
    refusal_ = "the node does not know this client's token, or is no node of this cluster";
    return Io::kRefused;
  }
  if (challenge.version < hello.version_min || challenge.version > hello.version_max) {
    refusal_ = "the node speaks wire version " + std::to_string(challenge.version) +
               ", this client " + std::to_string(hello.version_min) + " to " +
               std::to_string(hello.version_max);
    why_ = wire::Why::kVersion;
    return Io::kRefused;
  }
  if (wanted.only_epoch != 0 && challenge.epoch != wanted.only_epoch) {
    refusal_ = "another node listens there";
    why_ = wire::Why::kSession;
    return Io::kRefused;
  }
  const wire::Proof proof{wire::prove(wanted.token, false, hello, challenge)};
  takes_descriptors_ = hello.wants_memory;
  io = ask(proof, &welcome_, patience);
  takes_descriptors_ = false;
  body_bytes_max_ = wire::kBodyBytesMax;
  if (io == Io::kDone && welcome_.epoch != challenge.epoch) return Io::kLost;
  return io;
}

Io Link::send(wire::Type type, const std::vector<uint8_t>& body, uint64_t payload_bytes,
              const Patience& patience) {
  wire::FrameHeader header;
  header.type = type;
  header.body_bytes = static_cast<uint32_t>(body.size());
  header.payload_bytes = payload_bytes;
  header.request = ++said_;
  std::array<uint8_t, wire::kHeaderBytes> head;
  wire::encode(header, head);
  iovec pieces[] = {piece_of(head.data(), head.size()), piece_of(body.data(), body.size())};
  return noted(send_all(socket_.fd(), pieces, patience));
}

Io Link::send_payload(std::span<iovec> pieces, const Patience& patience) {
  return noted(send_all(socket_.fd(), pieces, patience));
}

// What came with the head first.
Io Link::receive_payload(std::span<iovec> pieces, const Patience& patience) {
  while (!ahead_.empty() && !pieces.empty()) {
    const size_t bytes = std::min(ahead_.size(), pieces.front().iov_len);
    memcpy(pieces.front().iov_base, ahead_.data(), bytes);
    ahead_ = ahead_.subspan(bytes);
    pieces = skip_front(pieces, bytes);
  }
  return noted(receive_all(socket_.fd(), pieces, patience));
}

// Until `ahead_` has so many bytes; the buffer is larger.
Io Link::look_ahead(size_t bytes, const Patience& patience) {
  if (ahead_.size() >= bytes) return Io::kDone;
  std::copy(ahead_.begin(), ahead_.end(), buffer_.begin());
  size_t received = 0;
  const Io io = receive_some_of(socket_.fd(), std::span(buffer_).subspan(ahead_.size()),
                                bytes - ahead_.size(), patience,
                                takes_descriptors_ ? &descriptors_ : nullptr, &received);
  ahead_ = std::span(buffer_).first(ahead_.size() + received);
  return noted(io);
}

Io Link::noted(Io io) {
  timed_out_ = timed_out_ || io == Io::kTimedOut;
  return io;
}

Io Link::receive(wire::Type expected, const Patience& patience) {
  static const bool may_spin = std::thread::hardware_concurrency() > 2;
  if (may_spin && spin_paid_) spin_paid_ = spin_for_input(socket_.fd(), kSpin);
  const Nanos began = may_spin && !spin_paid_ ? monotonic_now() : 0;
  Io io = look_ahead(wire::kHeaderBytes, patience);
  if (io != Io::kDone) return io;
  if (began != 0) spin_paid_ = monotonic_now() - began < kSpin;
  const auto header = wire::decode_header(ahead_.first<wire::kHeaderBytes>(), body_bytes_max_);
  if (!header) return Io::kLost;
  ahead_ = ahead_.subspan(wire::kHeaderBytes);
  header_ = *header;
  body_.resize(header_.body_bytes);
  iovec piece = piece_of(body_.data(), body_.size());
  io = receive_payload({&piece, 1}, patience);
  if (io != Io::kDone) return io;
  if (header_.type == wire::Type::kRefusal) {
    auto refusal = wire::decode<wire::Refusal>(body_);
    refusal_ = refusal ? shown(std::move(refusal->message)) : "refused without a reason";
    if (refusal) why_ = refusal->why;
    return Io::kRefused;
  }
  const bool in_order =
      header_.request > heard_ && header_.request <= said_ && header_.type == expected;
  heard_ = header_.request;
  return in_order ? Io::kDone : Io::kLost;
}

}  // namespace kvstore
