// One connection to a node, from the client's side: the hello, then one exchange at a time.
//
// Threads: one at a time.
// Owns: its socket. After anything but kDone the connection is of no more use.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "sockets.h"
#include "wire.h"
#include "wire_messages.h"

namespace kvstore {

// A text of the node's, as a person may be shown it: other bytes are question marks.
std::string shown(std::string text);

class Link {
 public:
  struct Wanted {
    Address address;
    std::string token;
    wire::Hello hello;        // but for its nonce
    uint64_t only_epoch = 0;  // another node answers there: kLost; zero: any
  };
  // Null, with `failed` and why.
  static std::unique_ptr<Link> open(const Wanted& wanted, const Patience& patience, Io* failed,
                                    std::string* error, wire::Why* why = nullptr);

  const wire::Welcome& welcome() const { return welcome_; }
  std::vector<Socket>& descriptors() { return descriptors_; }  // passed with the welcome
  bool idle_and_alive() const { return kvstore::idle_and_alive(socket_.fd()); }
  const std::string& refusal() const { return refusal_; }
  bool timed_out() const { return timed_out_; }  // something has not come, or gone, in time

  // ---- one exchange: say, and hear
  template <class Message>
  Io say(const Message& message, const Patience& patience, uint64_t payload_bytes = 0,
         wire::Type type = Message::kType) {
    return send(type, wire::encode(message), payload_bytes, patience);
  }
  Io send_payload(std::span<iovec> pieces, const Patience& patience);
  // The reply but for its payload.
  template <class Answer>
  Io hear(Answer* answer, const Patience& patience) {
    const Io io = receive(Answer::kType, patience);
    if (io != Io::kDone) return io;
    auto decoded = wire::decode<Answer>(body_);
    if (!decoded) return Io::kLost;
    *answer = std::move(*decoded);
    return Io::kDone;
  }
  uint64_t payload_bytes() const { return header_.payload_bytes; }  // that follow what was heard
  Io receive_payload(std::span<iovec> pieces, const Patience& patience);

  template <class Message, class Answer>
  Io ask(const Message& message, Answer* answer, const Patience& patience) {
    const Io io = say(message, patience);
    return io == Io::kDone ? hear(answer, patience) : io;
  }

 private:
  explicit Link(Socket socket) : socket_(std::move(socket)) {}
  Io greet(const Wanted& wanted, const Patience& patience);
  Io send(wire::Type type, const std::vector<uint8_t>& body, uint64_t payload_bytes,
          const Patience& patience);
  Io receive(wire::Type expected, const Patience& patience);
  Io look_ahead(size_t bytes, const Patience& patience);
  Io noted(Io io);

  Socket socket_;
  wire::Welcome welcome_;
  std::vector<Socket> descriptors_;
  bool takes_descriptors_ = false;
  bool timed_out_ = false;
  std::string refusal_;
  wire::Why why_ = wire::Why::kProtocol;
  uint64_t said_ = 0;   // requests
  uint64_t heard_ = 0;  // replies
  uint32_t body_bytes_max_ = wire::kHelloBytesMax;
  wire::FrameHeader header_;
  std::vector<uint8_t> body_;
  std::array<uint8_t, 4096> buffer_;  // a short reply comes whole with its header
  std::span<uint8_t> ahead_;          // come, not yet used
  bool spin_paid_ = true;
};

}  // namespace kvstore
