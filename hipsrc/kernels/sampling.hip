// sampling.hip - one token a row from its logits, and the log-probabilities that go with it.
//   sample_best   largest raw and adjusted logit, log-sum-exp, the most probable tokens; greedy rows end here
//   sample_bins   rows with top-k or top-p: count and mass of the live tokens by distance from the largest; which bins hold the boundaries
//   sample_draw   mass of each chunk of tokens and the tokens of those bins; then the boundary itself, and the draw
// A block has chunks of CHUNK tokens of one row, and the last of a row's blocks to arrive finishes the row; it has nothing to wait for. What is
// summed in floating point is summed by chunk, so nothing depends on the grid.
// Order of the filters: mask (what it leaves out counts as -inf), repetition penalty (seen tokens: l > 0 ? l / p : l * p), temperature, top-k (exactly k), top-p (the fewest of the
// most probable that hold top_p of the mass top-k left), min-p (drop what is below min_p times the most probable), then the inverse of the
// distribution in token order at a Philox 4x32-10 draw with key = seed, counter = position. Ties everywhere to the lowest token.
//
// Probabilities are integers: mass = floor(2^32 * exp((l - l_max) / temperature)), with an exponential made of explicit fused operations.
// Sums of integers have no order, so thresholds and draws are exact: the same logits and parameters give the same token on every target
// and whatever else runs, and the numpy reference agrees token for token. Tokens below 2^-32 of the most probable are never drawn.
// top-k and top-p keep a prefix of one total order (larger logit first, then lower id), so a row's filter is one boundary in it. Bins only bring the
// boundary near: those before `sure` are kept, those after `last` dropped, and the tokens between are ranked by radix selection on counts or masses.
//
// NaN counts as -inf. If every logit that may be drawn is -inf, the token is -1. +inf wins, evenly among equals. vocab <= 524,288.
#include "portable.h"
#include "scan.h"
#include "sampling.h"

