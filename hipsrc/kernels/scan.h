// scan.h - block-wide prefix sums and exact radix selection, shared by topk, experts, sampling, the hot cache and the selection of a step.
// Two levels in LDS instead of wave shuffles: any element type, one order whatever the wave width, and four meeting points of the
// work-items instead of eight (a meeting point is what a work-item costs on the host).
// block_scan is for integers and any block: two levels of prefixes over 32 lanes, two meeting points.
#pragma once

constexpr uint32_t BLOCK_SCAN = 32;  // values of LDS

// Exclusive prefix sum of one integer a work-item over a block of THREADS; *total gets the sum. `lds` holds BLOCK_SCAN values and may be used again
// at once.
template <uint32_t THREADS, class T> DEVICE T block_scan(T v, T* lds, T* total) {
  static_assert(THREADS % 32 == 0 && THREADS / 32 <= BLOCK_SCAN, "a group of 32 lanes adds up the groups");
  uint32_t lane = thread_id() % 32, group = thread_id() / 32;
  T sum, before = wave32_prefix(v, &sum);
  if (lane == 0) lds[group] = sum;
  block_sync();
  T groups = wave32_prefix(lane < THREADS / 32 ? lds[lane] : (T)0, total);
  groups = shuffle_from(groups, (lane_id() & ~31u) | group);
  block_sync();
  return before + groups;
}

constexpr uint32_t SCAN_THREADS = 256;
constexpr uint32_t SCAN_GROUP = 16;  // SCAN_GROUP * SCAN_GROUP == SCAN_THREADS: each level sums 16 values in sequence

// Exclusive prefix sum of one value a work-item over a block of SCAN_THREADS; *total gets the sum. `lds` holds SCAN_THREADS +
// SCAN_GROUP values and may be used again at once.
template <class T> DEVICE T block_prefix(T v, T* lds, T* total) {
  uint32_t t = thread_id();
  lds[t] = v;
  block_sync();
  if (t < SCAN_GROUP) {
    T running = 0;
    for (uint32_t i = 0; i < SCAN_GROUP; i++) {
      T next = lds[t * SCAN_GROUP + i];
      lds[t * SCAN_GROUP + i] = running;
      running += next;
    }
    lds[SCAN_THREADS + t] = running;
  }
  block_sync();
  if (t == 0) {  // once for all: with every work-item at it, AMD keeps 16 lane masks in scalar registers
    T sum = 0;
    UNROLL
    for (uint32_t g = 0; g < SCAN_GROUP; g++) {
      sum += lds[SCAN_THREADS + g];
      lds[SCAN_THREADS + g] = sum;
    }
  }
  block_sync();
  T before = lds[t], groups = t < SCAN_GROUP ? (T)0 : lds[SCAN_THREADS + t / SCAN_GROUP - 1u];
  *total = lds[SCAN_THREADS + SCAN_GROUP - 1u];
  block_sync();
  return before + groups;
}

// Index of the lowest bit that is set; v != 0.
DEVICE uint32_t lowest_bit(uint32_t v) { return bit_count((v & (0u - v)) - 1u); }

// A float as an unsigned number of the same order: -inf < ... < -0 = +0 < ... < +inf. NaN counts as -inf.
constexpr uint32_t ORDER_KEY_NEGATIVE_INFINITY = 0x007fffffu;
DEVICE uint32_t order_key(float v) {
  uint32_t u = bits_of(v);
  if ((u & 0x7fffffffu) > 0x7f800000u) return ORDER_KEY_NEGATIVE_INFINITY;
  if (u == 0x80000000u) u = 0;
  return (u & 0x80000000u) ? ~u : (u | 0x80000000u);
}
DEVICE float order_value(uint32_t key) { return float_of((key & 0x80000000u) ? (key ^ 0x80000000u) : ~key); }

// State of a radix selection that walks down the keys eight bits at a time: the digits found so far, and how much weight is still
// wanted among the keys that share them.
template <class W> struct selection {
  uint32_t prefix;
  W wanted;
};

// One step: `histogram` [256] holds the weight of each digit at `shift` among keys that share the prefix. Finds the digit d with
// weight(digits > d) < wanted <= weight(digits >= d). wanted must be at least 1 and at most the whole weight. `lds` as for block_prefix.
template <class W> DEVICE void select_digit(selection<W>* s, uint32_t shift, const W* histogram, W* lds, selection<W>* found) {
  uint32_t digit = 255u - thread_id();
  W weight = histogram[digit], total;
  W above = block_prefix(weight, lds, &total);
  if (above < s->wanted && s->wanted <= above + weight) {
    found->prefix = s->prefix | (digit << shift);
    found->wanted = s->wanted - above;
  }
  block_sync();
  *s = *found;
  block_sync();
}

// One step over digits of 12 bits by a block of THREADS work-items, which have BINS_EACH of the counts each.
constexpr uint32_t BINS_EACH = 4;
struct threshold {
  uint32_t bin, wanted, weight;  // how many of the bin are selected, and how many it has
};
// The bin, or digit, that holds the k-th largest of the counted keys. counts: of the work-item's bins; work-item 0 has the largest keys.
template <uint32_t THREADS> DEVICE void find_bin(const uint32_t* counts, uint32_t k, threshold* found, uint32_t* lds) {
  uint32_t total, above = block_scan<THREADS>(counts[0] + counts[1] + counts[2] + counts[3], lds, &total);
  UNROLL
  for (uint32_t i = BINS_EACH; i-- > 0;) {
    if (above < k && k <= above + counts[i]) *found = {BINS_EACH * (THREADS - thread_id() - 1u) + i, k - above, counts[i]};
    above += counts[i];
  }
  block_sync();
}

// True if `key` agrees with the digits found before the step at `shift`.
DEVICE bool shares_prefix(uint32_t key, uint32_t prefix, uint32_t shift) { return shift == 24u || ((key ^ prefix) >> (shift + 8u)) == 0u; }
