// step_select.hip - selection of a decode step (docs/decisions/0004-step-graph.md): index scores, exact top-k and its plan, in two launches.
//   step_score   score[r, p] as indexer.hip for all p <= positions[r]; histogram of the order keys' upper 12 bits; the row's last block finds the
//                bin that holds the k-th largest
//   step_topk    bits of the positions above that bin, and a list of those in it; the row's last block chooses among the list, writes the
//                positions in ascending order and where each row lies
// A row with positions[r] < k is the identity and has no scores. The last block is the one whose arrival the row's counter shows as last: it has
// nothing to wait for. Integers decide, so the selection is exact: largest score first, ties to the lowest position; -0 equals +0, NaN is -inf.
// Order of additions of a score: heads <= 32, dim 128 and bf16 where there are matrix tiles: dot products as the tiles add, head j into sum
// j % 16 (ascending), then tile_column_sum. Else as indexer.hip, bit by bit.
// Limits: dim <= 128, heads <= 64, heads * dim <= 4096, k <= 2048, positions below 2^30, extents of whole multiples of 16 keys.
#include "portable.h"
#include "hotcache.h"

namespace step_select {

constexpr uint32_t SCORE_THREADS = 256;
constexpr uint32_t SCORE_GROUPS = SCORE_THREADS / TILE_LANES;
constexpr uint32_t HEADS_MAX = 64, QUERY_MAX = 4096;
constexpr uint32_t TILE_HEADS = 2 * TILE, TILE_DIM = 128, STEPS = TILE_DIM / TILE;  // what stays in registers as matrix tiles
constexpr uint32_t PARTS = 8;                                                       // of a sum over heads, as indexer.hip
constexpr uint32_t BIN_SHIFT = 20, BINS = 1u << (32 - BIN_SHIFT);

constexpr uint32_t THREADS = 1024;        // of step_topk
constexpr uint32_t K_MAX = 2 * THREADS;
constexpr uint32_t WORDS = 4;             // bitmap words a work-item emits at a time
constexpr uint32_t HELD = 4;              // candidates a work-item keeps in registers
constexpr uint32_t DIGIT_BITS = 10;       // of the choice among candidates: a digit a work-item
constexpr uint32_t POSITION_BITS = 30;
constexpr uint32_t RANK_BITS = BIN_SHIFT + POSITION_BITS;
static_assert(1u << DIGIT_BITS == THREADS && RANK_BITS % DIGIT_BITS == 0, "a work-item has one digit, and the digits cover a rank");

// True in the block of the row that arrives last; it then sees what the others wrote before they arrived. Leaves the counter at 0.
DEVICE bool arrives_last(uint32_t* arrivals, uint32_t blocks) {
  SHARED(uint32_t, arrived, 1);
  fence_device();
  block_sync();
  if (thread_id() == 0) arrived[0] = global_add(arrivals, 1u);
  block_sync();
  if (arrived[0] != blocks - 1u) return false;
  fence_device();
  if (thread_id() == 0) *arrivals = 0;
  return true;
}

// Address of the keys from position p on, as many as lie in its extent.
template <class T> DEVICE const T* keys_from(const step_score_args& a, const uint64_t* table, uint32_t p, uint32_t count) {
  uint64_t offset = ((uint64_t)a.plane * a.extent_rows + p % a.extent_rows) * a.key_bytes;
  return pointer_from<const T>(table[p / a.extent_rows] + offset, (uint64_t)count * a.key_bytes);
}

struct scored_row {
  float* scores;
  uint32_t* histogram;  // LDS
  uint32_t n;           // positions
};
DEVICE void put_score(const scored_row& s, uint32_t p, float score) {
  if (p >= s.n) return;
  s.scores[p] = score;
  lds_add(&s.histogram[order_key(score) >> BIN_SHIFT], 1u);
}


// Tiles of 16 keys on matrix tiles, the query in registers; 32 lanes a tile, the groups of all blocks in turn.
template <class T> DEVICE void score_tiles(const step_score_args& a, uint32_t row, const uint64_t* table, const float* gates, const scored_row& s) {
  const T* q = (const T*)a.q + (uint64_t)row * a.heads * TILE_DIM;
  tile_a<T> query[2][STEPS];
  UNROLL
  for (uint32_t h = 0; h < 2; h++) {
    UNROLL
    for (uint32_t k = 0; k < STEPS; k += 2) {
      tile_pair(&query[h][k], [&](uint32_t j) { return h * TILE + j < a.heads ? q + (h * TILE + j) * TILE_DIM + k * TILE : (const T*)nullptr; });
    }
  }
  float gate[2][TILE_ELEMENTS];
  UNROLL
  for (uint32_t h = 0; h < 2; h++) {
    UNROLL
    for (uint32_t i = 0; i < TILE_ELEMENTS; i++) gate[h][i] = gates[h * TILE + tile16<T>::row(i)];
  }
  uint32_t tiles = (s.n + TILE - 1u) / TILE, stride = a.blocks * SCORE_GROUPS;
  for (uint32_t tile = tile_group() * a.blocks + block_x(); tile < tiles; tile += stride) {
    const T* keys = keys_from<T>(a, table, tile * TILE, TILE);
    tile_b<T> key[STEPS];
    UNROLL
    for (uint32_t k = 0; k < STEPS; k += 2) tile_pair(&key[k], keys + k * TILE, TILE_DIM);
    tile16<T> sum, dot[2];
    tile_clear(sum);
    UNROLL
    for (uint32_t h = 0; h < 2; h++) tile_clear(dot[h]);
    UNROLL
    for (uint32_t k = 0; k < STEPS; k++) {
      UNROLL
      for (uint32_t h = 0; h < 2; h++) tile_add(dot[h], query[h][k], key[k]);
    }
    UNROLL
    for (uint32_t h = 0; h < 2; h++) {
      UNROLL
      for (uint32_t i = 0; i < TILE_ELEMENTS; i++) {
        sum.v[i] = fma_f32(gate[h][i], max_f32(0.0f, dot[h].v[i] * a.key_scale), sum.v[i]);
      }
    }
    uint32_t column;
    float score = tile_column_sum(sum, &column);
    if (column < TILE) put_score(s, tile * TILE + column, score);
  }
}

// A key a work-item.
template <class T> DEVICE void score_keys(const step_score_args& a, uint32_t row, const uint64_t* table, const float* gates, const scored_row& s) {
  SHARED(float, query, QUERY_MAX);
  const T* q = (const T*)a.q + (uint64_t)row * a.heads * a.dim;
  for (uint32_t i = thread_id(); i < a.heads * a.dim; i += SCORE_THREADS) query[i] = load_f32(q + i);
  block_sync();
  for (uint32_t p = thread_id() * a.blocks + block_x(); p < s.n; p += SCORE_THREADS * a.blocks) {
    const T* key = keys_from<T>(a, table, p, 1);
    float sum[PARTS] = {};
    for (uint32_t j = 0; j < a.heads; j += PARTS) {
      UNROLL
      for (uint32_t part = 0; part < PARTS; part++) {
        if (j + part >= a.heads) break;
        float similarity = dot8(query + (j + part) * a.dim, key, a.dim) * a.key_scale;
        sum[part] = fma_f32(gates[j + part], max_f32(0.0f, similarity), sum[part]);
      }
    }
    put_score(s, p, ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7])));
  }
}

