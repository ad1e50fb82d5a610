// Payload that proves itself: each 8-byte word of a block names its place in the block (24 bits),
// the block (16) and the put that wrote it (24, never 0). A mix of two puts, a shift, a foreign
// block and a zero fill all show.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

namespace kvstore {

inline uint64_t payload_word(uint32_t block, uint32_t attempt, uint64_t place) {
  return place << 40 | uint64_t{block} << 24 | attempt;
}

// Bytes [first, first + out.size()) of what put `attempt` of `block` stores.
inline void fill_payload(std::span<uint8_t> out, uint32_t block, uint32_t attempt,
                         uint64_t first = 0) {
  size_t at = 0;
  const auto piece = [&](size_t bytes) {
    const uint64_t word = payload_word(block, attempt, (first + at) / 8);
    memcpy(out.data() + at, reinterpret_cast<const uint8_t*>(&word) + (first + at) % 8, bytes);
    at += bytes;
  };
  if (first % 8 != 0) piece(std::min<size_t>(8 - first % 8, out.size()));
  for (uint64_t place = (first + at) / 8; at + 8 <= out.size(); at += 8, ++place) {
    const uint64_t word = payload_word(block, attempt, place);
    memcpy(out.data() + at, &word, 8);
  }
  if (at < out.size()) piece(out.size() - at);
}

inline std::vector<uint8_t> payload(uint32_t block, uint32_t attempt, uint64_t length) {
  std::vector<uint8_t> bytes(length);
  fill_payload(bytes, block, attempt);
  return bytes;
}

// Empty, or the first word that is not what put `attempt` of `block` stores.
inline std::string payload_fault(std::span<const uint8_t> bytes, uint32_t block, uint32_t attempt) {
  size_t at = 0;
  uint64_t found = 0;
  for (; at + 8 <= bytes.size(); at += 8) {
    memcpy(&found, bytes.data() + at, 8);
    if (found != payload_word(block, attempt, at / 8)) break;
  }
  if (at + 8 > bytes.size()) {
    const uint64_t wanted = payload_word(block, attempt, at / 8);
    if (memcmp(bytes.data() + at, &wanted, bytes.size() - at) == 0) return {};
    found = 0;
    memcpy(&found, bytes.data() + at, bytes.size() - at);
  }
  return "word " + std::to_string(at / 8) + " of block " + std::to_string(block) + ", put " +
         std::to_string(attempt) + ", holds word " + std::to_string(found >> 40) + " of block " +
         std::to_string(found >> 24 & 0xFFFF) + ", put " + std::to_string(found & 0xFFFFFF);
}

// The put the bytes say they are from. REQUIRES: at least 3 bytes.
inline uint32_t payload_attempt(std::span<const uint8_t> bytes) {
  return static_cast<uint32_t>(bytes[0] | bytes[1] << 8 | bytes[2] << 16);
}

}  // namespace kvstore
