// sampling.h - what the launches of a draw share: a row of logits, its total order, integer masses, and radix selection in that order.
#pragma once
#include "portable.h"
#include "scan.h"

namespace sampling {

constexpr uint32_t THREADS = 256;
constexpr uint32_t GROUP_LANES = 32;
constexpr uint32_t WAVES = THREADS / GROUP_LANES;
constexpr uint32_t QUAD = 4;                       // consecutive tokens of one load
constexpr uint32_t LOADS = 2;                      // a work-item
constexpr uint32_t SPAN = THREADS * QUAD;          // tokens of one load of the block
constexpr uint32_t CHUNK = SPAN * LOADS;           // tokens a block; THREADS chunks at most
constexpr uint32_t GROUP = GROUP_LANES * QUAD;     // tokens whose largest is kept, for the most probable ones
constexpr uint32_t GROUPS = CHUNK / GROUP;
constexpr uint32_t LOGPROBS_MAX = 32;
constexpr uint32_t DIGITS = THREADS;               // a digit a work-item
constexpr uint32_t DIGIT_BITS = 8;
constexpr uint32_t HELD = 2048;                    // candidates that lie in LDS
constexpr float LIVE = -22.25f;                    // 2^32 * exp(LIVE) < 1
constexpr float BIN_SCALE = 46.0f;
constexpr uint32_t BINS = 1024, BINS_EACH = BINS / THREADS;
static_assert(22.25f * BIN_SCALE < (float)BINS, "every live token has a bin");
constexpr uint32_t CHUNKS_MAX = 16;                // a block of sample_bins
static_assert((uint64_t)CHUNK * CHUNKS_MAX * 65536u < (uint64_t)1 << 32, "sums of upper halves of masses fit 32 bits");

enum weight_kind { COUNT, MASS };

// A row of logits as one stage of the filters sees it; the same in every work-item.
struct row_view {
  const float* logits;
  const uint8_t* seen;   // null: no penalty
  const uint32_t* mask;  // null: every token may be drawn
  float penalty;
  float temperature;
  float top;  // largest adjusted logit
  uint32_t vocab;
};

DEVICE bool draws(const sample_row& p) { return p.temperature != 0.0f && p.top_k != 1u; }
DEVICE bool counts(const sample_row& p, uint32_t vocab) { return p.top_k > 0u && p.top_k < vocab; }
DEVICE bool cuts(const sample_row& p, uint32_t vocab) { return counts(p, vocab) || p.top_p < 1.0f; }

DEVICE row_view open_row(const sample_args& a, const sample_row& p, uint32_t row) {
  row_view v = {(const float*)a.logits + (uint64_t)row * a.vocab, nullptr, nullptr, p.repetition_penalty, p.temperature, 0.0f, a.vocab};
  if (a.seen && p.seen_row >= 0 && p.repetition_penalty != 1.0f) v.seen = (const uint8_t*)a.seen + (uint64_t)p.seen_row * a.vocab;
  if (a.masks && p.mask_row >= 0) v.mask = (const uint32_t*)a.masks + (uint64_t)p.mask_row * ((a.vocab + 31u) / 32u);
  return v;
}

// Keys of tokens id to id + 3 of the raw logits; 0, below every key, past the end.
DEVICE void load_keys(const row_view& v, uint32_t id, uint32_t* key) {
  if (((uint64_t)v.logits & 15u) == 0 && id + QUAD <= v.vocab) {
    words16 four = *(const words16*)(v.logits + id);
    UNROLL
    for (uint32_t i = 0; i < QUAD; i++) key[i] = order_key(float_of(four.w[i]));
  } else {
    UNROLL
    for (uint32_t i = 0; i < QUAD; i++) key[i] = id + i < v.vocab ? order_key(v.logits[id + i]) : 0u;
  }
}
DEVICE bool adjusts(const row_view& v) { return v.seen || v.mask; }
DEVICE void penalise(const row_view& v, uint32_t id, uint32_t* key) {
  uint32_t marks = 0;  // a byte a token
  if (((uint64_t)v.seen & 3u) == 0 && id + QUAD <= v.vocab) {
    marks = *(const uint32_t*)(v.seen + id);
  } else {
    UNROLL
    for (uint32_t i = 0; i < QUAD; i++) marks |= id + i < v.vocab ? (uint32_t)v.seen[id + i] << (8 * i) : 0u;
  }
  if (marks == 0) return;
  UNROLL
  for (uint32_t i = 0; i < QUAD; i++) {
    if (!(marks >> (8 * i) & 0xffu)) continue;
    float l = order_value(key[i]);
    key[i] = order_key(l > 0.0f ? l / v.penalty : l * v.penalty);
  }
}

// Keys of tokens id to id + 3, id a multiple of 4, after mask and penalty; past the end one of no token or of -inf, neither of which is drawn.
DEVICE void adjust(const row_view& v, uint32_t id, uint32_t* key) {
  if (v.seen) penalise(v, id, key);
  uint32_t allowed = ~0u;
  if (v.mask) allowed = v.mask[(id < v.vocab ? id : 0u) / 32u] >> (id % 32u);
  UNROLL
  for (uint32_t i = 0; i < QUAD; i++) {
    uint32_t all = (uint32_t)((int32_t)(allowed << (31u - i)) >> 31);  // bits, not conditions: those would take scalar registers
    key[i] = (key[i] & all) | (ORDER_KEY_NEGATIVE_INFINITY & ~all);
  }
}

// A token in the total order, the first one largest; 0 is no token.
DEVICE uint64_t entry_of(uint32_t key, uint32_t id) { return key ? (uint64_t)key << 32 | (uint32_t)~id : 0u; }
DEVICE uint32_t key_of(uint64_t entry) { return (uint32_t)(entry >> 32); }
DEVICE uint32_t id_of(uint64_t entry) { return ~(uint32_t)entry; }
// The largest of tokens id to id + 3.
DEVICE uint64_t largest_of(const uint32_t* key, uint32_t id) {
  uint32_t top = key[0], at = id;
  UNROLL
  for (uint32_t i = 1; i < QUAD; i++) {
    at = key[i] > top ? id + i : at;
    top = key[i] > top ? key[i] : top;
  }
  return entry_of(top, at);
}

// floor(2^32 * exp(d)) for d <= 0, to about 2e-7 relative, the same bits on every target. Cephes' expf with fused steps.
DEVICE uint64_t exp_mass(float d) {
  if (!(d > LIVE)) return 0;  // also -inf and NaN
  float k = rint_f32(d * 1.44269504088896341f);
  float r = fma_f32(k, 2.12194440e-4f, fma_f32(k, -0.693359375f, d));
  float p = fma_f32(1.9875691500e-4f, r, 1.3981999507e-3f);
  p = fma_f32(p, r, 8.3334519073e-3f);
  p = fma_f32(p, r, 4.1665795894e-2f);
  p = fma_f32(p, r, 1.6666665459e-1f);
  p = fma_f32(p, r, 5.0000001201e-1f);
  p = fma_f32(p, r * r, r) + 1.0f;
  return (uint64_t)(p * float_of((uint32_t)((int32_t)k + 32 + 127) << 23));
}

// (l - l_max) / temperature; NaN for key 0. Through the key, so that no compiler fuses the penalty's product into the difference.
DEVICE float distance(const row_view& v, uint32_t key) {
  float l = order_value(key), d = l == v.top ? 0.0f : l - v.top;
  return v.temperature == 1.0f ? d : d / v.temperature;
}
DEVICE uint64_t mass_of(const row_view& v, uint64_t entry) { return exp_mass(distance(v, key_of(entry))); }
// Never descends along the order. d > LIVE.
DEVICE uint32_t bin_of(float d) { return (uint32_t)(d * -BIN_SCALE); }

// Upper 64 bits of the 128-bit product.
DEVICE uint64_t high_product(uint64_t a, uint64_t b) {
  uint64_t a0 = (uint32_t)a, a1 = a >> 32, b0 = (uint32_t)b, b1 = b >> 32;
  uint64_t mid = a1 * b0 + (a0 * b0 >> 32), cross = a0 * b1 + (uint32_t)mid;
  return a1 * b1 + (mid >> 32) + (cross >> 32);
}

// The least whole mass that is at least `share` of total, and at least 1.
DEVICE uint64_t share_of(float share, uint64_t total) {
  double exact = (double)share * (double)total;
  uint64_t whole = exact > 0.0 ? (uint64_t)exact : 0u;
  if ((double)whole < exact) whole++;
  return whole < 1u ? 1u : (whole > total ? total : whole);
}

// 64 random bits: the first two words of Philox 4x32-10 (Salmon et al., SC 2011) with counter (position, 0, 0, 0).
DEVICE uint64_t philox(uint64_t seed, uint32_t position) {
  uint32_t c0 = position, c1 = 0, c2 = 0, c3 = 0, k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  UNROLL
  for (uint32_t round = 0; round < 10; round++) {
    uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
    c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
    c1 = (uint32_t)b;
    c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
    c3 = (uint32_t)a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return ((uint64_t)c1 << 32) | c0;
}

DEVICE uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

// The largest of one value a work-item, the same in each.
DEVICE uint64_t block_largest(uint64_t v) {
  SHARED(uint64_t, waves, WAVES);
  v = wave32_max(v);
  if (thread_id() % GROUP_LANES == 0) waves[thread_id() / GROUP_LANES] = v;
  block_sync();
  UNROLL
  for (uint32_t i = 0; i < WAVES; i++) v = larger(v, waves[i]);
  block_sync();
  return v;
}

// Sum of one f32 a work-item, the same in each: a butterfly over 32 lanes, then waves ascending.
DEVICE float ordered_sum(float v) {
  SHARED(float, waves, WAVES);
  float one[1] = {v};
  lanes_sum<32>(one);
  if (thread_id() % GROUP_LANES == 0) waves[thread_id() / GROUP_LANES] = one[0];
  block_sync();
  float sum = waves[0];
  UNROLL
  for (uint32_t i = 1; i < WAVES; i++) sum += waves[i];
  block_sync();
  return sum;
}

// Entries of which the first held_count lie in LDS too.
struct entry_list {
  const uint64_t* held;
  const uint64_t* all;
  uint32_t count, held_count;
};
template <class F> DEVICE void visit(const entry_list& list, const F& see) {
  for (uint32_t i = thread_id(); i < list.count; i += THREADS) see(i < list.held_count ? list.held[i] : list.all[i]);
}

struct digit_found {
  uint64_t left;
  uint32_t digit, last;
};

// A bound such that the entries of the list from it on are the shortest prefix of those from `lowest` on that holds `wanted` tokens (COUNT) or mass
// (MASS). wanted is at least 1 and at most what they hold.
template <int KIND> DEVICE uint64_t select(const row_view& v, const entry_list& list, uint64_t lowest, uint64_t wanted) {
  SHARED(uint64_t, weights, DIGITS);
  SHARED(uint32_t, tokens, DIGITS);
  SHARED(uint64_t, lds, BLOCK_SCAN);
  SHARED(digit_found, found, 1);
  uint32_t t = thread_id(), shift = 64;
  uint64_t first = 0, last = ~(uint64_t)0, total;
  visit(list, [&](uint64_t entry) {
    if (entry < lowest) return;
    first = larger(first, entry);
    last = entry < last ? entry : last;
  });
  first = block_largest(first);
  last = ~block_largest(~last);
  while (shift > DIGIT_BITS && (first ^ last) >> (shift - 4u) == 0) shift -= 4u;  // what all have in common
  uint64_t prefix = shift < 64u ? first >> shift : 0u;
  for (;;) {
    uint32_t next = shift > DIGIT_BITS ? shift - DIGIT_BITS : 0u, run_digit = 0, run_tokens = 0;
    uint64_t run_weight = 0;
    weights[t] = 0;
    tokens[t] = 0;
    block_sync();
    auto add = [&] {
      if (!run_tokens) return;
      lds_add(&tokens[run_digit], run_tokens);
      if (KIND == MASS) lds_add(&weights[run_digit], run_weight);
    };
    visit(list, [&](uint64_t entry) {  // equal digits in a row are added at once: all at one address would be slow
      if (entry < lowest || (shift < 64u && entry >> shift != prefix)) return;
      uint32_t digit = (uint32_t)(entry >> next) & (DIGITS - 1u);
      if (digit != run_digit) {
        add();
        run_tokens = 0;
        run_weight = 0;
      }
      run_digit = digit;
      run_tokens++;
      if (KIND == MASS) run_weight += mass_of(v, entry);
    });
    add();
    block_sync();
    uint32_t digit = DIGITS - 1u - t, count = tokens[digit];
    uint64_t weight = KIND == MASS ? weights[digit] : count, before = block_scan<THREADS>(weight, lds, &total);
    if (before < wanted && wanted <= before + weight) found[0] = {wanted - before, digit, KIND == MASS ? count == 1u : wanted - before == weight};
    block_sync();
    prefix = prefix << (shift - next) | found[0].digit;
    wanted = found[0].left;
    shift = next;
    if (found[0].last || shift == 0) return larger(prefix << shift, lowest);
  }
}

}  // namespace sampling