// The bin that holds the k-th largest of the counted keys, and how many of it are wanted.
DEVICE void find_bin(const uint32_t* histogram, uint32_t k, uint32_t* threshold) {
  SHARED(uint32_t, lds, BLOCK_SCAN);
  constexpr uint32_t EACH = BINS / SCORE_THREADS;
  uint32_t first = BINS - (thread_id() + 1u) * EACH, count[EACH], sum = 0, total;  // work-item 0 has the largest keys
  UNROLL
  for (uint32_t i = 0; i < EACH; i += 4) {
    words16 four = *(const words16*)(histogram + first + i);
    UNROLL
    for (uint32_t j = 0; j < 4; j++) count[i + j] = four.w[j];
  }
  UNROLL
  for (uint32_t i = 0; i < EACH; i++) sum += count[i];
  uint32_t above = block_scan<SCORE_THREADS>(sum, lds, &total);
  UNROLL
  for (uint32_t i = EACH; i-- > 0;) {
    if (above < k && k <= above + count[i]) {
      threshold[0] = first + i;
      threshold[1] = k - above;
    }
    above += count[i];
  }
}

template <class T> DEVICE void score_row(const step_score_args& a) {
  SHARED(float, gates, HEADS_MAX);
  SHARED(uint32_t, counted, BINS);
  uint32_t t = thread_id(), row = block_y();
  int32_t position = ((const int32_t*)a.positions)[row];
  if (position < (int32_t)a.k) return;
  const uint64_t* table = (const uint64_t*)a.tables + (uint64_t)((const int32_t*)a.sessions)[row] * a.table_stride;
  if (t < HEADS_MAX) gates[t] = t < a.heads ? ((const float*)a.gate)[(uint64_t)row * a.heads + t] * a.head_scale : 0.0f;
  for (uint32_t i = t; i < BINS; i += SCORE_THREADS) counted[i] = 0;
  block_sync();
  scored_row s = {(float*)a.scores + (uint64_t)row * a.score_stride, counted, (uint32_t)position + 1u};
  if constexpr (tile_a<T>::WORDS <= 8) {
    if (a.dim == TILE_DIM && a.heads <= TILE_HEADS) score_tiles<T>(a, row, table, gates, s);
    else score_keys<T>(a, row, table, gates, s);
  } else {
    score_keys<T>(a, row, table, gates, s);
  }
  block_sync();
  uint32_t* histogram = (uint32_t*)a.histogram + (uint64_t)row * BINS;
  for (uint32_t i = t; i < BINS; i += SCORE_THREADS) {
    if (counted[i]) global_add(&histogram[i], counted[i]);
  }
  if (!arrives_last((uint32_t*)a.arrivals + row, a.blocks)) return;
  find_bin(histogram, a.k, (uint32_t*)a.threshold + row * 2u);
}

