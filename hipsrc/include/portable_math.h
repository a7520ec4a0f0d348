// portable_math.h - arithmetic that must give the same bits on every target, written once over the primitives of the compiler headers.
#pragma once

struct bf16 {
  uint16_t bits;
};

// 16 bytes moved as one: both addresses must be multiples of 16.
struct alignas(16) words16 {
  uint32_t w[4];
};

DEVICE float bf16_to_f32(bf16 v) { return float_of((uint32_t)v.bits << 16); }
// Round to nearest even; NaN stays NaN (quiet).
DEVICE bf16 f32_to_bf16(float f) {
  uint32_t u = bits_of(f);
  bf16 r;
  if ((u & 0x7fffffffu) > 0x7f800000u) r.bits = (uint16_t)((u >> 16) | 0x40u);
  else r.bits = (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  return r;
}
DEVICE float load_f32(const float* p) { return *p; }
DEVICE float load_f32(const bf16* p) { return bf16_to_f32(*p); }
DEVICE void store_f32(float* p, float v) { *p = v; }
DEVICE void store_f32(bf16* p, float v) { *p = f32_to_bf16(v); }
// The value as it would be after a store and a load in T: where the reference computes in the model dtype.
template <class T> struct rounded;
template <> struct rounded<float> {
  DEVICE float of(float v) { return v; }
};
template <> struct rounded<bf16> {
  DEVICE float of(float v) { return bf16_to_f32(f32_to_bf16(v)); }
};

// e4m3 (OCP, finite): 1 sign, 4 exponent (bias 7), 3 mantissa bits; 0x7f and 0xff are NaN; exact in f32.
DEVICE float e4m3_to_f32(uint8_t b) {
  uint32_t sign = (uint32_t)(b & 0x80u) << 24, e = (b >> 3) & 15u, m = b & 7u;
  if (e == 15u && m == 7u) return float_of(sign | 0x7fc00000u);
  if (e == 0u) return float_of(sign | bits_of((float)m * 0.001953125f));  // m * 2^-9
  return float_of(sign | ((e + 120u) << 23) | (m << 20));
}

// f16 (IEEE binary16 bits): 1 sign, 5 exponent (bias 15), 10 mantissa bits. Exact; a NaN keeps its payload.
DEVICE float f16_to_f32(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000u) << 16, e = (h >> 10) & 31u, m = h & 0x3ffu;
  if (e == 0u) return float_of(sign | bits_of((float)m * 5.9604644775390625e-8f));  // m * 2^-24
  return float_of(sign | ((e == 31u ? 255u : e + 112u) << 23) | (m << 13));
}
#if defined(GLM53_HOST)
DEVICE float f16_value(uint16_t h) { return f16_to_f32(h); }
#endif
// Round to nearest even, subnormals included; from 65,520 on infinity; NaN stays NaN (quiet).
DEVICE uint16_t f32_to_f16(float f) {
  uint32_t sign = (bits_of(f) >> 16) & 0x8000u, u = bits_of(f) & 0x7fffffffu;
  if (u > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((u >> 13) & 0x3ffu));
  if (u >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
  if (u < 0x38800000u) return (uint16_t)(sign | (uint32_t)rint_f32(float_of(u) * 16777216.0f));  // below 2^-14: multiples of 2^-24
  return (uint16_t)(sign | ((u - 0x38000000u + 0xfffu + ((u >> 13) & 1u)) >> 13));
}

DEVICE float rsqrt_exact(float x) { return 1.0f / sqrt_f32(x); }
DEVICE float sigmoid_f32(float x) { return 1.0f / (1.0f + exp_f32(-x)); }
DEVICE float silu_f32(float x) { return x / (1.0f + exp_f32(-x)); }

// sin and cos of an angle in [0, 2^21] to about 1e-7 absolute: three-part pi/2 (Cody and Waite) with fused multiply-add, then the
// Cephes minimax polynomials on [-pi/4, pi/4]. The hardware's own sine is not accurate at such angles, and its bits differ by vendor.
DEVICE void sincos_f32(float angle, float* sine, float* cosine) {
  float k = rint_f32(angle * 0.636619772367581343f);
  float r = fma_f32(-k, 1.57079637050628662109375f, angle);
  r = fma_f32(-k, -4.37113900018624283e-8f, r);
  r = fma_f32(-k, -1.71512449e-15f, r);
  float z = r * r;
  float s = fma_f32(fma_f32(fma_f32(-1.9515295891e-4f, z, 8.3321608736e-3f), z, -1.6666654611e-1f), z * r, r);
  float c = fma_f32(fma_f32(fma_f32(2.443315711809948e-5f, z, -1.388731625493765e-3f), z, 4.166664568298827e-2f), z * z, fma_f32(-0.5f, z, 1.0f));
  int32_t q = (int32_t)k & 3;
  float a = (q & 1) ? c : s, b = (q & 1) ? s : c;
  *sine = (q & 2) ? -a : a;
  *cosine = (q == 1 || q == 2) ? -b : b;
}

// Waits until *flag >= sequence, at most `budget` polls. True if it came. The work waited for must have been submitted already, on another
// device or by the host; never for a workgroup of the same grid.
DEVICE bool spin_until(const uint64_t* flag, uint64_t sequence, uint64_t budget) {
  for (uint64_t i = 0; i < budget; i++) {
    if (load_system(flag) >= sequence) return true;
    give_way();
  }
  return false;
}

// Sums of N values at once over aligned groups of LANES lanes (a power of two, 2 to 32), the same in every lane of a group. Order: a butterfly by
// LANES / 2, .., 2, 1. The host has its own, with one meeting point for all N.
#if !defined(GLM53_HOST)
template <uint32_t LANES, int N> DEVICE void lanes_sum(float (&v)[N]) {
  UNROLL
  for (uint32_t m = LANES / 2; m; m >>= 1) {
    UNROLL
    for (int i = 0; i < N; i++) v[i] += shuffle_xor(v[i], m);
  }
}
#endif

#if !defined(GLM53_HOST)
// Exclusive prefix sum of integers over 32 aligned lanes; *total gets their sum.
template <class T> DEVICE T wave32_prefix(T v, T* total) {
  uint32_t lane = lane_id() & 31u, first = lane_id() & ~31u;
  T sum = v;
  UNROLL
  for (uint32_t d = 1; d < 32; d <<= 1) {
    T below = shuffle_from(sum, first | ((lane - d) & 31u));
    sum += lane >= d ? below : (T)0;
  }
  *total = shuffle_from(sum, first | 31u);
  return sum - v;
}
#endif

template <class T> DEVICE T wave_sum(T v) {
  UNROLL
  for (uint32_t m = WAVE / 2; m; m >>= 1) v += shuffle_xor(v, m);
  return v;
}
DEVICE float wave_max(float v) {
  UNROLL
  for (uint32_t m = WAVE / 2; m; m >>= 1) v = max_f32(v, shuffle_xor(v, m));
  return v;
}
// Sum over a block of THREADS work-items, the same value in each; `lds` holds THREADS / WAVE values. Order: within the wave by
// halving distance, then waves ascending.
template <int THREADS, class T> DEVICE T block_sum(T v, T* lds) {
  v = wave_sum(v);
  if (lane_id() == 0) lds[thread_id() / WAVE] = v;
  block_sync();
  T total = lds[0];
  for (int w = 1; w < THREADS / WAVE; w++) total += lds[w];
  block_sync();
  return total;
}
template <int THREADS> DEVICE float block_max(float v, float* lds) {
  v = wave_max(v);
  if (lane_id() == 0) lds[thread_id() / WAVE] = v;
  block_sync();
  float top = lds[0];
  for (int w = 1; w < THREADS / WAVE; w++) top = max_f32(top, lds[w]);
  block_sync();
  return top;
}

// Dot product of n values with eight interleaved partial sums (element i goes to partial i % 8), added pairwise at the end: one fixed
// order that compilers can vectorise on the host.
template <class X, class W> DEVICE float dot8(const X* x, const W* w, uint32_t n) {
  float p[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  uint32_t i = 0;
  for (; i + 8 <= n; i += 8) {
    UNROLL
    for (int j = 0; j < 8; j++) p[j] = fma_f32(load_f32(x + i + j), load_f32(w + i + j), p[j]);
  }
  UNROLL
  for (int j = 0; j < 7; j++) {  // constant indices keep p in registers
    if (i + j < n) p[j] = fma_f32(load_f32(x + i + j), load_f32(w + i + j), p[j]);
  }
  return ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]));
}
