#include "crc32c.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

namespace kvstore {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

// ---- arithmetic modulo the polynomial, at compile time -----------------------------------------
// Reflected: bit 31 is x^0.

constexpr uint32_t kPolynomial = 0x82F63B78u;

constexpr uint32_t times_x(uint32_t a) { return (a >> 1) ^ ((a & 1) ? kPolynomial : 0); }

constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = times_x(b);
  }
  return product;
}

constexpr uint32_t power_of_x(unsigned exponent) {
  uint32_t power = 0x80000000u;
  for (unsigned i = 0; i < exponent; ++i) power = times_x(power);
  return power;
}

// ---- portable: slicing by 8 --------------------------------------------------------------------

using SliceTables = std::array<std::array<uint32_t, 256>, 8>;

constexpr SliceTables make_slice_tables() {
  SliceTables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int i = 0; i < 8; ++i) crc = times_x(crc);
    tables[0][byte] = crc;
  }
  for (size_t slice = 1; slice < 8; ++slice) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t crc = tables[slice - 1][byte];
      tables[slice][byte] = (crc >> 8) ^ tables[0][crc & 255];
    }
  }
  return tables;
}

constexpr SliceTables kSlices = make_slice_tables();

uint64_t load8(const uint8_t* from) {
  uint64_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

// Copy for machines without a fused path: what is checksummed is the target, while it is still in
// the cache, so that the sum covers the bytes stored even if the source changes meanwhile.
template <uint32_t (*crc32c_path_fn)(uint32_t, const void*, size_t)>
uint32_t copy_in_pieces(uint32_t crc, void* target, const void* source, size_t bytes) {
  constexpr size_t kPieceBytes = 8192;
  auto* to = static_cast<uint8_t*>(target);
  auto* from = static_cast<const uint8_t*>(source);
  while (bytes > 0) {
    const size_t piece = std::min(bytes, kPieceBytes);
    std::memcpy(to, from, piece);
    crc = crc32c_path_fn(crc, to, piece);
    to += piece, from += piece, bytes -= piece;
  }
  return crc;
}

// ---- CRC instructions: three lanes -------------------------------------------------------------
// The instruction takes 8 bytes a cycle but answers after three, so three stretches ("lanes") of a
// piece are summed at once and joined: crc(ABC) = crc(A) * x^|BC| + crc(B) * x^|C| + crc(C).

#if defined(__x86_64__) || defined(__aarch64__)

constexpr size_t kLineBytes = 64;

// A lane is as long as the piece allows, so that a part of 2-16 KiB is joined once and leaves a
// tail of less than three lines. Up to 21 KiB: with lanes of 5-16 KiB, streaming copies of 1 MiB
// ran 5-20% slower (more and shorter streams for the memory); 32 KiB are whole pages (lane_lines).
constexpr size_t kLaneLinesMax = 341;
static_assert(kLaneLinesMax % 64 > 8 && kLaneLinesMax % 64 < 56);

// Multiplying carry-less and reducing by the CRC instruction adds a factor x^33: taken off here.
constexpr auto kShifts = [] {
  std::array<uint32_t, 2 * kLaneLinesMax + 1> shifts{};
  const uint32_t line = power_of_x(8 * kLineBytes);
  shifts[1] = power_of_x(8 * kLineBytes - 33);
  for (size_t i = 2; i < shifts.size(); ++i) shifts[i] = multiply(shifts[i - 1], line);
  return shifts;
}();

#if defined(__x86_64__)

#define KVSTORE_CRC_TARGET __attribute__((target("sse4.2,pclmul")))
#define KVSTORE_COPY_TARGET __attribute__((target("sse4.2,pclmul,avx")))

KVSTORE_CRC_TARGET inline uint64_t add8(uint64_t crc, uint64_t word) {
  return _mm_crc32_u64(crc, word);
}

KVSTORE_CRC_TARGET inline uint64_t add1(uint64_t crc, uint8_t byte) {
  return _mm_crc32_u8(static_cast<uint32_t>(crc), byte);
}

KVSTORE_CRC_TARGET inline uint64_t shift_lines(uint64_t crc, size_t lines) {
  const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<int64_t>(crc)),
                                               _mm_cvtsi64_si128(kShifts[lines]), 0);
  return _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(product)));
}

#else

#define KVSTORE_CRC_TARGET __attribute__((target("+crc+crypto")))

KVSTORE_CRC_TARGET inline uint64_t add8(uint64_t crc, uint64_t word) {
  return __crc32cd(static_cast<uint32_t>(crc), word);
}

KVSTORE_CRC_TARGET inline uint64_t add1(uint64_t crc, uint8_t byte) {
  return __crc32cb(static_cast<uint32_t>(crc), byte);
}