// Where the rows of one query row lie.
struct placing {
  hotcache::hot_buffer h;
  hotcache::slot_table s;
  const uint64_t* table;
};
DEVICE placing open_place(const step_topk_args& a, uint32_t row) {
  placing p = {};
  uint64_t session = (uint64_t)((const int32_t*)a.sessions)[row];
  if (a.place == 1) p.table = (const uint64_t*)a.tables + session * a.table_stride;
  if (a.place == 2) {
    uint64_t index = session * a.groups + a.group;
    p.h = hotcache::open_buffer(((const kv_state*)a.states)[session], a.ring_rows, a.row_bytes);
    p.s = {(int32_t*)a.slot_of + index * a.table_positions, nullptr, (uint32_t*)a.used + index * a.slots, (uint32_t*)a.filled + index * a.slots};
  }
  return p;
}

// The first `count` of `chosen` in order become the selection, with their plan; two of them a work-item.
DEVICE void emit(const step_topk_args& a, uint32_t row, const int32_t* chosen, uint32_t count) {
  int32_t position[2], slot[2] = {hotcache::NOWHERE, hotcache::NOWHERE};
  uint32_t first = thread_id() * 2u, filled[2] = {0, 0};
  uint64_t at = (uint64_t)row * a.k + first;
  placing where = open_place(a, row);
  UNROLL
  for (uint32_t i = 0; i < 2; i++) position[i] = first + i < count ? chosen[first + i] : -1;
  if (a.place == 2) {
    UNROLL
    for (uint32_t i = 0; i < 2; i++) slot[i] = where.s.slot_of[position[i] < 0 ? 0 : position[i]];
    UNROLL
    for (uint32_t i = 0; i < 2; i++) filled[i] = where.s.filled[slot[i] < 0 ? 0 : slot[i]];
  }
  UNROLL
  for (uint32_t i = 0; i < 2; i++) {
    if (first + i >= a.k) break;
    uint64_t reference = 0;
    if (position[i] >= 0 && a.place == 1) {
      reference = hotcache::extent_row(where.table, (uint32_t)position[i], a.extent_rows, a.row_bytes) | hotcache::EXTENT;
    } else if (position[i] >= 0 && a.place == 2) {
      reference = hotcache::look_up(where.h, where.s, position[i], slot[i], filled[i]);
    }
    ((int32_t*)a.selected)[at + i] = position[i];
    if (a.place) ((uint64_t*)a.plan)[at + i] = reference;
  }
  if (thread_id() == 0) ((int32_t*)a.counts)[row] = (int32_t)count;
}

