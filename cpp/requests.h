// What a node answers to one request of a session (docs/wire.md): a function of message and table,
// without sockets. Payloads are described, not moved: where the bytes that follow a request shall
// go, and where those that follow a reply come from.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "peer_session.h"
#include "wire_messages.h"

namespace kvstore {

struct Reply {
  wire::Type type{};
  std::vector<uint8_t> body;
  std::vector<std::span<const uint8_t>> payload;
  std::function<void()> sent;  // called once the payload has left, or never will
  // Called if the connection ends before anything else comes on it: perhaps nobody has heard this.
  // A client ends no connection on which the last it heard was such an answer.
  std::function<void()> unheard;
  bool none = false;    // the request has no reply
  bool closes = false;  // a refusal: the connection ends behind it
};

// Where a request's payload goes: piece after piece, each with the part of a block it belongs to,
// whose checksum is taken while it is in the cache.
struct Sink {
  struct Piece {
    std::span<uint8_t> memory;
    std::optional<uint32_t>* checksum;  // of the part, set when its last piece is full
    bool ends_part;
  };
  std::vector<Piece> pieces;
  std::function<Reply()> full;   // all of it has come
  std::function<void()> broken;  // it never will
};

// Fills a sink as its bytes come, and takes the checksums.
class SinkCursor {
 public:
  explicit SinkCursor(Sink& sink) : sink_(sink) {}
  bool full() const { return piece_ == sink_.pieces.size(); }
  // Where the next bytes go: this piece's rest, and then sink.pieces[next_piece()...].
  std::span<uint8_t> here() const { return sink_.pieces[piece_].memory.subspan(used_); }
  size_t next_piece() const { return piece_ + 1; }
  void advance(uint64_t bytes);  // so many have come, there and in what follows

 private:
  Sink& sink_;
  size_t piece_ = 0;
  uint64_t used_ = 0;
  uint32_t checksum_ = 0;
};

struct Outcome {
  std::optional<Reply> reply;
  std::optional<Sink> sink;                     // first the payload
  std::function<std::optional<Reply>()> again;  // no reply yet: ask again, until one comes
  Nanos again_until = 0;
  bool slow = false;  // `again` takes long: on another thread, once
};

struct RequestContext {
  std::shared_ptr<PeerSession> session;
  bool maps_memory = false;  // the client copies by itself
  uint64_t leases_max = 0;
};

Outcome serve(const RequestContext& context, const wire::FrameHeader& header,
              std::span<const uint8_t> body, Nanos now);

Reply refuse(wire::Why why, const std::string& message);

}  // namespace kvstore