KVSTORE_CRC_TARGET inline uint64_t shift_lines(uint64_t crc, size_t lines) {
  const poly128_t product = vmull_p64(crc, kShifts[lines]);
  return __crc32cd(0, vgetq_lane_u64(vreinterpretq_u64_p128(product), 0));
}

#endif

KVSTORE_CRC_TARGET uint32_t crc32c_lanes(uint32_t crc, const void* data, size_t bytes) {
  auto* from = static_cast<const uint8_t*>(data);
  uint64_t sum = ~crc;
  while (bytes >= 3 * kLineBytes) {
    const size_t lines = std::min(bytes / (3 * kLineBytes), kLaneLinesMax);
    const size_t lane = lines * kLineBytes;
    uint64_t second = 0;
    uint64_t third = 0;
    for (size_t i = 0; i < lane; i += 8) {
      sum = add8(sum, load8(from + i));
      second = add8(second, load8(from + lane + i));
      third = add8(third, load8(from + 2 * lane + i));
    }
    sum = shift_lines(sum, 2 * lines) ^ shift_lines(second, lines) ^ third;
    from += 3 * lane, bytes -= 3 * lane;
  }
  for (; bytes >= 8; from += 8, bytes -= 8) sum = add8(sum, load8(from));
  for (; bytes > 0; ++from, --bytes) sum = add1(sum, *from);
  return ~static_cast<uint32_t>(sum);
}

#endif

// ---- x86-64: copy with checksum ----------------------------------------------------------------

#if defined(__x86_64__)

// From here on the target is written past the cache. Measured on Zen 3 over 1 GiB against ordinary
// stores: 2 KiB 1.05x, 4 KiB 1.25x, 64 KiB 1.4x; with a warm source 1.6x from 2 KiB on. Only where
// source and target are both warm do ordinary stores win (4 KiB 1.7x, 64 KiB 1.1x), and a pool of
// blocks is larger than a cache.
constexpr size_t kStreamBytesMin = 2048;

// Bytes ahead of each lane that are asked for. 256-1024 measured alike; none cost 10-25% at random
// places in 4 KiB pages.
constexpr size_t kPrefetchBytes = 512;

KVSTORE_COPY_TARGET inline uint64_t add32(uint64_t crc, __m256i words) {
  const __m128i low = _mm256_castsi256_si128(words);
  const __m128i high = _mm256_extractf128_si256(words, 1);
  crc = _mm_crc32_u64(crc, static_cast<uint64_t>(_mm_cvtsi128_si64(low)));
  crc = _mm_crc32_u64(crc, static_cast<uint64_t>(_mm_extract_epi64(low, 1)));
  crc = _mm_crc32_u64(crc, static_cast<uint64_t>(_mm_cvtsi128_si64(high)));
  return _mm_crc32_u64(crc, static_cast<uint64_t>(_mm_extract_epi64(high, 1)));
}

// REQUIRES: `to` on a line if `streaming`.
template <bool streaming>
KVSTORE_COPY_TARGET inline void store32(uint8_t* to, __m256i words) {
  if constexpr (streaming) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), words);
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words);
  }
}

