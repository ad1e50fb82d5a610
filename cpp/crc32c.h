// CRC32C (Castagnoli, reflected polynomial 0x82F63B78), and copy with checksum as one primitive.
// Threads: pure functions, any thread. Instructions are chosen once, at run time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvstore {

// Continues `crc` (0 to start) over `bytes` bytes. crc32c(crc32c(0, a), b) == crc32c(0, a then b).
uint32_t crc32c(uint32_t crc, const void* data, size_t bytes);

// Copies and continues `crc` over the same bytes in one pass. Large copies use streaming stores, so
// the target does not enter the cache; the stores are fenced before it returns.
// REQUIRES: the ranges do not overlap. Any alignment.
uint32_t copy_crc32c(uint32_t crc, void* target, const void* source, size_t bytes);

// "sse4.2", "armv8" or "portable": which path was chosen.
const char* crc32c_path();

// The portable path, whatever the machine has: tests compare the others with it.
uint32_t crc32c_portable(uint32_t crc, const void* data, size_t bytes);
uint32_t copy_crc32c_portable(uint32_t crc, void* target, const void* source, size_t bytes);

}  // namespace kvstore
