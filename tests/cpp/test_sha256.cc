// SHA-256: published answers for both paths, and the paths against each other.
#include "sha256.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvstore {
namespace {

std::string hex(const Sha256Digest& digest) {
  std::string text;
  for (const uint8_t byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

void check_published_answers(Sha256Digest (*hash)(const void*, size_t)) {
  const auto of = [hash](std::string_view text) { return hex(hash(text.data(), text.size())); };
  // FIPS 180-4's examples, the empty message and a million times "a".
  CHECK(of("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(of("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmno"
           "ijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu") ==
        "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  CHECK(of("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(of(std::string(1'000'000, 'a')) ==
        "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST_CASE("sha256_gives_published_answers") {
  MESSAGE("chosen path: ", std::string(sha256_path()));
  check_published_answers(sha256);
  check_published_answers(sha256_portable);
}

TEST_CASE("sha256_paths_agree_at_all_small_lengths_and_alignments") {
  std::vector<uint8_t> bytes(1024);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 167 + (i >> 8));
  size_t wrong = 0;
  for (size_t length = 0; length <= 600; ++length) {
    for (size_t at = 0; at < 16; at += 5) {
      wrong += sha256(bytes.data() + at, length) != sha256_portable(bytes.data() + at, length);
    }
  }
  CHECK(wrong == 0);
}

}  // namespace
}  // namespace kvstore
