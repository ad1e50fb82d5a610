// CRC32C: known answers, every path against the portable one at all small lengths and alignments,
// and copies that touch nothing outside their target.
#include "crc32c.h"

#include <doctest/doctest.h>

#include <array>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace kvstore {
namespace {

using Copy = uint32_t (*)(uint32_t, void*, const void*, size_t);

// Around every border of the implementation: words, lines, three lines, streaming, longest lanes.
const std::vector<size_t> kLongLengths = {
    1535,  2047,  2048,  2049,  3071,  4095,  4096,  4097,  8191,   8192,   12287,  16384,
    65535, 65536, 98303, 98304, 98305, 98496, 98559, 98560, 131072, 196608, 300001, 1048576};

std::vector<uint8_t> random_bytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

// Plain definition, bit by bit.
uint32_t crc32c_by_bits(const uint8_t* data, size_t bytes) {
  uint32_t crc = ~0u;
  for (size_t i = 0; i < bytes; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0x82F63B78u : 0);
  }
  return ~crc;
}

// Copies between guarded ranges at the given alignments; true if sum, bytes and guards are right.
bool copies_right(Copy copy, const std::vector<uint8_t>& from, size_t from_at, size_t to_at,
                  size_t bytes) {
  constexpr size_t kGuardBytes = 128;
  alignas(64) static std::array<uint8_t, (1 << 20) + 4 * kGuardBytes> room;
  const size_t used = to_at + bytes + 2 * kGuardBytes;
  std::memset(room.data(), 0xA5, used);
  uint8_t* to = room.data() + kGuardBytes + to_at;
  const uint32_t start = static_cast<uint32_t>(bytes * 2654435761u);
  const uint32_t sum = copy(start, to, from.data() + from_at, bytes);
  if (sum != crc32c_portable(start, from.data() + from_at, bytes)) return false;
  if (bytes > 0 && std::memcmp(to, from.data() + from_at, bytes) != 0) return false;
  for (const uint8_t* at = room.data(); at < to; ++at) {
    if (*at != 0xA5) return false;
  }
  for (const uint8_t* at = to + bytes; at < room.data() + used; ++at) {
    if (*at != 0xA5) return false;
  }
  return true;
}

void check_known_answers(uint32_t (*crc)(uint32_t, const void*, size_t)) {
  std::array<uint8_t, 32> bytes{};
  CHECK(crc(0, bytes.data(), 32) == 0x8A9136AAu);  // RFC 3720, B.4
  bytes.fill(0xFF);
  CHECK(crc(0, bytes.data(), 32) == 0x62A8AB43u);
  for (size_t i = 0; i < 32; ++i) bytes[i] = static_cast<uint8_t>(i);
  CHECK(crc(0, bytes.data(), 32) == 0x46DD794Eu);
  for (size_t i = 0; i < 32; ++i) bytes[i] = static_cast<uint8_t>(31 - i);
  CHECK(crc(0, bytes.data(), 32) == 0x113FDB5Cu);
  const std::array<uint8_t, 48> read_command = {
      0x01, 0xC0, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
      0x00, 0x00, 0x00, 0x00, 0x14, 0x00, 0x00, 0x00, 0x00, 0x00, 0x04, 0x00,
      0x00, 0x00, 0x00, 0x14, 0x00, 0x00, 0x00, 0x18, 0x28, 0x00, 0x00, 0x00,
      0x00, 0x00, 0x00, 0x00, 0x02, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00};
  CHECK(crc(0, read_command.data(), 48) == 0xD9963A56u);
  CHECK(crc(0, "123456789", 9) == 0xE3069283u);
  CHECK(crc(0, nullptr, 0) == 0);
}

TEST_CASE("crc32c_gives_published_answers") {
  check_known_answers(crc32c);
  check_known_answers(crc32c_portable);
}

TEST_CASE("crc32c_paths_agree_at_all_small_lengths_and_alignments") {
  MESSAGE("chosen path: ", std::string(crc32c_path()));
  const std::vector<uint8_t> bytes = random_bytes(2048, 1);
  size_t wrong = 0;
  for (size_t at = 0; at < 64; ++at) {
    for (size_t length = 0; length <= 700; ++length) {
      const uint32_t sum = crc32c_portable(0, bytes.data() + at, length);
      wrong += crc32c(0, bytes.data() + at, length) != sum;
      if (at == 0) wrong += crc32c_by_bits(bytes.data(), length) != sum;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("crc32c_paths_agree_at_long_lengths") {
  const std::vector<uint8_t> bytes = random_bytes((1 << 20) + 64, 2);
  for (const size_t length : kLongLengths) {
    CAPTURE(length);
    CHECK(crc32c(7, bytes.data() + 3, length) == crc32c_portable(7, bytes.data() + 3, length));
  }
}

TEST_CASE("crc32c_continues_over_any_cut") {
  const std::vector<uint8_t> bytes = random_bytes(5000, 3);
  const uint32_t whole = crc32c(0, bytes.data(), bytes.size());
  size_t wrong = 0;
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    const uint32_t head = crc32c(0, bytes.data(), cut);
    wrong += crc32c(head, bytes.data() + cut, bytes.size() - cut) != whole;
  }
  CHECK(wrong == 0);
}

TEST_CASE("copy_crc32c_copies_sums_and_leaves_guards_alone") {
  const std::vector<uint8_t> bytes = random_bytes((1 << 20) + 64, 4);
  for (const Copy copy : {Copy{copy_crc32c}, Copy{copy_crc32c_portable}}) {
    size_t wrong = 0;
    for (size_t length = 0; length <= 400; ++length) {
      for (size_t to_at = 0; to_at < 64; to_at += 3) {
        wrong += !copies_right(copy, bytes, length % 64, to_at, length);
      }
    }
    for (const size_t length : kLongLengths) {
      for (const size_t to_at : {0, 1, 8, 31, 32, 63}) {
        wrong += !copies_right(copy, bytes, 0, to_at, length);
        wrong += !copies_right(copy, bytes, 13, to_at, length);
      }
    }
    CHECK(wrong == 0);
  }
}

}  // namespace
}  // namespace kvstore
