#include "chain.h"

#include <bit>
#include <cassert>
#include <cstring>
#include <vector>

#include "sha256.h"

namespace kvstore {
namespace {

static_assert(std::endian::native == std::endian::little, "integers are hashed as they lie");

// Tags keep messages of different kinds apart. With this length a block of 16 tokens and no extra
// keys is a message of 112 bytes: two compressions of SHA-256, the fewest possible (at most 119).
constexpr std::string_view kBlockTag = "kvstore.block.v1";
constexpr std::string_view kIdTag = "kvstore.ident.v1";
static_assert(kBlockTag.size() + kChainBytes + sizeof(uint32_t) * 17 <= 119);
static_assert(kIdTag.size() + kChainBytes + sizeof(uint64_t) <= 55);  // one compression

uint8_t* append(uint8_t* to, const void* data, size_t bytes) {
  if (bytes > 0) std::memcpy(to, data, bytes);
  return to + bytes;
}

void write_key(const Sha256Digest& digest, Shard shard, BlockKey& key) {
  uint8_t* to = append(key.bytes.data(), digest.data(), kChainBytes);
  to[0] = static_cast<uint8_t>(shard.rank >> 8);
  to[1] = static_cast<uint8_t>(shard.rank);
  to[2] = static_cast<uint8_t>(shard.world_size >> 8);
  to[3] = static_cast<uint8_t>(shard.world_size);
}

}  // namespace

void chain_keys(const ChainHash& parent, std::span<const uint32_t> tokens, size_t block_tokens,
                std::span<const std::string_view> extra, Shard shard, std::span<BlockKey> keys) {
  assert(block_tokens > 0 && keys.size() == tokens.size() / block_tokens);
  assert(extra.empty() || extra.size() == keys.size());
  const auto count = static_cast<uint32_t>(block_tokens);
  const size_t token_bytes = block_tokens * sizeof(uint32_t);

  std::vector<uint8_t> message(kBlockTag.size() + kChainBytes + sizeof count + token_bytes);
  const size_t plain_bytes = message.size();
  const uint8_t* before = parent.data();
  for (size_t i = 0; i < keys.size(); ++i) {
    const std::string_view more = extra.empty() ? std::string_view() : extra[i];
    message.resize(plain_bytes + more.size());
    uint8_t* to = append(message.data(), kBlockTag.data(), kBlockTag.size());
    to = append(to, before, kChainBytes);
    to = append(to, &count, sizeof count);
    to = append(to, &tokens[i * block_tokens], token_bytes);
    append(to, more.data(), more.size());
    write_key(sha256(message.data(), message.size()), shard, keys[i]);
    before = keys[i].bytes.data();
  }
}

void id_keys(const ChainHash& root, std::span<const uint64_t> ids, Shard shard,
             std::span<BlockKey> keys) {
  assert(keys.size() == ids.size());
  std::array<uint8_t, kIdTag.size() + kChainBytes + sizeof(uint64_t)> message;
  uint8_t* id_at = append(message.data(), kIdTag.data(), kIdTag.size());
  id_at = append(id_at, root.data(), kChainBytes);
  for (size_t i = 0; i < ids.size(); ++i) {
    append(id_at, &ids[i], sizeof ids[i]);
    write_key(sha256(message.data(), message.size()), shard, keys[i]);
  }
}

}  // namespace kvstore
