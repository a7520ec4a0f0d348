// selections.h - topk, merge_lists, router and expert_sort of the fast host build. Counts and comparisons only (the router's arithmetic is router.hip's, expert by
// expert), so the results are those of the fiber kernels whatever the method.
#pragma once
#include <algorithm>

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

// Calls put(place, column, key) for the k best of n > 0 scores, ascending, k <= n; false without memory.
template <class Put> inline bool best_of(Blocks& b, const float* scores, uint32_t n, uint32_t k, const Put& put) {
  uint32_t* keys = (uint32_t*)b.scratch(2 * (size_t)n + 1);  // what is left of the keys is stored one element past its count
  if (!keys) return false;
  for (uint32_t p = 0; p < n; p++) keys[p] = order_key(scores[p]);
  uint32_t wanted, limit = boundary(keys, n, k, keys + n, &wanted), taken = 0;
  for (uint32_t p = 0; p < n && taken < k; p++) {
    uint32_t equal = keys[p] == limit && wanted ? 1u : 0u;
    wanted -= equal;
    if (keys[p] > limit || equal) put(taken++, p, keys[p]);
  }
  return true;
}

// Grid: rows.
inline bool topk(const topk_args& a, Blocks& b) {
  for (uint64_t row = b.first; row < b.last; row++) {
    int32_t position = ((const int32_t*)a.positions)[row];
    uint32_t n = position < 0 ? 0u : (uint32_t)position + 1u;
    int32_t *selected = (int32_t*)a.selected + row * a.k, *count = (int32_t*)a.counts + row;
    uint64_t* best = (uint64_t*)a.best + row * a.k;
    const float* scores = (const float*)a.scores + row * a.score_stride;
    if (a.sides != 1) {
      uint32_t held = n <= a.k ? 0u : share::rows_of(n, a.extent_rows, a.side, a.sides), listed = held < a.k ? held : a.k;
      *count = (int32_t)listed;
      if (listed && !best_of(b, scores, held, listed, [&](uint32_t place, uint32_t column, uint32_t key) {
            best[place] = merge::entry_of(key, share::position_of(column, a.extent_rows, a.side, a.sides));
          })) return false;
      continue;
    }
    *count = (int32_t)(n < a.k ? n : a.k);
    if (n <= a.k) {
      for (uint32_t i = 0; i < a.k; i++) selected[i] = i < n ? (int32_t)i : -1;
      continue;
    }
    if (!best_of(b, scores, n, a.k, [&](uint32_t place, uint32_t column, uint32_t) { selected[place] = (int32_t)column; })) return false;
  }
  return true;
}

// The k best entries of two lists, by position; returns how many. all: room for both.
inline uint32_t merge_best(const uint64_t* mine, uint32_t mine_count, const uint64_t* other, uint32_t other_count, uint32_t k, uint64_t* all,
                           int32_t* selected) {
  uint32_t total = mine_count + other_count, count = 0, i = 0, j = 0;
  memcpy(all, mine, sizeof(uint64_t) * mine_count);
  memcpy(all + mine_count, other, sizeof(uint64_t) * other_count);
  uint64_t lowest = 1;
  if (total > k) {
    std::nth_element(all, all + (total - k), all + total);
    lowest = all[total - k];
  }
  while (i < mine_count || j < other_count) {
    bool from_mine = j == other_count || (i < mine_count && merge::position_of(mine[i]) < merge::position_of(other[j]));
    uint64_t entry = from_mine ? mine[i++] : other[j++];
    if (entry >= lowest) selected[count++] = (int32_t)merge::position_of(entry);
  }
  return count;
}

// Grid: rows.
inline bool merge_lists(const merge_args& a, Blocks& b) {
  uint64_t* all = (uint64_t*)b.scratch(4 * (size_t)a.k);
  if (!all) return false;
  for (uint64_t row = b.first; row < b.last; row++) {
    int32_t position = ((const int32_t*)a.positions)[row];
    uint32_t count = position < 0 ? 0u : (uint32_t)position + 1u;
    int32_t* selected = (int32_t*)a.selected + row * a.k;
    if (position < (int32_t)a.k) {
      for (uint32_t i = 0; i < count; i++) selected[i] = (int32_t)i;
    } else if (a.drawn) {
      const int32_t* drawn = (const int32_t*)a.drawn + (*(const uint32_t*)a.draw_index + row) % a.draws * a.k;
      count = 0;
      for (uint32_t i = 0; i < a.k; i++) {
        selected[i] = drawn[i];
        count += drawn[i] >= 0 ? 1u : 0u;
      }
    } else {
      const uint64_t *mine = (const uint64_t*)a.entries + row * a.k, *other = (const uint64_t*)a.other_entries + row * a.k;
      count = merge_best(mine, merge::count_of(a.counts, (uint32_t)row, a.k), other, merge::count_of(a.other_counts, (uint32_t)row, a.k), a.k, all, selected);
    }
    for (uint32_t i = a.drawn && position >= (int32_t)a.k ? a.k : count; i < a.k; i++) selected[i] = -1;
    ((int32_t*)a.selected_counts)[row] = (int32_t)count;
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
    if (before >= a.topk_group) e.keys[t] = routing::NONE;
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
FAST_KERNEL(merge_lists, merge_args, selections::merge_lists);
FAST_KERNEL(router, router_args, selections::router);
FAST_KERNEL(expert_sort, expert_sort_args, selections::expert_sort);

}  // namespace host
}  // namespace
