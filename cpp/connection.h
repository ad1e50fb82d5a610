// One connection of a server: a state machine over what its socket has. It never waits.
//
// Life: hello → challenge → proof → welcome, then requests, one at a time, each of them
//   header → body → payload (into slots) → reply (from slots).
// Threads: one, its loop's.
// Owns: its socket, and what its request under way has begun; that ends with it.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "peers.h"
#include "requests.h"
#include "sockets.h"
#include "wire.h"

namespace kvstore {

struct ServerCounters {
  std::atomic<uint64_t> accepted{0}, refused{0}, requests{0}, bytes_in{0}, bytes_out{0};
  std::atomic<uint64_t> stalled{0};  // connections ended since they did not move
};

// What its connections need of a server.
struct ServerParts {
  explicit ServerParts(Peers& clients) : peers(clients) {}
  std::shared_ptr<Node> node;
  std::string token;
  std::string socket_path;
  uint64_t epoch = 0;
  uint64_t leases_max = 0;  // blocks a session may lease
  uint32_t connections_of_a_peer = 0;
  Nanos hello = 0;  // until both sides are known
  Nanos stall = 0;  // without progress, in the middle of a message
  Peers& peers;
  ServerCounters counters;
  std::function<void(const std::string& level, const std::string& event,
                     std::vector<std::pair<std::string, std::string>> fields)>
      tell;
  // Runs `work` elsewhere; its reply comes back by Connection::answer.
  std::function<void(uint64_t connection, std::function<std::optional<Reply>()> work)> run_slowly;
  // Tells when the peer's process is dead; and that connections of a peer are to be closed.
  std::function<void(const std::shared_ptr<Peer>&)> watch;
  std::function<void()> sweep;
};

// A reply on its way.
struct Sending {
  std::array<uint8_t, wire::kHeaderBytes> header;
  Reply reply;
  std::vector<int> descriptors;  // passed beside the first byte
  size_t head = 0;               // of header and body, sent
  size_t piece = 0;              // of the payload
  size_t used = 0;               // of that piece
};

class Connection {
 public:
  Connection(uint64_t id, Socket socket, ServerParts& parts, Nanos now);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  int fd() const { return socket_.fd(); }
  // Each does what can be done without waiting; false: the connection is over.
  bool advance(Nanos now);
  bool answer(Reply reply, Nanos now);  // of slow work
  bool tick(Nanos now);                 // deadlines, and requests that wait for room

  enum class Wants : uint8_t { kInput, kOutput, kNeither };
  Wants wants() const;
  bool parked() const { return again_ != nullptr; }
  bool unfinished() const { return unfinished_; }  // it is another's turn: advance() it again
  bool idle() const;                               // between two messages
  bool over() const { return peer_ != nullptr && peer_->over.load(); }
  void stop_after_reply(Nanos now);  // waits no more for room, and takes no more requests

 private:
  enum class Stage : uint8_t { kHello, kProof, kReady };
  enum class Step : uint8_t { kOn, kWait, kOver };
  Step flush(uint64_t* turn);
  Step fill(uint64_t* turn);
  Step take_message(Nanos now, uint64_t* turn);
  Step receive(uint64_t* turn);
  std::span<const uint8_t> waiting() const { return std::span(input_).subspan(used_); }
  void use(size_t bytes);
  void handle(const wire::FrameHeader& header, std::span<const uint8_t> body, Nanos now);
  void handle_hello(std::span<const uint8_t> body);
  void handle_proof(std::span<const uint8_t> body);
  void welcome(PeerProcess process, bool maps_memory);
  void handle_request(const wire::FrameHeader& header, std::span<const uint8_t> body, Nanos now);
  void send(Reply reply);
  void refuse_as(wire::Why why, const std::string& message);
  void expect_progress(Nanos now, uint64_t bytes);
  void has_moved();
  void at_rest();

  const uint64_t id_;
  Socket socket_;
  ServerParts& parts_;
  Stage stage_ = Stage::kHello;
  Nanos deadline_;        // of the message under way, or of the hello
  Nanos still_ = kNever;  // and until when something must have moved
  Nanos now_ = 0;         // of this advance()
  bool stopping_ = false;
  bool control_ = false;
  wire::Hello hello_;
  wire::Challenge challenge_;
  std::shared_ptr<Peer> peer_;
  RequestContext context_;

  bool unfinished_ = false;
  std::vector<uint8_t> input_;  // come
  size_t used_ = 0;             // of it, from the front
  std::optional<wire::FrameHeader> header_;
  // Of the request under way.
  uint64_t request_ = 0;
  wire::TraceId trace_{};
  std::optional<Sink> sink_;
  std::optional<SinkCursor> cursor_;
  std::function<std::optional<Reply>()> again_;
  bool slow_ = false;
  std::optional<Sending> sending_;
  std::function<void()> unheard_;  // of the last reply
};

}  // namespace kvstore
