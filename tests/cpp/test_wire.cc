// The codec: every message comes back as it went, and no bytes do anything worse than be refused.
#include <doctest/doctest.h>

#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "sha256.h"
#include "wire_messages.h"

namespace kvstore::wire {
namespace {

using Bytes = std::vector<uint8_t>;

using Messages =
    std::tuple<Hello, Challenge, Proof, Welcome, Refusal, Match, Matched, Exists, Held, Reserve,
               ReserveMore, Granted, Write, Written, Commit, PutDone, Lookup, Redeem, Leased, Get,
               Read, Blocks, Release, Released, MakeView, ViewMade, Ticket, TicketIs, Verify,
               Verified, Complain, Apply, Applied, Clear, Cleared, List, Listed, Usage, UsageIs,
               Audit, AuditIs, Settle, Settled>;

template <class Use>
void for_each_message(Use&& use) {
  std::apply([&](auto... messages) { (use(messages), ...); }, Messages{});
}

// A third side of fields(): fills a message with values that are valid.
class Filler {
 public:
  explicit Filler(uint64_t seed) : random_(seed) {}
  template <class T>
    requires std::is_integral_v<T>
  Filler& operator()(T& value) {
    value = static_cast<T>(std::is_same_v<T, bool> ? random_() % 2 : random_());
    return *this;
  }
  template <class T>
    requires std::is_enum_v<T>
  Filler& operator()(T& value, std::underlying_type_t<T> end) {
    value = static_cast<T>(random_() % end);
    return *this;
  }
  template <size_t N>
  Filler& operator()(std::array<uint8_t, N>& bytes) {
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random_());
    return *this;
  }
  Filler& operator()(BlockKey& key) { return (*this)(key.bytes); }
  Filler& operator()(AttemptId& id) { return (*this)(id.high)(id.low); }
  Filler& operator()(Extent& extent) { return (*this)(extent.offset)(extent.bytes); }
  Filler& operator()(Status& status) { return (*this)(status, static_cast<uint8_t>(kStatusCount)); }
  Filler& operator()(std::string& text, uint32_t = 0) {
    text.resize(random_() % 20);
    for (char& letter : text) letter = static_cast<char>(random_());
    return *this;
  }
  template <class T, class Each>
  Filler& list(std::vector<T>& items, size_t, uint32_t, Each&& each) {
    items.resize(random_() % 4);
    for (T& item : items) each(item);
    return *this;
  }
  template <class T>
  Filler& list(std::vector<T>& items, uint32_t items_max) {
    return list(items, sizeof(T), items_max, [this](T& item) { (*this)(item); });
  }
  Filler& list(std::vector<BlockKey>& keys) { return list(keys, 0); }

 private:
  std::mt19937_64 random_;
};

template <class Message>
Bytes filled(uint64_t seed) {
  Message message;
  Filler filler(seed);
  message.fields(filler);
  return encode(message);
}

}  // namespace

TEST_CASE("every message comes back as it went") {
  for_each_message([](auto example) {
    using Message = decltype(example);
    CAPTURE(static_cast<int>(Message::kType));
    for (uint64_t seed = 0; seed < 50; ++seed) {
      const Bytes bytes = filled<Message>(seed);
      const auto decoded = decode<Message>(bytes);
      REQUIRE(decoded.has_value());
      CHECK(encode(*decoded) == bytes);
    }
  });
}

TEST_CASE("a message cut short or with something behind it is none") {
  for_each_message([](auto example) {
    using Message = decltype(example);
    CAPTURE(static_cast<int>(Message::kType));
    for (uint64_t seed = 0; seed < 5; ++seed) {
      Bytes bytes = filled<Message>(seed);
      for (size_t length = 0; length < bytes.size(); ++length) {
        CHECK_FALSE(decode<Message>(std::span(bytes).first(length)).has_value());
      }
      bytes.push_back(0);
      CHECK_FALSE(decode<Message>(bytes).has_value());
    }
  });
}

TEST_CASE("mutated and random bytes are a message or are not, and nothing else happens") {
  std::mt19937_64 random(7);
  int valid = 0;
  int invalid = 0;
  for_each_message([&](auto example) {
    using Message = decltype(example);
    for (uint64_t seed = 0; seed < 400; ++seed) {
      Bytes bytes = seed % 4 == 0 ? Bytes(random() % 200) : filled<Message>(seed);
      if (seed % 4 == 0) {
        for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
      }
      for (uint64_t change = random() % 4; change > 0 && !bytes.empty(); --change) {
        const uint8_t extremes[] = {0, 1, 0x7F, 0x80, 0xFF};
        bytes[random() % bytes.size()] = extremes[random() % 5];
      }
      const auto decoded = decode<Message>(bytes);
      ++(decoded ? valid : invalid);
      if (decoded) CHECK(encode(*decoded) == bytes);  // one message, one form
    }
  });
  CHECK(valid > 1000);
  CHECK(invalid > 1000);
}