// Candidates are ranked by the rest of their key, then by position, the lowest first; ranks differ.
constexpr uint32_t POSITION_LAST = (1u << POSITION_BITS) - 1u;
DEVICE uint64_t rank_of(uint32_t key, uint32_t p) { return (uint64_t)(key & ((1u << BIN_SHIFT) - 1u)) << POSITION_BITS | (POSITION_LAST - p); }
DEVICE uint32_t position_of(uint64_t rank) { return POSITION_LAST - ((uint32_t)rank & POSITION_LAST); }

// 32 positions a work-item: bits of those whose key lies above the bin; those in it join the list.
DEVICE void sort_out(const step_topk_args& a, uint32_t row, uint32_t n, uint32_t bin) {
  SHARED(uint32_t, joining, 2);  // how many of this block, and where in the list
  const float* scores = (const float*)a.scores + (uint64_t)row * a.score_stride;
  uint32_t* bitmap = (uint32_t*)a.bitmap + (uint64_t)row * a.bitmap_stride;
  uint64_t* list = (uint64_t*)a.candidates + (uint64_t)row * a.score_stride;
  uint32_t words = (n + 31u) / 32u, low = bin << BIN_SHIFT, size = 1u << BIN_SHIFT;
  for (uint32_t first = 0; first < words; first += THREADS * a.blocks) {
    uint32_t word = first + thread_id() * a.blocks + block_x(), above = 0, inside = 0, count = 0;
    if (thread_id() == 0) joining[0] = 0;
    block_sync();
    if (word < words) {
      uint32_t bits[32];
      UNROLL
      for (uint32_t i = 0; i < 32; i += 4) {
        words16 four = *(const words16*)(scores + word * 32u + i);  // columns past n lie within the stride
        UNROLL
        for (uint32_t j = 0; j < 4; j++) bits[i + j] = four.w[j];
      }
      UNROLL
      for (uint32_t i = 0; i < 32; i++) {
        uint32_t key = order_key(float_of(bits[i]));
        above |= key >= low + size ? 1u << i : 0u;
        inside |= key - low < size ? 1u << i : 0u;
      }
      uint32_t mask = n - word * 32u < 32u ? (1u << (n - word * 32u)) - 1u : ~0u;
      above &= mask;
      inside &= mask;
      if (above) bitmap[word] = above;
      count = bit_count(inside);
    }
    uint32_t at = count ? lds_add(&joining[0], count) : 0u;
    block_sync();
    if (thread_id() == 0 && joining[0]) joining[1] = global_add((uint32_t*)a.candidate_counts + row, joining[0]);
    block_sync();
    at += joining[1];
    for (; inside; inside &= inside - 1u) {
      uint32_t p = word * 32u + lowest_bit(inside);
      list[at++] = rank_of(order_key(scores[p]), p);
    }
  }
}

struct digit_found {
  uint32_t digit, wanted, weight;
};

