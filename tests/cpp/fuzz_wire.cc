// Damaged and random messages into the codec and into what a small node answers: no byte sequence
// may do worse than be refused. Two ways in: `make fuzz` (libFuzzer, where clang has it), and a
// test of seeded mutations in the ordinary binary.
//
// An input is a series of [type][payload: how much, does it come][body bytes: u16][body]. Fields
// that name a lease are made to name one that is held, half of the time.
#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "requests.h"
#include "wire_messages.h"

#ifndef KVSTORE_FUZZ
#include <doctest/doctest.h>
#endif

namespace kvstore {
namespace {

using Bytes = std::vector<uint8_t>;
using In = std::span<const uint8_t>;
constexpr uint64_t kPart = 4096;
constexpr int kAgain = 2;  // who waits for room asks so often, and then goes

[[noreturn]] void give_up(const std::string& why) {
  fprintf(stderr, "%s\n", why.c_str());
  abort();
}

}  // namespace

namespace wire {
namespace {

// Decodes; what is a message must be the one encoding of itself.
template <class Message>
void codec(In body) {
  const auto message = decode<Message>(body);
  if (message && !std::ranges::equal(encode(*message), body))
    give_up("a message with two encodings");
}

template <class... Message>
void codecs(In body) {
  (codec<Message>(body), ...);
}

void decode_all(In bytes) {
  if (bytes.size() >= kHeaderBytes) {
    for (const uint32_t most : {kHelloBytesMax, kBodyBytesMax}) {
      const auto header = decode_header(bytes.first<kHeaderBytes>(), most);
      if (!header) continue;
      std::array<uint8_t, kHeaderBytes> again;
      encode(*header, again);
      if (!std::ranges::equal(again, bytes.first<kHeaderBytes>()))
        give_up("a header with two encodings");
    }
  }
  codecs<Hello, Challenge, Proof, Welcome, Refusal, Match, Matched, Exists, Held, Reserve,
         ReserveMore, Granted, Write, Written, Commit, PutDone, Lookup, Redeem, Leased, Get, Read,
         Blocks, Release, Released, ViewMade, MakeView, TicketIs, Verified, Complain, Apply,
         Applied, Cleared, Listed, UsageIs, AuditIs, Settle, Settled, Left>(bytes);
}

}  // namespace
}  // namespace wire

namespace {

// A node that several inputs share; each has sessions of its own, one that maps and one that does
// not, and leaves nothing behind.
class Target {
 public:
  Target() {
    NodeOptions options;
    options.dram_bytes = 4 * kFrameBytes;
    options.copy_threads = 1;
    std::string error;
    node_ = Node::open(options, &error);
    if (node_ == nullptr || !node_->settle(monotonic_now() + 60'000 * kMillisecond))
      give_up("no node: " + error);
    node_->limits().random = [this] { return ++names_; };  // small: inputs can name them
  }

  void take(In input) {
    wire::decode_all(input);
    names_ = 0;
    const auto session = std::make_shared<PeerSession>(AttemptId{1, 2}, node_, "space", kPart);
    context_ = {session, !input.empty() && input[0] % 2 == 1, 100};
    while (input.size() >= 4) {
      const auto type = static_cast<wire::Type>(input[0] % wire::kTypesEnd);
      const uint8_t payload = input[1];
      const size_t bytes = std::min<size_t>(input.size() - 4, input[2] | input[3] << 8);
      const bool closed = !message(type, payload, input.subspan(4, bytes));
      input = input.subspan(4 + bytes);
      if (closed) break;
    }
    session->store.session().end_all();
    session->store.end();
    context_ = {};
    if (node_->num_granted() > 0 || node_->blocks().num_leased() > 0 ||
        node_->limits().view_bytes.load() > 0)
      give_up("something is held by nobody");
    if (++taken_ % 64 == 0) check();
  }

  void check() {
    if (const std::string problem = node_->audit(); !problem.empty()) give_up(problem);
  }
  uint64_t commits() { return node_->blocks().counters().commits.load(); }

 private:
  bool message(wire::Type type, uint8_t payload, In given) {
    Bytes body(given.begin(), given.end());
    using wire::Type;
    const bool of_lease = type == Type::kRead || type == Type::kRelease ||
                          type == Type::kMakeView || type == Type::kTicket ||
                          type == Type::kVerify || type == Type::kComplain;
    if (of_lease && payload % 2 == 0 && body.size() >= sizeof last_lease_)
      memcpy(body.data(), &last_lease_, sizeof last_lease_);
    wire::FrameHeader header;
    header.type = type;
    header.body_bytes = static_cast<uint32_t>(body.size());
    header.payload_bytes = payload_bytes(type, payload, body);
    Outcome outcome = serve(context_, header, body, monotonic_now());
    if (outcome.sink && !fill(*outcome.sink, payload)) return true;
    if (outcome.sink) outcome.reply = outcome.sink->full();
    for (int tries = 0; !outcome.reply && tries < kAgain; ++tries) outcome.reply = outcome.again();
    if (!outcome.reply) return true;
    if (outcome.reply->type == Type::kLeased) {
      const auto leased = wire::decode<wire::Leased>(outcome.reply->body);
      if (leased) last_lease_ = leased->lease;
    }
    uint8_t sum = 0;  // every byte that would be sent is there
    for (const auto piece : outcome.reply->payload) {
      if (!piece.empty()) sum = static_cast<uint8_t>(sum + piece.front() + piece.back());
    }
    seen_ = sum;
    if (outcome.reply->sent) outcome.reply->sent();
    return !outcome.reply->closes;
  }

  // Mostly what the message would have behind it.
  uint64_t payload_bytes(wire::Type type, uint8_t payload, In body) const {
    if (payload >= 200) return uint64_t{1} << (payload - 200) % 41;
    if (type != wire::Type::kPut && type != wire::Type::kWrite) return 0;
    uint64_t bytes = 0;
    if (const auto put = wire::decode<wire::Reserve>(body); put && type == wire::Type::kPut) {
      for (const uint64_t length : put->lengths) bytes += length;
    }
    if (const auto write = wire::decode<wire::Write>(body); write && type == wire::Type::kWrite) {
      const auto grants = context_.session->grants(write->attempt);
      for (const uint32_t item : write->items) {
        if (grants == nullptr || item >= grants->items.size()) continue;
        const uint64_t length = grants->items[item].length;
        if (write->first < length) bytes += std::min(length - write->first, write->bytes);
      }
    }
    return bytes;
  }

  // False: the connection was lost in between.
  static bool fill(Sink& sink, uint8_t payload) {
    SinkCursor cursor(sink);
    uint64_t left = payload % 8 == 7 ? 100 : UINT64_MAX;
    while (!cursor.full() && left > 0) {
      const std::span<uint8_t> target = cursor.here();
      const uint64_t bytes = std::min<uint64_t>(target.size(), left);
      std::fill_n(target.begin(), bytes, payload);
      cursor.advance(bytes);
      left -= bytes;
    }
    if (!cursor.full()) sink.broken();
    return cursor.full();
  }

  std::shared_ptr<Node> node_;
  RequestContext context_;
  uint64_t last_lease_ = 0;
  std::atomic<uint64_t> names_{0};
  uint64_t taken_ = 0;
  volatile uint8_t seen_ = 0;
};

}  // namespace
}  // namespace kvstore

#ifdef KVSTORE_FUZZ

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static auto* const target = new kvstore::Target();
  target->take({data, size});
  return 0;
}

#else

namespace kvstore {
namespace {

template <class Message>
void add(Bytes* input, const Message& message, wire::Type type = Message::kType,
         uint8_t payload = 0) {
  const Bytes body = wire::encode(message);
  input->insert(input->end(),
                {static_cast<uint8_t>(type), payload, static_cast<uint8_t>(body.size()),
                 static_cast<uint8_t>(body.size() >> 8)});
  input->insert(input->end(), body.begin(), body.end());
}

BlockKey key_numbered(uint8_t number) {
  BlockKey key;
  key.bytes[0] = number;
  key.bytes[kKeyBytes - 1] = 1;
  return key;
}

// Whole conversations: a put in steps and one in a message, a get, a read under a lease, and the
// rest.
Bytes conversation(std::mt19937_64& random) {
  Bytes input;
  wire::Reserve reserve;
  reserve.attempt = {7, random() % 4};
  for (uint8_t i = 0; i < 3; ++i) {
    reserve.keys.push_back(key_numbered(static_cast<uint8_t>(random() % 8)));
    reserve.lengths.push_back(1 + random() % (2 * kPart));
  }
  if (random() % 2 == 0) reserve.keys[2] = key_numbered(200);
  add(&input, reserve);
  wire::Write write{reserve.attempt, {0, 1, 2}, 0, UINT64_MAX};
  add(&input, write, wire::Type::kWrite, 1);
  wire::Commit commit;
  commit.attempt = reserve.attempt;
  commit.end = 3;
  for (const uint64_t length : reserve.lengths)
    commit.parts.emplace_back((length + kPart - 1) / kPart, uint32_t{0});
  add(&input, commit);
  wire::Reserve put = reserve;
  put.parts = commit.parts;
  add(&input, put, wire::Type::kPut, 3);
  add(&input, wire::Get{reserve.keys, {1 << 20, 1 << 20, 10}});
  add(&input, wire::Lookup{reserve.keys, 0, random() % 2 == 0});
  add(&input, wire::Read{1, 0, {1 << 20}, 0, UINT64_MAX});
  add(&input, wire::MakeView{1});
  add(&input, wire::Ticket{1});
  add(&input, wire::Verify{1});
  add(&input, wire::Complain{1, 0});
  add(&input, wire::Apply{static_cast<uint8_t>(random() % 4), reserve.keys});
  add(&input, wire::Release{1, false});
  add(&input, wire::ReserveMore{reserve.attempt, true, 1000});
  add(&input, wire::Match{reserve.keys, 1, 2});
  add(&input, wire::List{});
  add(&input, wire::Usage{});
  if (random() % 16 == 0) add(&input, wire::Clear{});
  add(&input, wire::Settle{1000});
  add(&input, wire::Leave{});
  return input;
}

}  // namespace

TEST_CASE("seeded damage to whole conversations is refused or harmless") {
  constexpr uint64_t kSeed = 20241129;
  MESSAGE("seed " << kSeed);
  std::mt19937_64 random(kSeed);
  Target target;
  for (int round = 0; round < 4000; ++round) {
    Bytes input = conversation(random);
    for (uint64_t changes = random() % 6; changes > 0; --changes) {
      const size_t at = random() % input.size();
      switch (random() % 4) {
        case 0:
          input[at] ^= static_cast<uint8_t>(1U << random() % 8);
          break;
        case 1:
          input[at] = random() % 2 == 0 ? 0xFF : 0;
          break;
        case 2:
          input.erase(input.begin() + static_cast<ptrdiff_t>(at));
          break;
        default:
          input.insert(input.begin() + static_cast<ptrdiff_t>(at), static_cast<uint8_t>(random()));
      }
      if (input.empty()) break;
    }
    target.take(input);
  }
  for (int round = 0; round < 4000; ++round) {
    Bytes noise(random() % 300);
    for (uint8_t& byte : noise) byte = static_cast<uint8_t>(random());
    target.take(noise);
  }
  target.check();
}

}  // namespace kvstore

#endif