namespace sampling {

DEVICE float logprob_of(const sample_state& s, uint32_t raw_key) {
  float l = order_value(raw_key), top = order_value(s.raw_key);
  return (l == top ? 0.0f : l - top) - s.log_total;
}

// By one work-item.
DEVICE void put_token(const sample_args& a, const sample_row& p, const sample_state& s, uint32_t row, int32_t token) {
  ((int32_t*)a.tokens)[row] = token;
  if (a.logprobs) {
    float raw = ((const float*)a.logits)[(uint64_t)row * a.vocab + (uint32_t)(token < 0 ? 0 : token)];
    ((float*)a.logprobs)[row] = token < 0 ? float_of(0xff800000u) : logprob_of(s, order_key(raw));
  }
  if (a.marks && a.seen && p.seen_row >= 0 && token >= 0) ((uint8_t*)a.seen)[(uint64_t)p.seen_row * a.vocab + (uint32_t)token] = 1;
}

// The n tokens of the largest raw logits, descending; entries past n are -1 and -inf. n of the groups hold them all.
DEVICE void put_tops(const sample_args& a, const row_view& raw, const sample_state& s, uint32_t row, uint32_t wanted) {
  SHARED(uint32_t, taken, 2);
  SHARED(uint32_t, chosen, LOGPROBS_MAX);
  SHARED(uint64_t, tops, LOGPROBS_MAX);
  uint32_t t = thread_id(), n = wanted < a.max_logprobs ? wanted : a.max_logprobs;
  n = n < a.vocab ? n : a.vocab;
  int32_t* ids = (int32_t*)a.top_ids + (uint64_t)row * a.max_logprobs;
  float* values = (float*)a.top_logprobs + (uint64_t)row * a.max_logprobs;
  if (t >= n && t < a.max_logprobs) {
    ids[t] = -1;
    values[t] = float_of(0xff800000u);
  }
  if (n == 0u) return;
  const uint64_t* groups = (const uint64_t*)a.groups + (uint64_t)row * a.chunks * GROUPS;
  uint64_t* entries = (uint64_t*)a.entries + (uint64_t)row * a.vocab;
  uint32_t group_count = (a.vocab + GROUP - 1u) / GROUP;
  uint64_t lowest = 1;
  if (t < 2u) taken[t] = 0;
  if (n < group_count) lowest = select<COUNT>(raw, {nullptr, groups, group_count, 0u}, 1u, n);
  block_sync();
  for (uint32_t i = t; i < group_count; i += THREADS) {
    if (groups[i] >= lowest) chosen[lds_add(&taken[0], 1u)] = i;
  }
  block_sync();
  for (uint32_t i = t / GROUP_LANES; i < taken[0]; i += WAVES) {
    uint32_t id = chosen[i] * GROUP + t % GROUP_LANES * QUAD, keys[QUAD];
    load_keys(raw, id, keys);
    UNROLL
    for (uint32_t j = 0; j < QUAD; j++) {
      uint64_t entry = entry_of(keys[j], id + j);
      if (entry >= lowest) entries[lds_add(&taken[1], 1u)] = entry;
    }
  }
  block_sync();
  entry_list list = {nullptr, entries, taken[1], 0u};
  block_sync();
  if (n < list.count) lowest = select<COUNT>(raw, list, 1u, n);
  if (t == 0) taken[0] = 0;
  block_sync();
  visit(list, [&](uint64_t entry) {
    if (entry >= lowest) tops[lds_add(&taken[0], 1u)] = entry;
  });
  block_sync();
  if (t >= n) return;
  uint32_t place = 0;
  for (uint32_t i = 0; i < n; i++) place += tops[i] > tops[t] ? 1u : 0u;
  ids[place] = (int32_t)id_of(tops[t]);
  values[place] = logprob_of(s, key_of(tops[t]));
}

// Joins the chunks of a row: what later launches read of it, and all results of a greedy row. Like the other finishing steps it reads the settings of
// the row again, so that they need not stay in registers.
DEVICE void finish_best(const sample_args& a, uint32_t row) {
  uint32_t t = thread_id();
  sample_row p = ((const sample_row*)a.params)[row];
  row_view v = open_row(a, p, row);
  sample_chunk mine = {};
  if (t < a.chunks) mine = ((const sample_chunk*)a.records)[(uint64_t)row * a.chunks + t];
  uint64_t raw = block_largest(mine.raw), best = adjusts(v) ? block_largest(mine.best) : raw;
  float l = order_value(key_of(mine.raw)), top = order_value(key_of(raw));
  float total = ordered_sum(t < a.chunks ? mine.sum * (l == top ? 1.0f : exp_f32(l - top)) : 0.0f);
  sample_state s = {};
  s.raw_key = key_of(raw);
  s.key = key_of(best);
  s.log_total = log_f32(total);
  bool nothing = s.key == ORDER_KEY_NEGATIVE_INFINITY;
  if (t == 0) {
    ((sample_state*)a.states)[row] = s;
    if (nothing) put_token(a, p, s, row, -1);
    else if (!draws(p)) put_token(a, p, s, row, (int32_t)id_of(best));
  }
  v.seen = nullptr;
  v.mask = nullptr;
  if (a.top_ids) put_tops(a, v, s, row, nothing ? 0u : p.n_logprobs);
}

struct bin_found {
  uint64_t mass;  // of the bins before
  uint32_t bin, count;
};

// Which bins hold the boundaries. With top-k the mass that top-p shares out is known only once the k-th token is: at least that of the bins before
// it.
DEVICE void find_bins(const sample_args& a, uint32_t row) {
  sample_row p = ((const sample_row*)a.params)[row];
  SHARED(uint64_t, lds64, BLOCK_SCAN);
  SHARED(uint32_t, lds32, BLOCK_SCAN);
  SHARED(bin_found, found, 1);
  uint32_t t = thread_id(), count[BINS_EACH], count_sum = 0, live, sure = BINS, last = BINS;
  uint64_t mass[BINS_EACH], mass_sum = 0, total;
  uint64_t at = (uint64_t)row * BINS + t * BINS_EACH;
  UNROLL
  for (uint32_t i = 0; i < BINS_EACH; i++) {
    mass[i] = ((const uint64_t*)a.masses)[at + i];
    count[i] = ((const uint32_t*)a.counts)[at + i];
    mass_sum += mass[i];
    count_sum += count[i];
  }
  uint64_t mass_before = block_scan<THREADS>(mass_sum, lds64, &total);
  uint32_t count_before = block_scan<THREADS>(count_sum, lds32, &live);
  auto find = [&](const auto& holds) {
    uint64_t mass_to = mass_before;
    uint32_t count_to = count_before;
    UNROLL
    for (uint32_t i = 0; i < BINS_EACH; i++) {
      if (holds(count_to, count[i], mass_to, mass[i])) found[0] = {mass_to, t * BINS_EACH + i, count_to};
      mass_to += mass[i];
      count_to += count[i];
    }
    block_sync();
  };
  if (t == 0) found[0] = {0u, BINS, 0u};
  block_sync();
  bool counted = counts(p, a.vocab) && p.top_k < live;  // what is not live is never drawn
  uint64_t shared = total;
  if (counted) {
    find([&](uint32_t before, uint32_t here, uint64_t, uint64_t) { return before < p.top_k && p.top_k <= before + here; });
    sure = last = found[0].bin;
    shared = found[0].mass;
    block_sync();
  }
  if (p.top_p < 1.0f) {
    uint64_t wanted = share_of(p.top_p, shared);
    find([&](uint32_t, uint32_t, uint64_t before, uint64_t here) { return before < wanted && wanted <= before + here; });
    sure = found[0].bin;
    if (!counted) last = sure;
  }
  if (t != 0) return;
  sample_state* s = (sample_state*)a.states + row;
  s->sure = sure;
  s->last = last;
  s->count_left = counted ? p.top_k - found[0].count : 0u;
  s->mass_before = found[0].mass;
  s->total = total;
}

// What the launches before say of a row; without a filter there is no boundary, and sample_bins did not look for one.
DEVICE sample_state open_state(const sample_args& a, const sample_row& p, uint32_t row) {
  sample_state s = ((const sample_state*)a.states)[row];
  if (!cuts(p, a.vocab)) s.sure = s.last = BINS;
  return s;
}
DEVICE uint64_t least_mass(const sample_row& p) { return p.min_p > 0.0f ? share_of(p.min_p, (uint64_t)1 << 32) : 0u; }

// The boundary among the candidates: tokens of the bins between from the bound on are kept.
DEVICE uint64_t find_boundary(const row_view& v, const sample_row& p, const sample_state& s, const entry_list& list) {
  SHARED(uint64_t, lds, BLOCK_SCAN);
  uint64_t lowest = 0, whole = s.total;
  if (s.count_left && s.count_left < list.count) lowest = select<COUNT>(v, list, 0u, s.count_left);
  if (!(p.top_p < 1.0f)) return lowest;
  if (s.count_left) {
    uint64_t mass = 0;
    visit(list, [&](uint64_t entry) { mass += entry >= lowest ? mass_of(v, entry) : 0u; });
    block_scan<THREADS>(mass, lds, &whole);
    whole += s.mass_before;
  }
  return select<MASS>(v, list, lowest, share_of(p.top_p, whole) - s.mass_before);
}

// Draws from what is kept: finds the chunk by the chunks' masses, then the token in it.
DEVICE void finish_draw(const sample_args& a, uint32_t row) {
  SHARED(uint64_t, held, HELD);
  SHARED(uint32_t, low, THREADS);
  SHARED(uint32_t, high, THREADS);
  SHARED(uint64_t, lds, BLOCK_SCAN);
  SHARED(bin_found, found, 1);
  sample_row p = ((const sample_row*)a.params)[row];
  sample_state s = open_state(a, p, row);
  row_view v = open_row(a, p, row);
  v.top = order_value(s.key);
  uint64_t mass_min = least_mass(p);
  uint32_t t = thread_id(), listed = s.listed;
  uint64_t lowest = 0, total, mine = t < a.chunks ? ((const sample_chunk*)a.records)[(uint64_t)row * a.chunks + t].mass : 0u;
  low[t] = 0;
  high[t] = 0;
  if (listed) {
    const uint64_t* entries = (const uint64_t*)a.entries + (uint64_t)row * a.vocab;
    entry_list list = {held, entries, listed, listed < HELD ? listed : HELD};
    for (uint32_t i = t; i < list.held_count; i += THREADS) held[i] = entries[i];
    block_sync();
    lowest = find_boundary(v, p, s, list);
    visit(list, [&](uint64_t entry) {
      uint64_t mass = entry >= lowest ? mass_of(v, entry) : 0u;
      if (mass < mass_min) return;
      lds_add(&low[id_of(entry) / CHUNK], (uint32_t)mass & 0xffffu);
      lds_add(&high[id_of(entry) / CHUNK], (uint32_t)(mass >> 16));
    });
    block_sync();
    mine += ((uint64_t)high[t] << 16) + low[t];
  }
  uint64_t before = block_scan<THREADS>(mine, lds, &total), target = high_product(philox(p.seed, p.position), total);
  if (before <= target && target - before < mine) found[0] = {target - before, t, 0u};
  block_sync();
  uint32_t first = found[0].bin * CHUNK + t * QUAD * LOADS;
  target = found[0].mass;
  uint64_t mass[LOADS * QUAD];
  mine = 0;
  UNROLL
  for (uint32_t i = 0; i < LOADS; i++) {
    uint32_t key[QUAD];
    load_keys(v, first + i * QUAD, key);
    adjust(v, first + i * QUAD, key);
    UNROLL
    for (uint32_t j = 0; j < QUAD; j++) {
      float d = distance(v, key[j]);
      bool live = key[j] && d > LIVE;
      uint32_t bin = live ? bin_of(d) : BINS;
      bool kept = live && (bin < s.sure || (bin <= s.last && entry_of(key[j], first + i * QUAD + j) >= lowest));
      uint64_t m = kept ? exp_mass(d) : 0u;
      mass[i * QUAD + j] = m >= mass_min ? m : 0u;
      mine += mass[i * QUAD + j];
    }
  }
  before = block_scan<THREADS>(mine, lds, &total);
  if (!(before <= target && target - before < mine)) return;
  uint32_t token = first;
  UNROLL
  for (uint32_t i = 0; i < LOADS * QUAD; i++) {
    before += mass[i];
    if (before <= target) token = first + i + 1u;
  }
  put_token(a, p, s, row, (int32_t)token);
}

// What a block of sample_best finds out about one chunk.
DEVICE void best_of_chunk(const sample_args& a, const row_view& v, uint32_t row, uint32_t chunk) {
  SHARED(uint64_t, largest, GROUPS);
  uint32_t t = thread_id(), key[LOADS][QUAD];
  uint64_t best = 0, raw_best = 0;
  UNROLL
  for (uint32_t i = 0; i < LOADS; i++) load_keys(v, chunk * CHUNK + i * SPAN + t * QUAD, key[i]);
  UNROLL
  for (uint32_t i = 0; i < LOADS; i++) {
    uint64_t top = wave32_max(largest_of(key[i], chunk * CHUNK + i * SPAN + t * QUAD));
    if (t % GROUP_LANES != 0) continue;
    largest[i * WAVES + t / GROUP_LANES] = top;
    if (a.top_ids) ((uint64_t*)a.groups)[((uint64_t)row * a.chunks + chunk) * GROUPS + i * WAVES + t / GROUP_LANES] = top;
  }
  block_sync();
  UNROLL
  for (uint32_t i = 0; i < GROUPS; i++) raw_best = larger(raw_best, largest[i]);
  float top = order_value(key_of(raw_best)), sum = 0.0f;
  UNROLL
  for (uint32_t i = 0; i < LOADS; i++) {
    UNROLL
    for (uint32_t j = 0; j < QUAD; j++) {
      float l = order_value(key[i][j]);
      if (key[i][j]) sum += l == top ? 1.0f : exp_f32(l - top);
    }
  }
  sum = ordered_sum(sum);
  if (adjusts(v)) {
    UNROLL
    for (uint32_t i = 0; i < LOADS; i++) {
      uint32_t id = chunk * CHUNK + i * SPAN + t * QUAD;
      adjust(v, id, key[i]);
      best = larger(best, largest_of(key[i], id));
    }
    best = block_largest(best);
  }
  if (t != 0) return;
  sample_chunk* record = (sample_chunk*)a.records + (uint64_t)row * a.chunks + chunk;
  record->raw = raw_best;
  record->best = best;
  record->sum = sum;
}

// What a block of sample_draw finds out about one chunk: the mass that is kept for sure, and candidates.
DEVICE void draw_of_chunk(const sample_args& a, const row_view& v, const sample_state& s, uint64_t mass_min, uint32_t row, uint32_t chunk) {
  SHARED(uint64_t, lds, BLOCK_SCAN);
  SHARED(uint32_t, joining, 2);  // how many of this chunk, and where in the list
  uint32_t t = thread_id(), key[LOADS][QUAD], inside = 0, count = 0, first = chunk * CHUNK + t * QUAD;
  uint64_t sum = 0, total;
  if (t == 0) joining[0] = 0;
  UNROLL
  for (uint32_t i = 0; i < LOADS; i++) load_keys(v, first + i * SPAN, key[i]);
  UNROLL
  for (uint32_t i = 0; i < LOADS; i++) {
    adjust(v, first + i * SPAN, key[i]);
    UNROLL
    for (uint32_t j = 0; j < QUAD; j++) {
      float d = distance(v, key[i][j]);
      if (!key[i][j] || !(d > LIVE)) continue;
      uint32_t bin = bin_of(d);
      if (bin < s.sure) {
        uint64_t mass = exp_mass(d);
        sum += mass >= mass_min ? mass : 0u;
      } else if (bin <= s.last) {
        inside |= 1u << (i * QUAD + j);
        count++;
      }
    }
  }
  block_scan<THREADS>(sum, lds, &total);
  if (t == 0) ((sample_chunk*)a.records)[(uint64_t)row * a.chunks + chunk].mass = total;
  if (s.sure >= BINS) return;
  uint32_t at = count ? lds_add(&joining[0], count) : 0u;
  block_sync();
  if (t == 0 && joining[0]) joining[1] = global_add(&((sample_state*)a.states)[row].listed, joining[0]);
  block_sync();
  uint64_t* entries = (uint64_t*)a.entries + (uint64_t)row * a.vocab + (inside ? joining[1] + at : 0u);
  UNROLL
  for (uint32_t i = 0; i < LOADS * QUAD; i++) {
    if (inside >> i & 1u) *entries++ = entry_of(key[i / QUAD][i % QUAD], first + i / QUAD * SPAN + i % QUAD);
  }
}

}  // namespace sampling