// Positions of the `wanted` best of `count` candidates, unordered, into `chosen`. The first HELD * THREADS are in `held`, the others in `list`.
DEVICE void choose(const uint64_t* held, const uint64_t* list, uint32_t count, uint32_t wanted, uint32_t* histogram, uint32_t* lds,
                   uint32_t* chosen) {
  SHARED(digit_found, found, 1);
  SHARED(uint32_t, taken, 1);
  uint32_t t = thread_id(), left = wanted;
  uint64_t prefix = 0, lowest = 0;  // chosen: ranks from `lowest` on
  auto visit = [&](const auto& see) {
    UNROLL
    for (uint32_t i = 0; i < HELD; i++) {
      if (i * THREADS + t < count) see(held[i]);
    }
    for (uint32_t i = HELD * THREADS + t; i < count; i += THREADS) see(list[i]);
  };
  if (t == 0) taken[0] = 0;
  for (uint32_t shift = RANK_BITS; shift && left != count;) {
    uint32_t above = shift;
    shift -= DIGIT_BITS;
    histogram[t] = 0;
    block_sync();
    uint32_t run = 0, run_digit = 0, total;  // equal digits in a row are added at once: all at one address would be slow
    visit([&](uint64_t rank) {
      if (rank >> above != prefix) return;
      uint32_t digit = (uint32_t)(rank >> shift) & (THREADS - 1u);
      if (run && digit != run_digit) {
        lds_add(&histogram[run_digit], run);
        run = 0;
      }
      run_digit = digit;
      run++;
    });
    if (run) lds_add(&histogram[run_digit], run);
    block_sync();
    uint32_t digit = THREADS - 1u - t, weight = histogram[digit], before = block_scan<THREADS>(weight, lds, &total);
    if (before < left && left <= before + weight) found[0] = {digit, left - before, weight};
    block_sync();
    prefix = prefix << DIGIT_BITS | found[0].digit;
    lowest = prefix << shift;
    left = found[0].wanted;
    if (left == found[0].weight) break;  // every rank of this prefix
  }
  block_sync();
  visit([&](uint64_t rank) {
    if (rank >= lowest) chosen[lds_add(&taken[0], 1u)] = position_of(rank);
  });
}

// WORDS words from `at` on, 0 past the end; a bitmap is whole multiples of WORDS.
DEVICE void load_bits(const uint32_t* bitmap, uint32_t at, uint32_t words, uint32_t* word) {
  static_assert(WORDS == 4, "one load of 16 bytes");
  words16 four = *(const words16*)(bitmap + (at < words ? at : 0u));
  UNROLL
  for (uint32_t i = 0; i < WORDS; i++) word[i] = at < words ? four.w[i] : 0u;
}

// Positions of the bitmap and of `extra` in ascending order; the bitmap is 0 afterwards. first_words: those of this work-item in the first window.
DEVICE void order_positions(uint32_t* bitmap, uint32_t words, const uint32_t* first_words, const uint32_t* extra, uint32_t extra_count,
                            uint32_t* marks, uint32_t* lds, int32_t* sorted) {
  uint32_t t = thread_id(), done = 0, total;
  for (uint32_t window = 0; window < words; window += THREADS * WORDS) {
    uint32_t at = window + t * WORDS, word[WORDS], count = 0;
    UNROLL
    for (uint32_t i = 0; i < WORDS; i++) {
      word[i] = first_words[i];
      marks[t * WORDS + i] = 0;
    }
    if (window) load_bits(bitmap, at, words, word);
    block_sync();
    for (uint32_t i = t; i < extra_count; i += THREADS) {
      uint32_t w = extra[i] / 32u - window;  // wraps before the window
      if (w < THREADS * WORDS) lds_add(&marks[w], 1u << extra[i] % 32u);
    }
    block_sync();
    UNROLL
    for (uint32_t i = 0; i < WORDS; i++) {
      if (word[i]) bitmap[at + i] = 0;  // what lies past the end is 0
      word[i] |= marks[t * WORDS + i];
      count += bit_count(word[i]);
    }
    uint32_t rank = done + block_scan<THREADS>(count, lds, &total);
    done += total;
    UNROLL
    for (uint32_t i = 0; i < WORDS; i++) {
      for (uint32_t bits = word[i]; bits; bits &= bits - 1u) sorted[rank++] = (int32_t)((at + i) * 32u + lowest_bit(bits));
    }
  }
}

