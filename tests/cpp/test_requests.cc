// What a node answers, without sockets: whole puts and gets, and what no client should send.
#include "requests.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "core.h"

namespace kvstore {
namespace {

using Bytes = std::vector<uint8_t>;
constexpr uint64_t kPart = 4096;

struct Asked {
  wire::FrameHeader header;
  Bytes body;
};

template <class Message>
Asked ask_with(const Message& message, uint64_t payload_bytes, wire::Type type) {
  Asked asked;
  asked.body = wire::encode(message);
  asked.header.type = type;
  asked.header.body_bytes = static_cast<uint32_t>(asked.body.size());
  asked.header.payload_bytes = payload_bytes;
  return asked;
}

struct Peer {
  Peer() {
    NodeOptions options;
    options.dram_bytes = 8 * kFrameBytes;
    options.copy_threads = 1;
    std::string error;
    node = Node::open(options, &error);
    REQUIRE_MESSAGE(node != nullptr, error);
    REQUIRE(node->settle(monotonic_now() + 60'000 * kMillisecond));
    context = {std::make_shared<PeerSession>(AttemptId{1, 2}, node, "space", kPart), false, 100};
  }

  // The reply to a request and the payload behind it; `step` bytes of ours come at a time.
  Reply ask(const Asked& asked, const Bytes& payload = {}, size_t step = 1 << 20) {
    Outcome outcome = serve(context, asked.header, asked.body, monotonic_now());
    if (outcome.sink) {
      SinkCursor cursor(*outcome.sink);
      size_t at = 0;
      while (at < payload.size()) {
        REQUIRE_FALSE(cursor.full());
        const auto target = cursor.here();
        const size_t now = std::min({target.size(), step, payload.size() - at});
        memcpy(target.data(), payload.data() + at, now);
        cursor.advance(now);
        at += now;
      }
      REQUIRE(cursor.full());
      outcome.reply = outcome.sink->full();
    }
    while (!outcome.reply) outcome.reply = outcome.again();
    received.clear();
    for (const auto piece : outcome.reply->payload)
      received.insert(received.end(), piece.begin(), piece.end());
    if (outcome.reply->sent) outcome.reply->sent();
    return std::move(*outcome.reply);
  }
  template <class Answer, class Message>
  Answer ask(const Message& message, const Bytes& payload = {}, wire::Type type = Message::kType,
             size_t step = 1 << 20) {
    const Reply reply = ask(ask_with(message, payload.size(), type), payload, step);
    REQUIRE(reply.type == Answer::kType);
    auto decoded = wire::decode<Answer>(reply.body);
    REQUIRE(decoded.has_value());
    return std::move(*decoded);
  }
  bool refuses(const Asked& asked) {
    Outcome outcome = serve(context, asked.header, asked.body, monotonic_now());
    return outcome.reply && outcome.reply->type == wire::Type::kRefusal && outcome.reply->closes;
  }

  wire::Reserve reservation(uint32_t first, const std::vector<uint64_t>& lengths) {
    wire::Reserve message;
    message.attempt = {++attempts, 77};
    message.keys = keys_of(first, static_cast<uint32_t>(lengths.size()));
    message.lengths = lengths;
    return message;
  }

  std::shared_ptr<Node> node;
  RequestContext context;
  Bytes received;
  uint64_t attempts = 0;
};

}  // namespace

TEST_CASE("a put in steps, read back in one message and under a lease") {
  Peer peer;
  const std::vector<uint64_t> lengths{5, kPart, 3 * kPart + 1, kFrameBytes + 70'000};
  const auto granted = peer.ask<wire::Granted>(peer.reservation(1, lengths));
  REQUIRE(granted.statuses == std::vector<Status>(4, Status::kOk));
  CHECK(granted.slots[0].extents.empty());  // this client maps nothing
  Bytes all;
  wire::Commit commit;
  commit.attempt = granted.attempt;
  commit.end = 4;
  for (uint32_t i = 0; i < 4; ++i) {
    const Bytes block = payload(1 + i, 1, lengths[i]);
    commit.parts.push_back(checksums(block, kPart));
    all.insert(all.end(), block.begin(), block.end());
  }
  wire::Write write;
  write.attempt = granted.attempt;
  write.items = {0, 1, 2, 3};
  write.bytes = UINT64_MAX;
  CHECK(peer.ask<wire::Written>(write, all, wire::Type::kWrite, 1000).status == Status::kOk);
  const auto done = peer.ask<wire::PutDone>(commit);
  CHECK(done.statuses == std::vector<Status>(4, Status::kOk));
  CHECK_FALSE(peer.ask<wire::PutDone>(commit).known);  // once

  wire::Get get;
  get.keys = keys_of(1, 5);
  get.room = {5, kPart, 3 * kPart + 1, kFrameBytes + 70'000, 9};
  const auto blocks = peer.ask<wire::Blocks>(get);
  CHECK(peer.received == all);
  CHECK(blocks.blocks[3].status == Status::kOk);
  CHECK(blocks.blocks[3].parts == checksums(payload(4, 1, lengths[3]), kPart));
  CHECK(blocks.blocks[4].status == Status::kMiss);
  get.room[2] = 7;
  const auto small = peer.ask<wire::Blocks>(get);
  CHECK(small.any_too_small);
  CHECK(small.too_small == 2);
  CHECK(small.blocks[2].length == 3 * kPart + 1);
  CHECK(peer.received.empty());

  wire::Lookup lookup;
  lookup.keys = keys_of(1, 6);
  const auto leased = peer.ask<wire::Leased>(lookup);
  REQUIRE(leased.blocks.size() == 4);
  wire::Read read;
  read.lease = leased.lease;
  read.first_item = 2;
  read.room = {kPart, kPart};
  read.first = kPart;
  read.bytes = kPart;
  peer.ask<wire::Blocks>(read);
  CHECK(peer.received.size() == 2 * kPart);
  CHECK(std::equal(peer.received.begin(), peer.received.begin() + kPart,
                   payload(3, 1, lengths[2]).begin() + kPart));
  CHECK(peer.ask<wire::Verified>(wire::Verify{leased.lease}).statuses ==
        std::vector<Status>(4, Status::kOk));
  CHECK(peer.ask<wire::Released>(wire::Release{leased.lease, false}).held);
  CHECK_FALSE(peer.ask<wire::Released>(wire::Release{leased.lease, false}).held);
  CHECK(peer.ask<wire::Matched>(wire::Match{keys_of(1, 6), 0, 1}).blocks == 4);
  CHECK(peer.ask<wire::AuditIs>(wire::Audit{}).problem == "");
  CHECK(peer.node->blocks().num_leased() == 0);
}

TEST_CASE("an inline put is one message, and what is held already is passed over") {
  Peer peer;
  auto message = peer.reservation(1, {100, 5000, 7});
  Bytes all;
  for (uint32_t i = 0; i < 3; ++i) {
    const Bytes block = payload(1 + i, 1, message.lengths[i]);
    message.parts.push_back(checksums(block, kPart));
    all.insert(all.end(), block.begin(), block.end());
  }
  const auto first = peer.ask<wire::PutDone>(message, all, wire::Type::kPut, 33);
  CHECK(first.statuses == std::vector<Status>(3, Status::kOk));
  message.keys[1] = key_of(50);
  message.parts[1][1] ^= 1;  // damaged on its way
  const auto second = peer.ask<wire::PutDone>(message, all, wire::Type::kPut);
  CHECK(second.statuses == std::vector{Status::kExists, Status::kCorrupt, Status::kExists});
  CHECK(peer.ask<wire::Held>(wire::Exists{{key_of(1), key_of(50), key_of(3)}}).held ==
        Bytes{1, 0, 1});
  CHECK(peer.node->pool().usage().slots == 3);
  CHECK(peer.ask<wire::AuditIs>(wire::Audit{}).problem == "");
}

TEST_CASE("a commit without its checksums is not taken on trust") {
  Peer peer;
  const auto granted = peer.ask<wire::Granted>(peer.reservation(1, {kPart, 5}));
  wire::Write write;
  write.attempt = granted.attempt;
  write.items = {0, 1};
  write.bytes = UINT64_MAX;
  const Bytes bytes(kPart + 5, 7);
  CHECK(peer.ask<wire::Written>(write, bytes).status == Status::kOk);
  wire::Commit commit;
  commit.attempt = granted.attempt;
  commit.end = 2;
  commit.parts = {checksums(Bytes(kPart, 7), kPart)};  // none for the second
  const auto done = peer.ask<wire::PutDone>(commit);
  CHECK(done.statuses == std::vector{Status::kOk, Status::kCorrupt});
  CHECK(peer.node->pool().usage().slots == 1);
  CHECK(peer.ask<wire::AuditIs>(wire::Audit{}).problem == "");
}

TEST_CASE("a session that ends while bytes are on their way keeps their slots until they are in") {
  Peer peer;
  const auto granted = peer.ask<wire::Granted>(peer.reservation(1, {kPart}));
  wire::Write write;
  write.attempt = granted.attempt;
  write.items = {0};
  write.bytes = kPart;
  const Asked asked = ask_with(write, kPart, wire::Type::kWrite);
  Outcome under_way = serve(peer.context, asked.header, asked.body, monotonic_now());
  REQUIRE(under_way.sink);
  wire::Commit early;
  early.attempt = granted.attempt;
  early.end = 1;
  CHECK(peer.ask<wire::PutDone>(early).statuses != std::vector{Status::kOk});
  peer.context.session->store.end();
  CHECK(peer.node->pool().usage().slots == 1);
  under_way.sink->broken();
  CHECK(peer.node->pool().usage().slots == 0);
}

TEST_CASE("what no client should send is refused and leaves nothing behind") {
  Peer peer;
  using wire::Type;
  auto none = peer.reservation(1, {0});
  CHECK(peer.refuses(ask_with(none, 0, Type::kReserve)));
  none.lengths = {uint64_t{1} << 50};
  CHECK(peer.refuses(ask_with(none, 0, Type::kReserve)));
  none.lengths = {5, 5};
  CHECK(peer.refuses(ask_with(none, 0, Type::kReserve)));
  none = peer.reservation(1, {5});
  none.skip = 7;
  CHECK(peer.refuses(ask_with(none, 0, Type::kReserve)));
  none = peer.reservation(1, {5});
  CHECK(peer.refuses(ask_with(none, 5, Type::kPut)));      // without checksums
  CHECK(peer.refuses(ask_with(none, 5, Type::kReserve)));  // a payload where none belongs
  CHECK(peer.refuses(ask_with(wire::Match{keys_of(1, 2), 3, 1}, 0, Type::kMatch)));
  CHECK(peer.refuses(ask_with(wire::Match{keys_of(1, 2), 0, 0}, 0, Type::kMatch)));
  CHECK(peer.refuses(ask_with(wire::Get{keys_of(1, 2), {5}}, 0, Type::kGet)));
  CHECK(peer.refuses(ask_with(wire::Apply{9, {}}, 0, Type::kApply)));
  CHECK(peer.refuses(ask_with(wire::Held{}, 0, Type::kHeld)));  // a reply is no request
  const auto granted = peer.ask<wire::Granted>(peer.reservation(1, {kPart, 2 * kPart}));
  wire::Write write;
  write.attempt = granted.attempt;
  write.items = {0};
  write.bytes = kPart;
  CHECK(peer.refuses(ask_with(write, kPart + 1, Type::kWrite)));
  write.items = {2};
  CHECK(peer.refuses(ask_with(write, kPart, Type::kWrite)));
  write.items = {1};
  write.first = 5;
  CHECK(peer.refuses(ask_with(write, kPart, Type::kWrite)));
  write.attempt.low ^= 1;
  CHECK(peer.refuses(ask_with(write, kPart, Type::kWrite)));
  wire::Lookup lookup;
  lookup.keys = keys_of(1, 2);
  lookup.skip = 3;
  CHECK(peer.refuses(ask_with(lookup, 0, Type::kLookup)));
  peer.context.session->store.end();
  CHECK(peer.node->pool().usage().slots == 0);
  CHECK(peer.node->audit() == "");
}

TEST_CASE("random messages leave a sound node") {
  Peer peer;
  std::mt19937_64 random(5);
  int refused = 0;
  for (int round = 0; round < 20'000; ++round) {
    Asked asked;
    switch (random() % 6) {
      case 0:
        asked = ask_with(peer.reservation(static_cast<uint32_t>(random() % 50),
                                          {random() % 9000 + 1, random() % 9000 + 1}),
                         0, wire::Type::kReserve);
        break;
      case 1:
        asked = ask_with(wire::Lookup{keys_of(static_cast<uint32_t>(random() % 50), 3), 0, true}, 0,
                         wire::Type::kLookup);
        break;
      case 2:
        asked = ask_with(wire::Get{keys_of(static_cast<uint32_t>(random() % 50), 2), {9000, 9000}},
                         0, wire::Type::kGet);
        break;
      case 3:
        asked = ask_with(wire::Apply{static_cast<uint8_t>(random() % 5), keys_of(1, 40)}, 0,
                         wire::Type::kApply);
        break;
      case 4:
        asked.body.resize(random() % 100);
        for (uint8_t& byte : asked.body) byte = static_cast<uint8_t>(random());
        asked.header.type = static_cast<wire::Type>(1 + random() % (wire::kTypesEnd - 1));
        break;
      default: {
        auto message = peer.reservation(static_cast<uint32_t>(random() % 50), {random() % 900 + 1});
        message.parts = {checksums(Bytes(message.lengths[0], 7), kPart)};
        asked = ask_with(message, message.lengths[0], wire::Type::kPut);
      }
    }
    if (random() % 3 == 0 && !asked.body.empty())
      asked.body[random() % asked.body.size()] ^= static_cast<uint8_t>(1 << random() % 8);
    Outcome outcome = serve(peer.context, asked.header, asked.body, monotonic_now());
    if (outcome.sink) {
      SinkCursor cursor(*outcome.sink);
      while (!cursor.full()) {
        std::ranges::fill(cursor.here(), uint8_t{7});
        cursor.advance(cursor.here().size());
      }
      outcome.reply = random() % 4 == 0 ? (outcome.sink->broken(), Reply{}) : outcome.sink->full();
    }
    if (outcome.reply && outcome.reply->type == wire::Type::kRefusal) ++refused;
    if (outcome.reply && outcome.reply->sent) outcome.reply->sent();
    if (round % 500 == 0) {  // the client goes away, with whatever it held
      peer.context.session->store.end();
      REQUIRE(peer.node->audit() == "");
      peer.context.session =
          std::make_shared<PeerSession>(AttemptId{1, 2}, peer.node, "space", kPart);
    }
  }
  CHECK(refused > 1000);
  CHECK(peer.node->blocks().counters().commits.load() > 100);
  peer.context.session->store.end();
  CHECK(peer.node->blocks().num_leased() == 0);
  CHECK(peer.node->audit() == "");
}

}  // namespace kvstore