// LAUNCH sample_best block=256 chunk=2048 groups=16 bins=1024 vocab_max=524288 logprobs_max=32
KERNEL(sample_best, sample_args, 256) {
  using namespace sampling;
  uint32_t row = block_y();
  sample_row p = ((const sample_row*)a.params)[row];
  row_view v = open_row(a, p, row);
  if (draws(p) && cuts(p, a.vocab)) {
    for (uint32_t i = block_x() * THREADS + thread_id(); i < BINS; i += a.blocks * THREADS) {
      ((uint64_t*)a.masses)[(uint64_t)row * BINS + i] = 0;
      ((uint32_t*)a.counts)[(uint64_t)row * BINS + i] = 0;
    }
  }
  for (uint32_t chunk = block_x(); chunk < a.chunks; chunk += a.blocks) best_of_chunk(a, v, row, chunk);
  if (step_select::arrives_last((uint32_t*)a.arrivals + row, a.blocks)) finish_best(a, row);
}

// LAUNCH sample_bins block=256 chunks_max=16
KERNEL(sample_bins, sample_args, 256) {
  using namespace sampling;
  SHARED(uint32_t, low, BINS);  // of the masses: the lower 16 bits and the rest apart, 32-bit additions
  SHARED(uint32_t, high, BINS);
  SHARED(uint32_t, tokens, BINS);
  uint32_t t = thread_id(), row = block_y();
  sample_row p = ((const sample_row*)a.params)[row];
  uint32_t top_key = ((const sample_state*)a.states)[row].key;
  if (!draws(p) || !cuts(p, a.vocab) || top_key == ORDER_KEY_NEGATIVE_INFINITY) return;
  row_view v = open_row(a, p, row);
  v.top = order_value(top_key);
  bool counted = counts(p, a.vocab);
  for (uint32_t i = t; i < BINS; i += THREADS) low[i] = high[i] = tokens[i] = 0;
  block_sync();
  for (uint32_t chunk = block_x(); chunk < a.chunks; chunk += a.blocks) {
    uint32_t key[LOADS][QUAD], first = chunk * CHUNK + t * QUAD;
    UNROLL
    for (uint32_t i = 0; i < LOADS; i++) load_keys(v, first + i * SPAN, key[i]);
    UNROLL
    for (uint32_t i = 0; i < LOADS; i++) {
      adjust(v, first + i * SPAN, key[i]);
      UNROLL
      for (uint32_t j = 0; j < QUAD; j++) {
        float d = distance(v, key[i][j]);
        if (!key[i][j] || !(d > LIVE)) continue;
        uint64_t mass = exp_mass(d);
        uint32_t bin = bin_of(d);
        lds_add(&low[bin], (uint32_t)mass & 0xffffu);
        lds_add(&high[bin], (uint32_t)(mass >> 16));
        if (counted) lds_add(&tokens[bin], 1u);
      }
    }
  }
  block_sync();
  for (uint32_t i = t; i < BINS; i += THREADS) {
    uint64_t mass = ((uint64_t)high[i] << 16) + low[i];
    if (mass) global_add((uint64_t*)a.masses + (uint64_t)row * BINS + i, mass);
    if (tokens[i]) global_add((uint32_t*)a.counts + (uint64_t)row * BINS + i, tokens[i]);
  }
  if (step_select::arrives_last((uint32_t*)a.arrivals + row, a.blocks)) find_bins(a, row);
}

// LAUNCH sample_draw block=256
KERNEL(sample_draw, sample_args, 256) {
  using namespace sampling;
  uint32_t row = block_y();
  sample_row p = ((const sample_row*)a.params)[row];
  sample_state s = open_state(a, p, row);
  if (!draws(p) || s.key == ORDER_KEY_NEGATIVE_INFINITY) return;
  uint64_t mass_min = least_mass(p);
  for (uint32_t chunk = block_x(); chunk < a.chunks; chunk += a.blocks) {
    row_view v = open_row(a, p, row);  // in here, so that it takes no scalar registers where the row is finished
    v.top = order_value(s.key);
    draw_of_chunk(a, v, s, mass_min, row, chunk);
  }
  if (step_select::arrives_last((uint32_t*)a.arrivals + row, a.blocks)) finish_draw(a, row);
}