TEST_CASE("a count that the bytes cannot fill allocates nothing") {
  Writer writer;
  writer.number(uint32_t{60'000});  // keys, and then none
  CHECK_FALSE(decode<Exists>(writer.take()).has_value());
  Writer texts;
  texts.number(uint32_t{0});            // keys
  texts.number(uint32_t{0});            // skip
  texts.number(uint32_t{0});            // lengths
  texts.number(uint32_t{0xFFFF'FFFF});  // texts
  CHECK_FALSE(decode<Reserve>(texts.take()).has_value());
}

TEST_CASE("batches and texts have bounds") {
  Exists most;
  most.keys.resize(kBatchBlocksMax);
  CHECK(decode<Exists>(encode(most)).has_value());
  most.keys.resize(kBatchBlocksMax + 1);
  CHECK_FALSE(decode<Exists>(encode(most)).has_value());
  Refusal refusal;
  refusal.message.assign(kTextBytesMax, 'x');
  CHECK(decode<Refusal>(encode(refusal)).has_value());
  refusal.message += 'x';
  CHECK_FALSE(decode<Refusal>(encode(refusal)).has_value());
}

TEST_CASE("frame headers come back, and others are refused") {
  FrameHeader header;
  header.type = Type::kGet;
  header.body_bytes = 1234;
  header.payload_bytes = uint64_t{5} << 32;
  header.request = 77;
  header.trace[3] = 9;
  std::array<uint8_t, kHeaderBytes> bytes{};
  encode(header, bytes);
  const auto decoded = decode_header(bytes, kBodyBytesMax);
  REQUIRE(decoded.has_value());
  CHECK(decoded->type == Type::kGet);
  CHECK(decoded->body_bytes == 1234);
  CHECK(decoded->payload_bytes == uint64_t{5} << 32);
  CHECK(decoded->request == 77);
  CHECK(decoded->trace == header.trace);
  CHECK_FALSE(decode_header(bytes, 1233).has_value());
  for (const size_t at : {0, 3, 6, 7, 12}) {  // magic, flags, reserved
    auto wrong = bytes;
    wrong[at] ^= 1;
    CHECK_FALSE(decode_header(wrong, kBodyBytesMax).has_value());
  }
  for (const uint16_t type : {uint16_t{0}, kTypesEnd, uint16_t{0xFFFF}}) {
    auto wrong = bytes;
    wrong[4] = static_cast<uint8_t>(type);
    wrong[5] = static_cast<uint8_t>(type >> 8);
    CHECK_FALSE(decode_header(wrong, kBodyBytesMax).has_value());
  }
  auto wrong = bytes;
  wrong[22] = 0xFF;  // a payload of exabytes
  CHECK_FALSE(decode_header(wrong, kBodyBytesMax).has_value());
}

TEST_CASE("a proof holds for one token, role, hello and challenge") {
  Hello hello;
  hello.record = "a namespace";
  hello.nonce[0] = 1;
  Challenge challenge;
  challenge.nonce[0] = 2;
  const Digest node = prove("token", true, hello, challenge);
  const Digest client = prove("token", false, hello, challenge);
  CHECK_FALSE(equal(node, client));  // neither can be sent back
  CHECK(equal(node, prove("token", true, hello, challenge)));
  CHECK_FALSE(equal(node, prove("other", true, hello, challenge)));
  challenge.proof = node;  // stands beside, is not part of what is proved
  CHECK(equal(node, prove("token", true, hello, challenge)));
  Hello changed = hello;
  changed.record = "another";
  CHECK_FALSE(equal(client, prove("token", false, changed, challenge)));
  Challenge replayed = challenge;
  replayed.nonce[31] = 1;
  CHECK_FALSE(equal(client, prove("token", false, hello, replayed)));
}

TEST_CASE("hmac_sha256 gives published answers") {
  const auto hex = [](const Sha256Digest& digest) {
    std::string text;
    for (const uint8_t byte : digest) {
      text += "0123456789abcdef"[byte >> 4];
      text += "0123456789abcdef"[byte & 15];
    }
    return text;
  };
  // RFC 4231, test cases 1, 2 and 6.
  CHECK(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")) ==
        "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK(hex(hmac_sha256("Jefe", "what do ya want for nothing?")) ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(hex(hmac_sha256(std::string(131, '\xaa'),
                        "Test Using Larger Than Block-Size Key - Hash Key First")) ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

}  // namespace kvstore::wire