KVSTORE_COPY_TARGET inline __m256i load32(const uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

// Lanes must not stand whole pages apart: where source and target differ by a few bytes modulo
// 4096, a load would look to the processor like the store just before it in each lane, and wait for
// it. With a target 16 bytes off (every large numpy array) lanes of 32 KiB ran at a tenth of the
// speed.
inline size_t lane_lines(size_t bytes) {
  const size_t lines = std::min(bytes / (3 * kLineBytes), kLaneLinesMax);
  const size_t phase = lines % 64;
  return lines > 32 && (phase < 8 || phase > 56) ? lines - 16 : lines;
}

// Every source byte is loaded once: the sum covers exactly the bytes that are stored, whatever
// another thread does to the source. Taking the words out of the vector register also measured
// faster than loading them again (1 MiB, streaming: 1.3x the best of that, which falls to a tenth
// where lanes are a multiple of 4 KiB apart).
template <bool streaming>
KVSTORE_COPY_TARGET uint64_t copy_lanes(uint64_t sum, uint8_t* to, const uint8_t* from,
                                        size_t lines) {
  const size_t lane = lines * kLineBytes;
  uint64_t second = 0;
  uint64_t third = 0;
  for (size_t i = 0; i < lane; i += kLineBytes) {
    const uint8_t* at = from + i;
    __builtin_prefetch(at + kPrefetchBytes, 0, 0);
    __builtin_prefetch(at + lane + kPrefetchBytes, 0, 0);
    __builtin_prefetch(at + 2 * lane + kPrefetchBytes, 0, 0);
#pragma GCC unroll 2
    for (size_t j = i; j < i + kLineBytes; j += 32) {
      const __m256i a = load32(from + j);
      const __m256i b = load32(from + lane + j);
      const __m256i c = load32(from + 2 * lane + j);
      store32<streaming>(to + j, a);
      store32<streaming>(to + lane + j, b);
      store32<streaming>(to + 2 * lane + j, c);
      sum = add32(sum, a);
      second = add32(second, b);
      third = add32(third, c);
    }
  }
  return shift_lines(sum, 2 * lines) ^ shift_lines(second, lines) ^ third;
}

// Fewer than three lines: the ends of a piece, and tiny pieces.
KVSTORE_COPY_TARGET uint64_t copy_end(uint64_t sum, uint8_t* to, const uint8_t* from,
                                      size_t bytes) {
  for (; bytes >= 8; to += 8, from += 8, bytes -= 8) {
    const uint64_t word = load8(from);
    std::memcpy(to, &word, sizeof word);
    sum = add8(sum, word);
  }
  for (; bytes > 0; ++to, ++from, --bytes) {
    const uint8_t byte = *from;
    *to = byte;
    sum = add1(sum, byte);
  }
  return sum;
}

template <bool streaming>
KVSTORE_COPY_TARGET uint32_t copy_avx(uint32_t crc, uint8_t* to, const uint8_t* from,
                                      size_t bytes) {
  uint64_t sum = ~crc;
  if constexpr (streaming) {
    const size_t head = -reinterpret_cast<uintptr_t>(to) % kLineBytes;
    sum = copy_end(sum, to, from, head);
    to += head, from += head, bytes -= head;
  }
  while (bytes >= 3 * kLineBytes) {
    const size_t lines = lane_lines(bytes);
    const size_t step = 3 * lines * kLineBytes;
    sum = copy_lanes<streaming>(sum, to, from, lines);
    to += step, from += step, bytes -= step;
  }
  sum = copy_end(sum, to, from, bytes);
  // Streaming stores are not ordered with the ordinary one that later publishes the block.
  if constexpr (streaming) _mm_sfence();
  return ~static_cast<uint32_t>(sum);
}

uint32_t copy_crc32c_avx(uint32_t crc, void* target, const void* source, size_t bytes) {
  auto* to = static_cast<uint8_t*>(target);
  auto* from = static_cast<const uint8_t*>(source);
  return bytes >= kStreamBytesMin ? copy_avx<true>(crc, to, from, bytes)
                                  : copy_avx<false>(crc, to, from, bytes);
}

#endif

// ---- choice ------------------------------------------------------------------------------------

struct Path {
  const char* name;
  uint32_t (*crc)(uint32_t, const void*, size_t);
  uint32_t (*copy)(uint32_t, void*, const void*, size_t);
};

Path choose_path() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul")) {
    return {"sse4.2", crc32c_lanes,
            __builtin_cpu_supports("avx") ? copy_crc32c_avx : copy_in_pieces<crc32c_lanes>};
  }
#elif defined(__aarch64__)
  const unsigned long capabilities = getauxval(AT_HWCAP);
  if ((capabilities & HWCAP_CRC32) && (capabilities & HWCAP_PMULL)) {
    return {"armv8", crc32c_lanes, copy_in_pieces<crc32c_lanes>};
  }
#endif
  return {"portable", crc32c_portable, copy_crc32c_portable};
}

const Path& path() {
  static const Path chosen = choose_path();
  return chosen;
}

}  // namespace

uint32_t crc32c_portable(uint32_t crc, const void* data, size_t bytes) {
  auto* from = static_cast<const uint8_t*>(data);
  crc = ~crc;
  for (; bytes >= 8; from += 8, bytes -= 8) {
    const uint64_t word = load8(from) ^ crc;
    crc = kSlices[7][word & 255] ^ kSlices[6][(word >> 8) & 255] ^ kSlices[5][(word >> 16) & 255] ^
          kSlices[4][(word >> 24) & 255] ^ kSlices[3][(word >> 32) & 255] ^
          kSlices[2][(word >> 40) & 255] ^ kSlices[1][(word >> 48) & 255] ^ kSlices[0][word >> 56];
  }
  for (; bytes > 0; ++from, --bytes) crc = (crc >> 8) ^ kSlices[0][(crc ^ *from) & 255];
  return ~crc;
}

uint32_t copy_crc32c_portable(uint32_t crc, void* target, const void* source, size_t bytes) {
  return copy_in_pieces<crc32c_portable>(crc, target, source, bytes);
}

uint32_t crc32c(uint32_t crc, const void* data, size_t bytes) {
  return path().crc(crc, data, bytes);
}

uint32_t copy_crc32c(uint32_t crc, void* target, const void* source, size_t bytes) {
  return path().copy(crc, target, source, bytes);
}

const char* crc32c_path() { return path().name; }

}  // namespace kvstore
