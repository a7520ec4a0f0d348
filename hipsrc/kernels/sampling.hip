// sampling.hip - one token a row from its logits, and the log-probabilities that go with it.
// Order of the filters: repetition penalty (seen tokens: l > 0 ? l / p : l * p), temperature, top-k (exactly k), top-p (the fewest of the
// most probable that hold top_p of the mass top-k left), min-p (drop what is below min_p times the most probable), then the inverse of the
// distribution in token order at a Philox 4x32-10 draw with key = seed, counter = position. Ties everywhere to the lowest token.
//
// Probabilities are integers: mass = floor(2^32 * exp((l - l_max) / temperature)), with an exponential made of explicit fused operations.
// Sums of integers have no order, so thresholds and draws are exact: the same logits and parameters give the same token on every target
// and whatever else runs, and the numpy reference agrees token for token. Tokens below 2^-32 of the most probable are never drawn.
// top-k and top-p keep a prefix of one total order (larger logit first, then lower id), so a row's filter is one boundary (key, id), found by
// radix selection on counts or masses.
//
// NaN counts as -inf. If every logit is -inf, the token is -1. +inf wins, evenly among equals. One block a row; vocab <= 524,288.
#include "portable.h"
#include "scan.h"

namespace sampling {

constexpr uint32_t THREADS = SCAN_THREADS;
constexpr uint32_t ITEMS = 8;                // consecutive tokens a work-item where token order matters
constexpr uint32_t TILE = THREADS * ITEMS;   // THREADS tiles at most: vocab <= 524,288
constexpr uint32_t LOGPROBS_MAX = 32;
constexpr uint32_t NO_ID_LIMIT = ~0u;

enum weight_kind { COUNT, MASS, TIE };

struct workspace {
  uint64_t histogram[THREADS];
  uint64_t scan[THREADS + SCAN_GROUP];
  selection<uint64_t> found;
  uint64_t entries[LOGPROBS_MAX];
  uint32_t cursor;
};

// A row of logits as one stage of the filters sees it; the same in every work-item.
struct row_view {
  const float* logits;
  const uint8_t* seen;  // null: no penalty
  float penalty;
  float temperature;
  float top;         // largest adjusted logit
  uint32_t vocab;
  uint32_t cut_key;  // kept: key > cut_key, or key == cut_key and id <= cut_id
  uint32_t cut_id;
  uint64_t mass_min;
  uint64_t tie_weight;  // what one token on the boundary weighs
};

DEVICE uint32_t key_at(const row_view& v, uint32_t id) {
  float l = v.logits[id];
  if (v.seen && v.seen[id]) l = l > 0.0f ? l / v.penalty : l * v.penalty;
  return order_key(l);
}

// floor(2^32 * exp(d)) for d <= 0, to about 2e-7 relative, the same bits on every target. Cephes' expf with fused steps.
DEVICE uint64_t exp_mass(float d) {
  if (!(d > -22.25f)) return 0;  // 2^32 * exp(-22.25) < 1; also -inf and NaN
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

// Through the key, so that no compiler fuses the penalty's product into the difference.
DEVICE uint64_t mass_of(const row_view& v, uint32_t key) {
  float l = order_value(key);
  return exp_mass(l == v.top ? 0.0f : (l - v.top) / v.temperature);
}

template <int KIND> DEVICE uint64_t weigh(const row_view& v, uint32_t key, uint32_t id) {
  if (KIND == TIE) return key == v.cut_key ? v.tie_weight : 0u;
  if (key < v.cut_key || (key == v.cut_key && id > v.cut_id)) return 0;
  if (KIND == COUNT) return 1;
  uint64_t mass = mass_of(v, key);
  return mass >= v.mass_min ? mass : 0;
}

// Upper 64 bits of the 128-bit product.
DEVICE uint64_t high_product(uint64_t a, uint64_t b) {
  uint64_t a0 = (uint32_t)a, a1 = a >> 32, b0 = (uint32_t)b, b1 = b >> 32;
  uint64_t mid = a1 * b0 + (a0 * b0 >> 32), cross = a0 * b1 + (uint32_t)mid;
  return a1 * b1 + (mid >> 32) + (cross >> 32);
}

// The first token in token order at which the running weight exceeds the target: `point` itself, or for MASS the fraction
// point / 2^64 of the whole weight. The whole weight must exceed the target.
template <int KIND> DEVICE uint32_t locate(const row_view& v, uint64_t point, workspace* w) {
  uint32_t t = thread_id();
  w->histogram[t] = 0;
  block_sync();
  for (uint32_t tile = 0; tile * TILE < v.vocab; tile++) {
    uint64_t weight = 0;
    uint32_t first = tile * TILE + t * ITEMS;
    for (uint32_t i = first; i < first + ITEMS && i < v.vocab; i++) weight += weigh<KIND>(v, key_at(v, i), i);
    if (weight) lds_add(&w->histogram[tile], weight);
  }
  block_sync();
  uint64_t total, mine = w->histogram[t];
  uint64_t before = block_prefix(mine, w->scan, &total);
  uint64_t target = point;
  if (KIND == MASS) target = high_product(point, total);
  if (before <= target && target - before < mine) w->found = {t, target - before};
  block_sync();
  uint32_t first = w->found.prefix * TILE + t * ITEMS;
  target = w->found.wanted;
  mine = 0;
  for (uint32_t i = first; i < first + ITEMS && i < v.vocab; i++) mine += weigh<KIND>(v, key_at(v, i), i);
  before = block_prefix(mine, w->scan, &total);
  if (before <= target && target - before < mine) {
    uint32_t i = first;
    for (uint64_t passed = before;; i++) {
      passed += weigh<KIND>(v, key_at(v, i), i);
      if (passed > target) break;
    }
    w->found = {i, 0};
  }
  block_sync();
  uint32_t id = w->found.prefix;
  block_sync();
  return id;
}

// The least whole mass that is at least `share` of total, and at least 1.
DEVICE uint64_t share_of(float share, uint64_t total) {
  double exact = (double)share * (double)total;
  uint64_t whole = exact > 0.0 ? (uint64_t)exact : 0u;
  if ((double)whole < exact) whole++;
  return whole < 1u ? 1u : (whole > total ? total : whole);
}

// Moves the boundary of `v` up to the shortest prefix of its order that holds `count` tokens (COUNT) or `share` of the mass (MASS).
template <int KIND> DEVICE void cut(row_view* v, uint32_t count, float share, workspace* w) {
  uint32_t t = thread_id();
  selection<uint64_t> s = {0u, count};
  for (int32_t shift = 24; shift >= 0; shift -= 8) {
    w->histogram[t] = 0;
    block_sync();
    for (uint32_t id = t; id < v->vocab; id += THREADS) {
      uint32_t key = key_at(*v, id);
      if (!shares_prefix(key, s.prefix, (uint32_t)shift)) continue;
      uint64_t weight = weigh<KIND>(*v, key, id);
      if (weight) lds_add(&w->histogram[(key >> shift) & 255u], weight);
    }
    block_sync();
    if (KIND == MASS && shift == 24) {
      uint64_t total;
      block_prefix(w->histogram[t], w->scan, &total);
      s.wanted = share_of(share, total);
    }
    select_digit(&s, (uint32_t)shift, w->histogram, w->scan, &w->found);
  }
  uint64_t tied = w->histogram[s.prefix & 255u];
  block_sync();
  v->tie_weight = KIND == MASS ? mass_of(*v, s.prefix) : 1u;
  bool all = s.wanted + v->tie_weight > tied;  // the last of the ties is wanted too
  if (s.prefix != v->cut_key) v->cut_id = NO_ID_LIMIT;
  v->cut_key = s.prefix;
  if (!all) v->cut_id = locate<TIE>(*v, s.wanted - 1u, w);
}

// Largest key and the lowest token that has it.
DEVICE selection<uint32_t> best(const row_view& v, workspace* w) {
  uint32_t t = thread_id();
  uint64_t top = 0;
  for (uint32_t id = t; id < v.vocab; id += THREADS) {
    uint64_t entry = ((uint64_t)key_at(v, id) << 32) | (uint32_t)~id;
    top = entry > top ? entry : top;
  }
  w->scan[t] = top;
  block_sync();
  if (t < SCAN_GROUP) {
    for (uint32_t i = 0; i < SCAN_GROUP; i++) top = w->scan[t * SCAN_GROUP + i] > top ? w->scan[t * SCAN_GROUP + i] : top;
    w->scan[THREADS + t] = top;
  }
  block_sync();
  top = 0;
  for (uint32_t i = 0; i < SCAN_GROUP; i++) top = w->scan[THREADS + i] > top ? w->scan[THREADS + i] : top;
  block_sync();
  return {(uint32_t)(top >> 32), ~(uint32_t)top};  // key, id
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

DEVICE uint32_t draw(row_view* v, const sample_row& p, workspace* w) {
  v->temperature = p.temperature;
  if (p.top_k > 0u && p.top_k < v->vocab) cut<COUNT>(v, p.top_k, 1.0f, w);
  if (p.top_p < 1.0f) cut<MASS>(v, 0u, p.top_p, w);
  v->mass_min = p.min_p > 0.0f ? share_of(p.min_p, (uint64_t)1 << 32) : 0u;
  return locate<MASS>(*v, philox(p.seed, p.position), w);
}

// log(sum exp(l - top)) of the raw logits; the row's log-sum-exp is top plus this.
DEVICE float log_total(const row_view& v, workspace* w) {
  float* lds = (float*)w->scan;
  uint32_t t = thread_id();
  float sum = 0.0f;
  for (uint32_t id = t; id < v.vocab; id += THREADS) {
    float l = order_value(key_at(v, id));
    sum += l == v.top ? 1.0f : exp_f32(l - v.top);
  }
  float total;
  block_prefix(sum, lds, &total);
  return log_f32(total);
}

DEVICE float logprob_of(const row_view& v, uint32_t key, float total) {
  float l = order_value(key);
  return (l == v.top ? 0.0f : l - v.top) - total;
}

// The n tokens of the largest raw logits, descending, ties to the lowest token; entries past n are -1 and -inf.
DEVICE void top_logprobs(const sample_args& a, row_view v, uint32_t row, uint32_t wanted, float total, workspace* w) {
  uint32_t t = thread_id(), n = wanted < a.max_logprobs ? wanted : a.max_logprobs;
  n = n < v.vocab ? n : v.vocab;
  int32_t* ids = (int32_t*)a.top_ids + (uint64_t)row * a.max_logprobs;
  float* values = (float*)a.top_logprobs + (uint64_t)row * a.max_logprobs;
  if (t >= n && t < a.max_logprobs) {
    ids[t] = -1;
    values[t] = float_of(0xff800000u);
  }
  if (n == 0u) return;
  if (n < v.vocab) cut<COUNT>(&v, n, 1.0f, w);
  if (t == 0) w->cursor = 0;
  block_sync();
  for (uint32_t id = t; id < v.vocab; id += THREADS) {
    uint32_t key = key_at(v, id);
    if (weigh<COUNT>(v, key, id)) w->entries[lds_add(&w->cursor, 1u)] = ((uint64_t)key << 32) | (uint32_t)~id;
  }
  block_sync();
  if (t >= n) return;
  uint32_t place = 0;
  for (uint32_t i = 0; i < n; i++) place += w->entries[i] > w->entries[t] ? 1u : 0u;
  ids[place] = (int32_t)~(uint32_t)w->entries[t];
  values[place] = logprob_of(v, (uint32_t)(w->entries[t] >> 32), total);
}

}  // namespace sampling

// LAUNCH sample block=256 vocab_max=524288 logprobs_max=32
KERNEL(sample, sample_args, 256) {
  SHARED(sampling::workspace, w, 1);
  uint32_t row = block_x();
  sample_row p = ((const sample_row*)a.params)[row];
  sampling::row_view raw = {(const float*)a.logits + (uint64_t)row * a.vocab, nullptr, 1.0f, 1.0f, 0.0f, a.vocab, 0u, sampling::NO_ID_LIMIT, 0u, 0u};
  selection<uint32_t> best = sampling::best(raw, w);
  raw.top = order_value(best.prefix);
  sampling::row_view view = raw;
  if (a.seen && p.seen_row >= 0 && p.repetition_penalty != 1.0f) {
    view.seen = (const uint8_t*)a.seen + (uint64_t)p.seen_row * a.vocab;
    view.penalty = p.repetition_penalty;
    best = sampling::best(view, w);
    view.top = order_value(best.prefix);
  }
  uint32_t token = best.wanted;
  bool nothing = best.prefix == ORDER_KEY_NEGATIVE_INFINITY;
  if (!nothing && p.temperature != 0.0f && p.top_k != 1u) token = sampling::draw(&view, p, w);
  float total = 0.0f;
  if (a.logprobs || (a.top_ids && p.n_logprobs)) total = sampling::log_total(raw, w);
  if (thread_id() == 0) {
    ((int32_t*)a.tokens)[row] = nothing ? -1 : (int32_t)token;
    if (a.logprobs) {
      ((float*)a.logprobs)[row] = nothing ? float_of(0xff800000u) : sampling::logprob_of(raw, sampling::key_at(raw, token), total);
    }
  }
  if (a.top_ids) sampling::top_logprobs(a, raw, row, nothing ? 0u : p.n_logprobs, total, w);
}

// LAUNCH mark_seen block=256
KERNEL(mark_seen, mark_seen_args, 256) {
  uint32_t i = block_x() * 256u + thread_id();
  if (i >= a.count) return;
  int32_t row = ((const int32_t*)a.seen_rows)[i], token = ((const int32_t*)a.tokens)[i];
  if (row >= 0 && token >= 0 && (uint32_t)token < a.vocab) ((uint8_t*)a.seen)[(uint64_t)row * a.vocab + (uint32_t)token] = 1;
}
