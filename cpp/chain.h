// Block keys: chains of SHA-256 over token ids, and keys of ids that stand for whole prefixes.
// The messages hashed are laid out in docs/block-format.md; tests/golden/keys.json pins them.
// Threads: pure functions, any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "types.h"

namespace kvstore {

using ChainHash = std::array<uint8_t, kChainBytes>;

// Which part of the model a block holds; the last 4 bytes of its key, big-endian.
struct Shard {
  uint16_t rank = 0;
  uint16_t world_size = 1;
};

// Keys of the chain that starts at `parent` (a root, or the last step of an earlier chain). Key i
// stands for tokens [0, (i + 1) * block_tokens); tokens beyond the last full block are ignored.
// `extra`: empty, or per block the extra keys as they enter the message (each length-prefixed).
// REQUIRES: block_tokens > 0; keys.size() == tokens.size() / block_tokens; extra is empty or as
// long as keys.
void chain_keys(const ChainHash& parent, std::span<const uint32_t> tokens, size_t block_tokens,
                std::span<const std::string_view> extra, Shard shard, std::span<BlockKey> keys);

// Keys of ids that each already name a block and everything before it.
// REQUIRES: keys.size() == ids.size().
void id_keys(const ChainHash& root, std::span<const uint64_t> ids, Shard shard,
             std::span<BlockKey> keys);

}  // namespace kvstore
