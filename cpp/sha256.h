// SHA-256 (FIPS 180-4) of one message, with the processor's SHA instructions where it has them.
// Threads: pure functions, any thread. Instructions are chosen once, at run time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kvstore {

using Sha256Digest = std::array<uint8_t, 32>;

Sha256Digest sha256(const void* data, size_t bytes);
Sha256Digest hmac_sha256(std::string_view key, std::string_view message);  // RFC 2104

// "sha-ni", "armv8" or "portable": which path was chosen.
const char* sha256_path();

// The portable path, whatever the machine has: tests compare the other with it.
Sha256Digest sha256_portable(const void* data, size_t bytes);

}  // namespace kvstore
