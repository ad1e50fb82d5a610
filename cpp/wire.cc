#include "wire.h"

#include "sha256.h"

namespace kvstore::wire {
void encode(const FrameHeader& header, std::span<uint8_t, kHeaderBytes> out) {
  Writer writer;
  writer.number(kMagic);
  writer.number(static_cast<uint16_t>(header.type));
  writer.number(uint16_t{0});
  writer.number(header.body_bytes);
  writer.number(uint32_t{0});
  writer.number(header.payload_bytes);
  writer.number(header.request);
  writer.raw(header.trace.data(), header.trace.size());
  const std::vector<uint8_t> bytes = writer.take();
  memcpy(out.data(), bytes.data(), kHeaderBytes);
}

std::optional<FrameHeader> decode_header(std::span<const uint8_t, kHeaderBytes> bytes,
                                         uint32_t body_bytes_max) {
  Reader reader(bytes);
  const auto magic = reader.number<uint32_t>();
  const auto type = reader.number<uint16_t>();
  const auto flags = reader.number<uint16_t>();
  FrameHeader header;
  header.body_bytes = reader.number<uint32_t>();
  const auto reserved = reader.number<uint32_t>();
  header.payload_bytes = reader.number<uint64_t>();
  header.request = reader.number<uint64_t>();
  reader.raw(header.trace.data(), header.trace.size());
  header.type = static_cast<Type>(type);
  if (magic != kMagic || type == 0 || type >= kTypesEnd || flags != 0 || reserved != 0 ||
      header.body_bytes > body_bytes_max || header.payload_bytes > kPayloadBytesMax)
    return std::nullopt;
  return header;
}

Digest prove(const std::string& token, bool node, const Hello& hello, const Challenge& challenge) {
  Challenge unproved = challenge;
  unproved.proof = {};
  Writer writer;
  writer.number(static_cast<uint8_t>(node ? 1 : 2));
  const std::vector<uint8_t> said = encode(hello);
  const std::vector<uint8_t> answered = encode(unproved);
  writer.raw(said.data(), said.size());
  writer.raw(answered.data(), answered.size());
  const std::vector<uint8_t> message = writer.take();
  return hmac_sha256(token, {reinterpret_cast<const char*>(message.data()), message.size()});
}

bool equal(const Digest& a, const Digest& b) {
  uint8_t differ = 0;
  for (size_t i = 0; i < a.size(); ++i) differ |= static_cast<uint8_t>(a[i] ^ b[i]);
  return differ == 0;
}

}  // namespace kvstore::wire
