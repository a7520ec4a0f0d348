// selections.h - topk, router and expert_sort of the fast host build. Counts and comparisons only (the router's arithmetic is router.hip's, expert by
// expert), so the results are those of the fiber kernels whatever the method.
#pragma once

namespace {
namespace host {
namespace selections {

constexpr uint32_t DIGIT_BITS = 11, DIGITS = 1u << DIGIT_BITS;

// Largest digit d of the keys at `shift` with fewer than *wanted keys above it; *wanted becomes how many of digit d are wanted.
DEVICE uint32_t find_digit(const uint32_t* histogram, uint32_t* wanted) {
  uint32_t digit = DIGITS - 1;
  while (histogram[digit] < *wanted) *wanted -= histogram[digit--];
  return digit;
}

// The k-th largest of n keys (0 < k <= n), and in *wanted how many keys equal to it belong to the k largest. Three digits of 11, 11 and 10 bits:
// after the first only keys that share it are looked at. `rest` has room for n keys.
inline uint32_t boundary(const uint32_t* keys, uint32_t n, uint32_t k, uint32_t* rest, uint32_t* wanted) {
  uint32_t histogram[DIGITS] = {};
  *wanted = k;
  for (uint32_t p = 0; p < n; p++) histogram[keys[p] >> 21]++;
  uint32_t high = find_digit(histogram, wanted), count = 0;
  for (uint32_t p = 0; p < n; p++) {
    rest[count] = keys[p];
    count += keys[p] >> 21 == high ? 1u : 0u;
  }
  memset(histogram, 0, sizeof histogram);
  for (uint32_t p = 0; p < count; p++) histogram[(rest[p] >> 10) & (DIGITS - 1)]++;
  uint32_t prefix = (high << DIGIT_BITS) | find_digit(histogram, wanted);
  memset(histogram, 0, sizeof histogram);
  for (uint32_t p = 0; p < count; p++) histogram[rest[p] & 1023u] += rest[p] >> 10 == prefix ? 1u : 0u;
  return (prefix << 10) | find_digit(histogram, wanted);
}

// Grid: rows.
inline bool topk(const topk_args& a, Blocks& b) {
  for (uint64_t row = b.first; row < b.last; row++) {
    int32_t position = ((const int32_t*)a.positions)[row];
    uint32_t n = position < 0 ? 0u : (uint32_t)position + 1u;
    int32_t* selected = (int32_t*)a.selected + row * a.k;
    ((int32_t*)a.counts)[row] = (int32_t)(n < a.k ? n : a.k);
    if (n <= a.k) {
      for (uint32_t i = 0; i < a.k; i++) selected[i] = i < n ? (int32_t)i : -1;
      continue;
    }
    uint32_t* keys = (uint32_t*)b.scratch(2 * (size_t)n + 1);  // the compaction stores one element past its count
    if (!keys) return false;
    const float* scores = (const float*)a.scores + row * a.score_stride;
    for (uint32_t p = 0; p < n; p++) keys[p] = order_key(scores[p]);
    uint32_t wanted, limit = boundary(keys, n, a.k, keys + n, &wanted), taken = 0;
    for (uint32_t p = 0; p < n && taken < a.k; p++) {
      uint32_t equal = keys[p] == limit && wanted ? 1u : 0u;
      wanted -= equal;
      selected[taken] = (int32_t)p;
      taken += keys[p] > limit ? 1u : equal;
    }
  }
  return true;
}

struct Expert {
  uint32_t keys[routing::EXPERTS_MAX];
  uint32_t groups[routing::EXPERTS_MAX];
  float affinities[routing::EXPERTS_MAX];
  float picked[routing::SLOTS_MAX];
  uint32_t ids[routing::SLOTS_MAX];
};

// routing::drop_groups of one row.
DEVICE void drop_groups(const router_args& a, Expert& e) {
  uint32_t members = a.experts / a.n_group;
  for (uint32_t g = 0; g < a.n_group; g++) {
    uint32_t best = 0, second = 0;
    for (uint32_t i = 0; i < members; i++) {
      uint32_t key = e.keys[g * members + i];
      if (key > best) {
        second = best;
        best = key;
      } else if (key > second) {
        second = key;
      }
    }
    e.groups[g] = order_key(members > 1u ? order_value(best) + order_value(second) : order_value(best));
  }
  for (uint32_t t = 0; t < a.experts; t++) {
    uint32_t group = t / members, before = 0;
    for (uint32_t g = 0; g < a.n_group; g++) {
      before += (e.groups[g] > e.groups[group] || (e.groups[g] == e.groups[group] && g < group)) ? 1u : 0u;
    }
    if (before >= a.topk_group) e.keys[t] = routing::OUT_OF_GROUP;
  }
}

// routing::pick.
inline void pick(const router_args& a, uint64_t row) {
  Expert e;
  for (uint32_t t = 0; t < a.experts; t++) {
    e.affinities[t] = sigmoid_f32(((const float*)a.logits)[row * a.experts + t]);
    e.keys[t] = order_key(e.affinities[t] + ((const float*)a.bias)[t]);
  }
  if (a.n_group > 1u) drop_groups(a, e);
  for (uint32_t t = 0; t < a.experts; t++) {
    uint32_t place = 0;
    for (uint32_t o = 0; o < a.experts; o++) place += (e.keys[o] > e.keys[t] || (e.keys[o] == e.keys[t] && o < t)) ? 1u : 0u;
    if (place >= a.k) continue;
    e.picked[place] = e.affinities[t];
    e.ids[place] = t;
  }
  float sum = 0.0f;
  for (uint32_t i = 0; i < a.k; i++) sum += e.picked[i];
  for (uint32_t i = 0; i < a.k; i++) {
    float weight = a.normalise ? e.picked[i] / (sum + 1e-20f) : e.picked[i];
    ((int32_t*)a.ids)[row * a.k + i] = (int32_t)e.ids[i];
    ((float*)a.weights)[row * a.k + i] = weight * a.scaling;
  }
}

// Grid: rows.
inline bool router(const router_args& a, Blocks& b) {
  for (uint64_t row = b.first; row < b.last; row++) pick(a, row);
  return true;
}

// One block: a counting sort keeps pairs of one expert in order.
inline bool expert_sort(const expert_sort_args& a, Blocks&) {
  const int32_t* ids = (const int32_t*)a.ids;
  uint32_t next[experts::THREADS] = {}, total = 0;
  for (uint32_t p = 0; p < a.pairs; p++) {
    if ((uint32_t)ids[p] < a.experts) next[ids[p]]++;
  }
  for (uint32_t e = 0; e < a.experts; e++) {
    uint32_t count = next[e];
    next[e] = total;
    ((int32_t*)a.offsets)[e] = (int32_t)total;
    total += count;
  }
  ((int32_t*)a.offsets)[a.experts] = (int32_t)total;
  for (uint32_t p = 0; p < a.pairs; p++) {
    if ((uint32_t)ids[p] < a.experts) ((int32_t*)a.sorted_pairs)[next[ids[p]]++] = (int32_t)p;
  }
  return true;
}

}  // namespace selections

FAST_KERNEL(topk, topk_args, selections::topk);
FAST_KERNEL(router, router_args, selections::router);
FAST_KERNEL(expert_sort, expert_sort_args, selections::expert_sort);

}  // namespace host
}  // namespace
