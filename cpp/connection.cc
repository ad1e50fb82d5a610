#include "connection.h"

#include <algorithm>

namespace kvstore {
namespace {

constexpr size_t kReadBytes = size_t{256} << 10;     // of heads and small payloads, in one call
constexpr uint64_t kSinkBytes = uint64_t{1} << 20;   // in one call, and checked while in the cache
constexpr uint64_t kFlushBytes = uint64_t{4} << 20;  // in one call
constexpr uint64_t kTurnBytes = uint64_t{8} << 20;   // then it is another connection's turn
constexpr uint64_t kMessageTurn = uint64_t{64} << 10;  // what a message counts at least
constexpr size_t kPiecesMax = 1024;
constexpr size_t kKeptInputBytes = size_t{16} << 10;  // a quiet connection keeps no more
constexpr uint64_t kSlowestBytesPerSecond = uint64_t{64} << 10;

}  // namespace

Connection::Connection(uint64_t id, Socket socket, ServerParts& parts, Nanos now)
    : id_(id), socket_(std::move(socket)), parts_(parts), deadline_(now + parts.hello) {}

Connection::~Connection() {
  if (sink_) sink_->broken();
  if (sending_ && sending_->reply.sent) sending_->reply.sent();
  if (sending_ && sending_->reply.unheard) sending_->reply.unheard();
  if (unheard_) unheard_();
  if (peer_ == nullptr) return;
  peer_->connections.fetch_sub(1);
  if (!control_) return;
  const bool told = over();
  const bool ended = parts_.peers.lost(*peer_, id_);
  if (!told)
    parts_.tell("info", ended ? "session ended" : "session without a connection",
                {{"session", peer_->label()}});
  if (ended) parts_.sweep();
}

Connection::Wants Connection::wants() const {
  if (sending_) return Wants::kOutput;
  return again_ != nullptr || slow_ ? Wants::kNeither : Wants::kInput;
}

bool Connection::idle() const {
  return !sending_ && !sink_ && !slow_ && again_ == nullptr && !header_ && waiting().empty();
}

void Connection::expect_progress(Nanos now, uint64_t bytes) {
  if (stage_ != Stage::kReady) return;  // the hello's own deadline stands
  still_ = now + parts_.stall;
  deadline_ = still_ + static_cast<Nanos>(bytes / kSlowestBytesPerSecond) * 1000 * kMillisecond;
}

void Connection::has_moved() {
  if (still_ != kNever) still_ = now_ + parts_.stall;
}

void Connection::at_rest() {
  if (stage_ != Stage::kReady) return;
  deadline_ = kNever;
  still_ = kNever;
}

bool Connection::advance(Nanos now) {
  now_ = now;
  unfinished_ = false;
  uint64_t turn = kTurnBytes;
  while (turn > 0) {
    Step step = Step::kOn;
    if (sending_) {
      step = flush(&turn);
      // What comes next says so by itself: not asked for in vain after every reply.
      if (step == Step::kOn && input_.empty() && !stopping_) return true;
    } else if (again_ != nullptr || slow_) {
      return true;
    } else if (sink_) {
      step = fill(&turn);
    } else if (stopping_) {
      return false;
    } else {
      step = take_message(now, &turn);
    }
    if (step == Step::kOver) return false;
    if (step == Step::kWait && turn > 0) return true;
  }
  unfinished_ = true;
  return true;
}

bool Connection::tick(Nanos now) {
  if (now >= std::min(deadline_, still_)) {
    parts_.counters.stalled.fetch_add(1);
    parts_.tell("warning", "connection stalled", {{"connection", std::to_string(id_)}});
    return false;
  }
  if (again_ == nullptr) return true;
  std::optional<Reply> reply = again_();
  if (!reply) return true;
  again_ = nullptr;
  send(std::move(*reply));
  return advance(now);
}

bool Connection::answer(Reply reply, Nanos now) {
  slow_ = false;
  send(std::move(reply));
  return advance(now);
}

void Connection::stop_after_reply(Nanos now) {
  stopping_ = true;
  if (again_ == nullptr) return;
  again_ = nullptr;
  send(refuse(wire::Why::kStopping, "this node is stopping"));
  expect_progress(now, 0);
}

// ---- what comes --------------------------------------------------------------------------------

Connection::Step Connection::receive(uint64_t* turn) {
  thread_local std::vector<uint8_t> scratch(kReadBytes);
  iovec piece{scratch.data(), scratch.size()};
  const Moved moved = receive_some(socket_.fd(), {&piece, 1});
  if (moved.kind == Moved::kNothing) return Step::kWait;
  if (moved.kind == Moved::kOver) return Step::kOver;
  parts_.counters.bytes_in.fetch_add(moved.bytes, std::memory_order_relaxed);
  *turn -= std::min<uint64_t>(*turn, moved.bytes);
  has_moved();
  unheard_ = nullptr;
  input_.erase(input_.begin(), input_.begin() + static_cast<ptrdiff_t>(used_));
  used_ = 0;
  input_.insert(input_.end(), scratch.begin(),
                scratch.begin() + static_cast<ptrdiff_t>(moved.bytes));
  return Step::kOn;
}

// Moved to the front by the next receive() only: many small messages come in one piece.
void Connection::use(size_t bytes) {
  used_ += bytes;
  if (used_ < input_.size()) return;
  input_.clear();
  used_ = 0;
  if (input_.capacity() > kKeptInputBytes) std::vector<uint8_t>().swap(input_);
}

Connection::Step Connection::take_message(Nanos now, uint64_t* turn) {
  if (waiting().size() < wire::kHeaderBytes) {
    const Step step = receive(turn);
    if (step == Step::kOn && deadline_ == kNever) expect_progress(now, 0);
    return step;
  }
  if (!header_) {
    header_ =
        wire::decode_header(waiting().first<wire::kHeaderBytes>(),
                            stage_ == Stage::kReady ? wire::kBodyBytesMax : wire::kHelloBytesMax);
    if (!header_) {
      refuse_as(wire::Why::kProtocol, "not a message of this protocol");
      return Step::kOn;
    }
    expect_progress(now, header_->body_bytes);
  }
  const size_t whole = wire::kHeaderBytes + header_->body_bytes;
  if (waiting().size() < whole) return receive(turn);
  const wire::FrameHeader header = *header_;
  header_.reset();
  at_rest();
  handle(header, waiting().subspan(wire::kHeaderBytes, header.body_bytes), now);
  use(whole);
  *turn -= std::min(*turn, kMessageTurn);
  return Step::kOn;
}

// The payload: what came beside the body is moved, the rest goes straight into the slots.
Connection::Step Connection::fill(uint64_t* turn) {
  while (!cursor_->full() && !waiting().empty()) {
    const std::span<uint8_t> target = cursor_->here();
    const size_t bytes = std::min(target.size(), waiting().size());
    std::copy_n(waiting().begin(), bytes, target.begin());
    use(bytes);
    cursor_->advance(bytes);
  }
  thread_local std::vector<iovec> pieces;
  while (!cursor_->full()) {
    if (*turn == 0) return Step::kWait;
    pieces.clear();
    uint64_t asked = 0;
    std::span<uint8_t> target = cursor_->here();
    for (size_t next = cursor_->next_piece(); true; target = sink_->pieces[next++].memory) {
      pieces.push_back({target.data(), std::min<uint64_t>(target.size(), kSinkBytes - asked)});
      asked += pieces.back().iov_len;
      if (asked == kSinkBytes || pieces.size() == kPiecesMax || next == sink_->pieces.size()) break;
    }
    const Moved moved = receive_some(socket_.fd(), pieces);
    if (moved.kind == Moved::kNothing) return Step::kWait;
    if (moved.kind == Moved::kOver) return Step::kOver;
    parts_.counters.bytes_in.fetch_add(moved.bytes, std::memory_order_relaxed);
    has_moved();
    cursor_->advance(moved.bytes);
    *turn -= std::min<uint64_t>(*turn, moved.bytes);
  }
  Sink sink = std::move(*sink_);
  sink_.reset();
  cursor_.reset();
  at_rest();
  send(sink.full());
  return Step::kOn;
}

// ---- what is said ------------------------------------------------------------------------------

void Connection::handle(const wire::FrameHeader& header, std::span<const uint8_t> body, Nanos now) {
  request_ = header.request;
  trace_ = header.trace;
  const bool expected = stage_ == Stage::kReady || header.payload_bytes == 0;
  if (stage_ == Stage::kReady) {
    handle_request(header, body, now);
  } else if (expected && stage_ == Stage::kHello && header.type == wire::Type::kHello) {
    handle_hello(body);
  } else if (expected && stage_ == Stage::kProof && header.type == wire::Type::kProof) {
    handle_proof(body);
  } else {
    refuse_as(wire::Why::kProtocol, "a hello is expected first");
  }
}

void Connection::handle_hello(std::span<const uint8_t> body) {
  // The range stands first in every version, whatever follows.
  wire::Reader range(body);
  const auto least = range.number<uint16_t>();
  const auto most = range.number<uint16_t>();
  if (range.ok() && (least > wire::kVersionMax || most < wire::kVersionMin)) {
    refuse_as(wire::Why::kVersion, "this node speaks wire versions " +
                                       std::to_string(wire::kVersionMin) + " to " +
                                       std::to_string(wire::kVersionMax) + ", the client " +
                                       std::to_string(least) + " to " + std::to_string(most));
    return;
  }
  auto hello = wire::decode<wire::Hello>(body);
  if (!hello) {
    refuse_as(wire::Why::kProtocol, "a hello that is none");
    return;
  }
  hello_ = std::move(*hello);
  challenge_.version = std::min(hello_.version_max, wire::kVersionMax);
  challenge_.epoch = parts_.epoch;
  random_bytes(challenge_.nonce);
  challenge_.proof = wire::prove(parts_.token, true, hello_, challenge_);
  stage_ = Stage::kProof;
  Reply reply;
  reply.type = wire::Challenge::kType;
  reply.body = wire::encode(challenge_);
  send(std::move(reply));
}

void Connection::handle_proof(std::span<const uint8_t> body) {
  const auto proof = wire::decode<wire::Proof>(body);
  if (!proof || !wire::equal(proof->proof, wire::prove(parts_.token, false, hello_, challenge_))) {
    refuse_as(wire::Why::kToken, "the client's token is not this node's");
    return;
  }
  if (hello_.data) {
    const auto peer = parts_.peers.join(hello_.session);
    if (peer == nullptr || peer->over.load()) {
      refuse_as(wire::Why::kSession, "no such session");
    } else if (peer->connections.load() >= parts_.connections_of_a_peer) {
      refuse_as(wire::Why::kTooMany, "this session has " + std::to_string(peer->connections) +
                                         " connections, the most there may be");
    } else {
      peer_ = peer;
      welcome({}, peer_->maps_memory);
    }
    return;
  }
  if (hello_.part_bytes == 0 || hello_.part_bytes > kBlockBytesMax || hello_.record.empty()) {
    refuse_as(wire::Why::kNamespace, "a namespace without a record, or without parts");
    return;
  }
  PeerProcess process;
  if (hello_.wants_memory) process = peer_process(socket_.fd());
  const bool maps_memory = process.pid != 0 && process.pidfd;
  welcome(std::move(process), maps_memory);
}

void Connection::welcome(PeerProcess process, bool maps_memory) {
  wire::Welcome welcome;
  if (!hello_.data) {
    Peers::Entered entered = parts_.peers.enter(hello_, std::move(process), maps_memory, id_);
    if (entered.peer == nullptr) {
      refuse_as(entered.why, entered.refusal);
      return;
    }
    peer_ = entered.peer;
    control_ = true;
    welcome.taken_over = entered.taken_over;
    parts_.tell(
        "info", entered.taken_over ? "session taken over" : "session opened",
        {{"session", peer_->label()},
         {"memory", maps_memory ? "mapped by " + std::to_string(peer_->process.pid) : "no"}});
    if (maps_memory && !entered.taken_over) parts_.watch(peer_);
    parts_.sweep();  // who was ended by this has connections left
  }
  peer_->connections.fetch_add(1);
  context_ = {peer_->session, peer_->maps_memory, parts_.leases_max};
  stage_ = Stage::kReady;
  at_rest();
  welcome.session = peer_->session->id;
  welcome.epoch = parts_.epoch;
  welcome.namespace_version = peer_->session->store.version();
  welcome.lease_ns = static_cast<uint64_t>(parts_.node->limits().lease);
  welcome.pool_bytes = parts_.node->segment().bytes();
  welcome.view_bytes_max = maps_memory ? parts_.node->limits().view_bytes_max : 0;
  welcome.socket = parts_.socket_path;
  const bool passes = control_ && maps_memory;
  if (passes) welcome.header_bytes = parts_.node->segment().header_bytes();
  Reply reply;
  reply.type = wire::Welcome::kType;
  reply.body = wire::encode(welcome);
  send(std::move(reply));
  if (passes) {
    const Segment& segment = parts_.node->segment();
    sending_->descriptors = {segment.data_fd(), segment.header_fd()};
  }
}

void Connection::handle_request(const wire::FrameHeader& header, std::span<const uint8_t> body,
                                Nanos now) {
  parts_.counters.requests.fetch_add(1, std::memory_order_relaxed);
  Outcome outcome = serve(context_, header, body, now);
  if (outcome.reply) {
    send(std::move(*outcome.reply));
  } else if (outcome.sink) {
    sink_ = std::move(outcome.sink);
    cursor_.emplace(*sink_);
    expect_progress(now, header.payload_bytes);
  } else if (outcome.slow) {
    slow_ = true;
    parts_.run_slowly(id_, std::move(outcome.again));
  } else {
    again_ = std::move(outcome.again);
  }
}

void Connection::refuse_as(wire::Why why, const std::string& message) {
  parts_.counters.refused.fetch_add(1);
  parts_.tell("warning", "connection refused",
              {{"connection", std::to_string(id_)}, {"why", message}});
  header_.reset();
  send(refuse(why, message));
}

void Connection::send(Reply reply) {
  if (reply.none) return;
  if (reply.body.size() > wire::kBodyBytesMax) {
    if (reply.sent) reply.sent();
    reply = refuse(wire::Why::kTooMany, "an answer beyond 64 MiB; ask for fewer blocks at once");
  }
  Sending& sending = sending_.emplace();
  uint64_t payload_bytes = 0;
  for (const auto piece : reply.payload) payload_bytes += piece.size();
  wire::FrameHeader header;
  header.type = reply.type;
  header.body_bytes = static_cast<uint32_t>(reply.body.size());
  header.payload_bytes = payload_bytes;
  header.request = request_;
  header.trace = trace_;
  wire::encode(header, sending.header);
  sending.reply = std::move(reply);
  expect_progress(monotonic_now(), payload_bytes);
}

Connection::Step Connection::flush(uint64_t* turn) {
  Sending& out = *sending_;
  const std::vector<uint8_t>& body = out.reply.body;
  thread_local std::vector<iovec> pieces;
  const size_t head = out.header.size() + body.size();
  while (out.head < head || out.piece < out.reply.payload.size()) {
    if (*turn == 0) return Step::kWait;
    pieces.clear();
    if (out.head < out.header.size())
      pieces.push_back({out.header.data() + out.head, out.header.size() - out.head});
    const size_t of_body = std::max(out.head, out.header.size()) - out.header.size();
    if (of_body < body.size())
      pieces.push_back({const_cast<uint8_t*>(body.data()) + of_body, body.size() - of_body});
    uint64_t asked = 0;
    for (size_t at = out.piece, used = out.used; at < out.reply.payload.size(); ++at, used = 0) {
      if (pieces.size() == kPiecesMax || asked >= kFlushBytes) break;
      const auto piece = out.reply.payload[at].subspan(used);
      pieces.push_back({const_cast<uint8_t*>(piece.data()), piece.size()});
      asked += piece.size();
    }
    const Moved moved = send_some(socket_.fd(), pieces, out.descriptors);
    if (moved.kind == Moved::kNothing) return Step::kWait;
    if (moved.kind == Moved::kOver) return Step::kOver;
    out.descriptors.clear();
    parts_.counters.bytes_out.fetch_add(moved.bytes, std::memory_order_relaxed);
    has_moved();
    *turn -= std::min<uint64_t>(*turn, moved.bytes);
    uint64_t rest = moved.bytes;
    const uint64_t of_head = std::min<uint64_t>(rest, head - out.head);
    out.head += of_head;
    rest -= of_head;
    while (rest > 0) {
      const uint64_t step =
          std::min<uint64_t>(rest, out.reply.payload[out.piece].size() - out.used);
      out.used += step;
      rest -= step;
      if (out.used == out.reply.payload[out.piece].size()) {
        ++out.piece;
        out.used = 0;
      }
    }
  }
  const bool closes = out.reply.closes;
  if (out.reply.sent) out.reply.sent();
  unheard_ = std::move(out.reply.unheard);
  sending_.reset();
  at_rest();
  return closes ? Step::kOver : Step::kOn;
}

}  // namespace kvstore