// What the last block of a row does. Its first loads do not wait for the number of candidates.
DEVICE void finish_row(const step_topk_args& a, uint32_t row, uint32_t n, uint32_t wanted) {
  SHARED(uint32_t, histogram, THREADS);
  SHARED(uint32_t, marks, THREADS * WORDS);
  SHARED(uint32_t, chosen, K_MAX);
  SHARED(int32_t, sorted, K_MAX);
  SHARED(uint32_t, lds, BLOCK_SCAN);
  uint32_t t = thread_id(), words = (n + 31u) / 32u, word[WORDS];
  uint32_t* bitmap = (uint32_t*)a.bitmap + (uint64_t)row * a.bitmap_stride;
  uint32_t* candidate_count = (uint32_t*)a.candidate_counts + row;
  const uint64_t* list = (const uint64_t*)a.candidates + (uint64_t)row * a.score_stride;
  uint64_t held[HELD];
  uint32_t count = *candidate_count;
  UNROLL
  for (uint32_t i = 0; i < HELD; i++) held[i] = list[i * THREADS + t < a.score_stride ? i * THREADS + t : 0u];
  load_bits(bitmap, t * WORDS, words, word);
  choose(held, list, count, wanted, histogram, lds, chosen);
  block_sync();
  if (t == 0) *candidate_count = 0;
  order_positions(bitmap, words, word, chosen, wanted, marks, lds, sorted);
  block_sync();
  if (!a.drawn) return emit(a, row, sorted, a.k);
  const int32_t* drawn = (const int32_t*)a.drawn + (uint64_t)((*(const uint32_t*)a.draw_index + row) % a.draws) * a.k;
  uint32_t mine = 0, drawn_count;
  for (uint32_t i = t; i < a.k; i += THREADS) mine += drawn[i] >= 0 ? 1u : 0u;
  block_scan<THREADS>(mine, lds, &drawn_count);
  emit(a, row, drawn, drawn_count);
}

}  // namespace step_select

// LAUNCH step_score_f32 block=256 bins=4096 heads_max=64 dim_max=128 query_max=4096 tile=16
KERNEL(step_score_f32, step_score_args, 256) { step_select::score_row<float>(a); }
// LAUNCH step_score_bf16 block=256 bins=4096 heads_max=64 dim_max=128 query_max=4096 tile=16
KERNEL(step_score_bf16, step_score_args, 256) { step_select::score_row<bf16>(a); }

// LAUNCH step_topk block=1024 k_max=2048
KERNEL(step_topk, step_topk_args, 1024) {
  using namespace step_select;
  SHARED(int32_t, identity, K_MAX);
  uint32_t t = thread_id(), row = block_y();
  int32_t position = ((const int32_t*)a.positions)[row];
  if (position < (int32_t)a.k) {
    if (block_x() != 0) return;
    for (uint32_t i = t; i < K_MAX; i += THREADS) identity[i] = (int32_t)i;
    block_sync();
    emit(a, row, identity, (uint32_t)(position + 1));
    return;
  }
  uint32_t bin = ((const uint32_t*)a.threshold)[row * 2u], wanted = ((const uint32_t*)a.threshold)[row * 2u + 1u], n = (uint32_t)position + 1u;
  for (uint32_t i = block_x() * THREADS + t; i < BINS; i += a.blocks * THREADS) ((uint32_t*)a.histogram)[(uint64_t)row * BINS + i] = 0;
  sort_out(a, row, n, bin);
  if (arrives_last((uint32_t*)a.arrivals + row, a.blocks)) finish_row(a, row, n, wanted);
}
