#include "numbers/half.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace elastic {
namespace {

uint32_t bitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float floatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float fromFloat16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu, fraction = half & 0x3ffu;
  if (exponent == 0x1f) return floatOf(sign | 0x7f800000u | fraction << 13 | (fraction != 0 ? 0x400000u : 0u));
  if (exponent != 0) return floatOf(sign | (exponent + 112) << 23 | fraction << 13);
  const float magnitude = static_cast<float>(fraction) * 0x1p-24f;  // exact: a multiple of the smallest subnormal
  return floatOf(sign | bitsOf(magnitude));
}

uint16_t toFloat16(float value) {
  const uint32_t bits = bitsOf(value), magnitude = bits & 0x7fffffffu;
  const auto sign = static_cast<uint16_t>((bits & 0x80000000u) >> 16);
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to 65536 or more
  if (magnitude < 0x38800000u) {
    // Below the smallest normal: the addition itself rounds to a multiple of 2^-24 and leaves it in the low bits.
    return static_cast<uint16_t>(sign | (bitsOf(floatOf(magnitude) + 0.5f) - bitsOf(0.5f)));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
}

float fromBfloat16(uint16_t half) { return floatOf(static_cast<uint32_t>(half) << 16); }

uint16_t toBfloat16(float value) {
  const uint32_t bits = bitsOf(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#if defined(__x86_64__)

bool hasVectors() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  return has;
}

__attribute__((target("avx2,f16c"))) size_t widenByVectors(DataType half, const uint16_t* in, float* out,
                                                           size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    const __m256 wide = half == DataType::kFloat16
                            ? _mm256_cvtph_ps(halves)
                            : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    _mm256_storeu_ps(out + i, wide);
  }
  return i;
}

__attribute__((target("avx2,f16c"))) __m128i bfloat16Of(__m256 wide) {
  const __m256i bits = _mm256_castps_si256(wide);
  const __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(wide, wide, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

__attribute__((target("avx2,f16c"))) size_t narrowByVectors(DataType half, const float* in, uint16_t* out,
                                                            size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 wide = _mm256_loadu_ps(in + i);
    const __m128i halves =
        half == DataType::kFloat16 ? _mm256_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT) : bfloat16Of(wide);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), halves);
  }
  return i;
}

#else

bool hasVectors() { return false; }
size_t widenByVectors(DataType, const uint16_t*, float*, size_t) { return 0; }
size_t narrowByVectors(DataType, const float*, uint16_t*, size_t) { return 0; }

#endif

}  // namespace

void widen(DataType half, const uint16_t* in, float* out, size_t count) {
  const size_t done = hasVectors() ? widenByVectors(half, in, out, count) : 0;
  widenPortably(half, in + done, out + done, count - done);
}

void narrow(DataType half, const float* in, uint16_t* out, size_t count) {
  const size_t done = hasVectors() ? narrowByVectors(half, in, out, count) : 0;
  narrowPortably(half, in + done, out + done, count - done);
}

void widenPortably(DataType half, const uint16_t* in, float* out, size_t count) {
  const auto convert = half == DataType::kFloat16 ? &fromFloat16 : &fromBfloat16;
  for (size_t i = 0; i < count; i++) out[i] = convert(in[i]);
}

void narrowPortably(DataType half, const float* in, uint16_t* out, size_t count) {
  const auto convert = half == DataType::kFloat16 ? &toFloat16 : &toBfloat16;
  for (size_t i = 0; i < count; i++) out[i] = convert(in[i]);
}

}  // namespace elastic
