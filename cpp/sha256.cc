#include "sha256.h"

#include <bit>
#include <cstring>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

namespace kvstore {
namespace {

static_assert(std::endian::native == std::endian::little, "words are swapped on load and store");

constexpr size_t kChunkBytes = 64;  // what one compression takes; "block" means KV here

using State = std::array<uint32_t, 8>;
using Compress = void (*)(State& state, const uint8_t* data, size_t chunks);

constexpr State kInitial = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                            0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

alignas(16) constexpr std::array<uint32_t, 64> kRounds = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

void compress_portable(State& state, const uint8_t* data, size_t chunks) {
  for (; chunks > 0; --chunks, data += kChunkBytes) {
    std::array<uint32_t, 64> w;
    std::memcpy(w.data(), data, kChunkBytes);
    for (size_t i = 0; i < 16; ++i) w[i] = __builtin_bswap32(w[i]);
    for (size_t i = 16; i < 64; ++i) {
      const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRounds[i] + w[i];
      const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d;
    state[4] += e, state[5] += f, state[6] += g, state[7] += h;
  }
}

#if defined(__x86_64__)

#define KVSTORE_SHA_TARGET __attribute__((target("sha,sse4.1,ssse3")))

KVSTORE_SHA_TARGET inline __m128i load16(const void* from) {
  return _mm_loadu_si128(static_cast<const __m128i*>(from));
}

KVSTORE_SHA_TARGET void compress_sha_ni(State& state, const uint8_t* data, size_t chunks) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  // The instructions want the state as (a b e f) and (c d g h), first word highest.
  const __m128i badc = _mm_shuffle_epi32(load16(&state[0]), 0xB1);
  const __m128i hgfe = _mm_shuffle_epi32(load16(&state[4]), 0x1B);
  __m128i abef = _mm_alignr_epi8(badc, hgfe, 8);
  __m128i cdgh = _mm_blend_epi16(hgfe, badc, 0xF0);

  for (; chunks > 0; --chunks, data += kChunkBytes) {
    const __m128i abef_before = abef;
    const __m128i cdgh_before = cdgh;
    __m128i w[4];  // the schedule's last 16 words
    for (size_t i = 0; i < 4; ++i) w[i] = _mm_shuffle_epi8(load16(data + 16 * i), swap);
#pragma GCC unroll 16
    for (size_t i = 0; i < 16; ++i) {
      __m128i& oldest = w[i % 4];
      const __m128i& newest = w[(i + 3) % 4];
      const __m128i sum = _mm_add_epi32(oldest, load16(&kRounds[4 * i]));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
      if (i < 12) {
        const __m128i seventh = _mm_alignr_epi8(newest, w[(i + 2) % 4], 4);
        const __m128i partial = _mm_sha256msg1_epu32(oldest, w[(i + 1) % 4]);
        oldest = _mm_sha256msg2_epu32(_mm_add_epi32(partial, seventh), newest);
      }
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }

  const __m128i feba = _mm_shuffle_epi32(abef, 0x1B);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(&state[0]), _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(&state[4]), _mm_alignr_epi8(dchg, feba, 8));
}

bool has_sha_ni() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  return (ebx & bit_SHA) && __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("ssse3");
}

#elif defined(__aarch64__)

#define KVSTORE_SHA_TARGET __attribute__((target("+crypto")))

KVSTORE_SHA_TARGET void compress_armv8(State& state, const uint8_t* data, size_t chunks) {
  uint32x4_t abcd = vld1q_u32(&state[0]);
  uint32x4_t efgh = vld1q_u32(&state[4]);
  for (; chunks > 0; --chunks, data += kChunkBytes) {
    const uint32x4_t abcd_before = abcd;
    const uint32x4_t efgh_before = efgh;
    uint32x4_t w[4];  // the schedule's last 16 words
    for (size_t i = 0; i < 4; ++i) {
      w[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data + 16 * i)));
    }
#pragma GCC unroll 16
    for (size_t i = 0; i < 16; ++i) {
      uint32x4_t& oldest = w[i % 4];
      const uint32x4_t sum = vaddq_u32(oldest, vld1q_u32(&kRounds[4 * i]));
      const uint32x4_t abcd_old = abcd;
      abcd = vsha256hq_u32(abcd, efgh, sum);
      efgh = vsha256h2q_u32(efgh, abcd_old, sum);
      if (i < 12) {
        oldest = vsha256su1q_u32(vsha256su0q_u32(oldest, w[(i + 1) % 4]), w[(i + 2) % 4],
                                 w[(i + 3) % 4]);
      }
    }
    abcd = vaddq_u32(abcd, abcd_before);
    efgh = vaddq_u32(efgh, efgh_before);
  }
  vst1q_u32(&state[0], abcd);
  vst1q_u32(&state[4], efgh);
}

#endif

struct Path {
  const char* name;
  Compress compress;
};

Path choose_path() {
#if defined(__x86_64__)
  if (has_sha_ni()) return {"sha-ni", compress_sha_ni};
#elif defined(__aarch64__)
  if (getauxval(AT_HWCAP) & HWCAP_SHA2) return {"armv8", compress_armv8};
#endif
  return {"portable", compress_portable};
}

const Path& path() {
  static const Path chosen = choose_path();
  return chosen;
}

Sha256Digest digest(Compress compress, const void* data, size_t bytes) {
  State state = kInitial;
  auto* from = static_cast<const uint8_t*>(data);
  const size_t rest = bytes % kChunkBytes;
  compress(state, from, bytes / kChunkBytes);

  // The end: what is left, a one bit, zeros, the length in bits.
  std::array<uint8_t, 2 * kChunkBytes> end{};
  if (rest > 0) std::memcpy(end.data(), from + (bytes - rest), rest);
  end[rest] = 0x80;
  const size_t chunks = rest + 9 <= kChunkBytes ? 1 : 2;
  const uint64_t bits = __builtin_bswap64(uint64_t{bytes} * 8);
  std::memcpy(end.data() + chunks * kChunkBytes - sizeof bits, &bits, sizeof bits);
  compress(state, end.data(), chunks);

  Sha256Digest result;
  for (uint32_t& word : state) word = __builtin_bswap32(word);
  std::memcpy(result.data(), state.data(), result.size());
  return result;
}

}  // namespace

Sha256Digest sha256(const void* data, size_t bytes) { return digest(path().compress, data, bytes); }

const char* sha256_path() { return path().name; }

Sha256Digest sha256_portable(const void* data, size_t bytes) {
  return digest(compress_portable, data, bytes);
}

Sha256Digest hmac_sha256(std::string_view key, std::string_view message) {
  constexpr size_t kBlock = 64;
  std::array<uint8_t, kBlock> padded{};
  if (key.size() > kBlock) {
    const Sha256Digest digest = sha256(key.data(), key.size());
    memcpy(padded.data(), digest.data(), digest.size());
  } else if (!key.empty()) {
    memcpy(padded.data(), key.data(), key.size());
  }
  const auto digest_of = [&](uint8_t pad, std::string_view text) {
    std::string whole(kBlock, '\0');
    for (size_t i = 0; i < kBlock; ++i) whole[i] = static_cast<char>(padded[i] ^ pad);
    whole += text;
    return sha256(whole.data(), whole.size());
  };
  const Sha256Digest inner = digest_of(0x36, message);
  return digest_of(0x5c, {reinterpret_cast<const char*>(inner.data()), inner.size()});
}

}  // namespace kvstore
