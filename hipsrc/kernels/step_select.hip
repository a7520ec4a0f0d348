// step_select.hip - selection of a decode step (docs/decisions/0004-step-graph.md): index scores and exact top-k, in two launches.
//   step_score   score[r, p] as indexer.hip for all p <= positions[r]; histogram of the order keys' upper 12 bits
//   step_topk    each block finds the bin that holds the k-th largest and lists what lies in or above it, positions ascending; the row's last block
//                chooses among those in the bin and writes the positions of all that is selected
// A side of a pair (share.h) scores the positions that it holds, as the rows of its own tables and columns, and step_topk writes the list of the best of
// them, for merge.hip. A row with positions[r] < k is the identity and has no scores, and an empty list. The last block is the one whose arrival the row's counter shows as last: it has
// nothing to wait for. Integers decide, so the selection is exact: largest score first, ties to the lowest position; -0 equals +0, NaN is -inf.
// Order of additions of a score: heads <= 32, dim 128 and bf16 where there are matrix tiles: dot products as the tiles add, head j into sum
// j % 16 (ascending), then tile_column_sum. Else as indexer.hip, bit by bit.
// Limits: dim <= 128, heads <= 64, heads * dim <= 4096, k <= 2048, positions below 2^30, extents of whole multiples of 16 keys.
#include "portable.h"
#include "merge.h"
#include "scan.h"
#include "share.h"

namespace step_select {

constexpr uint32_t SCORE_THREADS = 256;
constexpr uint32_t SCORE_GROUPS = SCORE_THREADS / TILE_LANES;
constexpr uint32_t HEADS_MAX = 64, QUERY_MAX = 4096;
constexpr uint32_t KEY_TILES = 2;  // tiles of keys that a group of lanes works on at a time
constexpr uint32_t TILE_HEADS = 2 * TILE, TILE_DIM = 128, STEPS = TILE_DIM / TILE;  // what stays in registers as matrix tiles
constexpr uint32_t PARTS = 8;                                                       // of a sum over heads, as indexer.hip
constexpr uint32_t BIN_SHIFT = 20, BINS = 1u << (32 - BIN_SHIFT);
constexpr uint32_t BIN_PARTS = 32;  // of a histogram that neighbours are spread over

constexpr uint32_t THREADS = 1024;  // of step_topk
constexpr uint32_t K_MAX = 2 * THREADS, BLOCKS_MAX = THREADS;
constexpr uint32_t EACH = 4, EACH_LONG = 8;  // positions that a work-item sorts out at a time: few, while the blocks have enough for all
constexpr uint32_t HELD = 4;                         // entries a work-item keeps in registers
constexpr uint32_t EAGER_BLOCKS = 16;                // that load before they know whether they have positions
constexpr uint32_t DIGIT_BITS = 32 - BIN_SHIFT;      // of the choice among candidates: so many digits as bins
constexpr uint32_t POSITION_BITS = 30;
constexpr uint32_t RANK_BITS = BIN_SHIFT + POSITION_BITS;
static_assert(1u << DIGIT_BITS == BINS && BINS == BINS_EACH * THREADS && BINS_EACH == 4, "the bins of a work-item are 16 bytes");

// Where a histogram has the bin: neighbours, which most scores fall into, are spread over cache lines, for a line takes one addition at a time.
DEVICE uint32_t bin_place(uint32_t bin) {
  uint32_t group = bin / BINS_EACH;
  return group % BIN_PARTS * (BINS / BIN_PARTS) + group / BIN_PARTS * BINS_EACH + bin % BINS_EACH;
}

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

// Address of the keys from row p of the tables on, as many as lie in its extent.
template <class T> DEVICE const T* keys_from(const step_score_args& a, const uint64_t* table, uint32_t p, uint32_t count) {
  uint64_t offset = ((uint64_t)a.plane * a.extent_rows + p % a.extent_rows) * a.key_bytes;
  return pointer_from<const T>(table[p / a.extent_rows] + offset, (uint64_t)count * a.key_bytes);
}

struct scored_row {
  float* scores;
  uint32_t* histogram;  // LDS
  uint32_t n;           // rows of keys
};
DEVICE void put_score(const scored_row& s, uint32_t p, float score) {
  if (p >= s.n) return;
  s.scores[p] = score;
  lds_add(&s.histogram[bin_place(order_key(score) >> BIN_SHIFT)], 1u);
}

// The query as fragments of matrix tiles in workgroup memory: 16 bytes of each work-item of a group side by side. Each group brings one pair of tiles.
template <class T> DEVICE void stage_query(const step_score_args& a, uint32_t row, words16* fragments) {
  constexpr uint32_t PAIRS = STEPS / 2, UNITS = tile_a<T>::WORDS / 4;
  static_assert(2 * PAIRS == SCORE_GROUPS, "a pair of tiles for each group");
  const T* q = (const T*)a.q + (uint64_t)row * a.heads * TILE_DIM;
  uint32_t h = tile_group() / PAIRS, k = tile_group() % PAIRS * 2;
  tile_a<T> pair[2];
  tile_pair(pair, [&](uint32_t j) { return h * TILE + j < a.heads ? q + (h * TILE + j) * TILE_DIM + k * TILE : (const T*)nullptr; });
  UNROLL
  for (uint32_t i = 0; i < 2; i++) {
    UNROLL
    for (uint32_t u = 0; u < UNITS; u++) {
      words16 word;
      UNROLL
      for (uint32_t j = 0; j < 4; j++) word.w[j] = pair[i].v[4 * u + j];
      fragments[((h * STEPS + k + i) * UNITS + u) * TILE_LANES + tile_lane()] = word;
    }
  }
}
template <class T> DEVICE tile_a<T> query_tile(const words16* fragments, uint32_t h, uint32_t k, uint32_t lane) {
  constexpr uint32_t UNITS = tile_a<T>::WORDS / 4;
  tile_a<T> tile;
  UNROLL
  for (uint32_t u = 0; u < UNITS; u++) {
    words16 word = fragments[((h * STEPS + k) * UNITS + u) * TILE_LANES + lane];
    UNROLL
    for (uint32_t j = 0; j < 4; j++) tile.v[4 * u + j] = word.w[j];
  }
  return tile;
}

// KEY_TILES tiles of 16 keys at a time on matrix tiles, by 32 lanes; the groups of all blocks in turn.
template <class T>
DEVICE void score_tiles(const step_score_args& a, const words16* fragments, const uint64_t* table, const float* gates, const scored_row& s) {
  uint32_t tiles = (s.n + TILE - 1u) / TILE, stride = a.blocks * SCORE_GROUPS * KEY_TILES;
  for (uint32_t first = (tile_group() * a.blocks + block_x()) * KEY_TILES; first < tiles; first += stride) {
    const T* keys[KEY_TILES];
    tile_b<T> key[KEY_TILES][STEPS];
    tile16<T> dot[KEY_TILES][2];
    UNROLL
    for (uint32_t t = 0; t < KEY_TILES; t++) keys[t] = keys_from<T>(a, table, (first + t < tiles ? first + t : first) * TILE, TILE);
    UNROLL
    for (uint32_t t = 0; t < KEY_TILES; t++) {
      UNROLL
      for (uint32_t k = 0; k < STEPS; k += 2) tile_pair(&key[t][k], keys[t] + k * TILE, TILE_DIM);
      UNROLL
      for (uint32_t h = 0; h < 2; h++) tile_clear(dot[t][h]);
    }
    uint32_t lane = opaque_item(tile_lane());  // else all of the query moves into registers
    UNROLL
    for (uint32_t k = 0; k < STEPS; k++) {
      UNROLL
      for (uint32_t h = 0; h < 2; h++) {
        tile_a<T> query = query_tile<T>(fragments, h, k, lane);
        UNROLL
        for (uint32_t t = 0; t < KEY_TILES; t++) tile_add(dot[t][h], query, key[t][k]);
      }
    }
    UNROLL
    for (uint32_t t = 0; t < KEY_TILES; t++) {
      tile16<T> sum;
      tile_clear(sum);
      UNROLL
      for (uint32_t h = 0; h < 2; h++) {
        UNROLL
        for (uint32_t i = 0; i < TILE_ELEMENTS; i++) {
          sum.v[i] = fma_f32(gates[h * TILE + sum.row(i)], max_f32(0.0f, dot[t][h].v[i] * a.key_scale), sum.v[i]);
        }
      }
      uint32_t column;
      float score = tile_column_sum(sum, &column);
      if (column < TILE) put_score(s, (first + t) * TILE + column, score);
    }
  }
}

// A key a work-item.
template <class T>
DEVICE void score_keys(const step_score_args& a, uint32_t row, const uint64_t* table, const float* gates, float* query, const scored_row& s) {
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

template <class T> DEVICE void score_row(const step_score_args& a) {
  constexpr bool TILES = tile_a<T>::WORDS <= 8;
  SHARED(float, gates, HEADS_MAX);
  SHARED(words16, counted, BINS / 4);
  SHARED(words16, query, QUERY_MAX / 4);  // as floats, or as fragments
  static_assert(!TILES || 2 * STEPS * tile_a<T>::WORDS * TILE_LANES <= QUERY_MAX, "the fragments fit");
  uint32_t t = thread_id(), row = block_y(), session = (uint32_t)((const int32_t*)a.sessions)[row];
  int32_t position = ((const int32_t*)a.positions)[row];
  float gate = t < a.heads ? ((const float*)a.gate)[(uint64_t)row * a.heads + t] * a.head_scale : 0.0f;
  for (uint32_t i = t; i < BINS / 4; i += SCORE_THREADS) counted[i] = {{0, 0, 0, 0}};
  if (t < HEADS_MAX) gates[t] = gate;
  bool tiled = TILES && a.dim == TILE_DIM && a.heads <= TILE_HEADS;
  if constexpr (TILES) {
    if (tiled) stage_query<T>(a, row, query);
  }
  block_sync();
  if (position < (int32_t)a.k) return;
  const uint64_t* table = (const uint64_t*)a.tables + (uint64_t)session * a.table_stride;
  uint32_t n = share::rows_of((uint32_t)position + 1u, a.extent_rows, a.side, a.sides);
  scored_row s = {(float*)a.scores + (uint64_t)row * a.score_stride, (uint32_t*)counted, n};
  if constexpr (TILES) {
    if (tiled) score_tiles<T>(a, query, table, gates, s);
  }
  if (!tiled) score_keys<T>(a, row, table, gates, (float*)query, s);
  block_sync();
  uint32_t* histogram = (uint32_t*)a.histogram + (uint64_t)row * BINS;
  for (uint32_t i = t; i < BINS / 4; i += SCORE_THREADS) {
    words16 four = counted[i];
    UNROLL
    for (uint32_t j = 0; j < 4; j++) {
      if (four.w[j]) global_add(&histogram[4 * i + j], four.w[j]);
    }
  }
}

// An entry: what may be selected, ranked by the key, then by position (on a side its row of keys), the lowest first; entries differ.
constexpr uint32_t POSITION_LAST = (1u << POSITION_BITS) - 1u;
DEVICE uint64_t entry_of(uint32_t key, uint32_t p) { return (uint64_t)key << POSITION_BITS | (POSITION_LAST - p); }
DEVICE uint32_t position_of(uint64_t entry) { return POSITION_LAST - ((uint32_t)entry & POSITION_LAST); }
DEVICE void load_bins(const uint32_t* histogram, uint32_t* counts) {
  words16 four = *(const words16*)(histogram + bin_place(BINS_EACH * (THREADS - 1u - thread_id())));
  UNROLL
  for (uint32_t i = 0; i < BINS_EACH; i++) counts[i] = four.w[i];
}

template <uint32_t N> DEVICE void load_scores(const step_topk_args& a, const float* scores, uint32_t first, uint32_t* bits) {
  UNROLL
  for (uint32_t i = 0; i < N; i += 4) load16(scores + (first < a.score_stride ? first + i : 0u), bits + i);
}

// Entries of positions [begin, stop) in ascending order. bits: the work-item's first N scores; those of the next span are on their way while one is
// sorted out. Returns how many entries there are.
template <uint32_t N>
DEVICE uint32_t list_entries(const step_topk_args& a, const float* scores, uint32_t begin, uint32_t stop, uint32_t bin, uint32_t* bits,
                             uint64_t* list, uint32_t* lds) {
  constexpr uint32_t SPAN = THREADS * N;
  uint32_t listed = 0;
  ROLLED
  for (uint32_t span = begin; span < stop; span += SPAN) {
    uint32_t first = span + thread_id() * N, total, count = 0, taken = 0, next[N] = {};
    if (span + SPAN < stop) load_scores<N>(a, scores, first + SPAN, next);
    UNROLL
    for (uint32_t i = 0; i < N; i++) {
      bits[i] = order_key(float_of(bits[i]));
      taken |= first + i < stop && bits[i] >> BIN_SHIFT >= bin ? 1u << i : 0u;
      count += taken >> i & 1u;
    }
    uint64_t* to = list + begin + listed + block_scan<THREADS>(count, lds, &total);
    UNROLL
    for (uint32_t i = 0; i < N; i++) {
      if (taken >> i & 1u) *to++ = entry_of(bits[i], first + i);
    }
    listed += total;
    UNROLL
    for (uint32_t i = 0; i < N; i++) bits[i] = next[i];
  }
  return listed;
}

// How a row's entries are listed, and how many of them are selected. blocks: 0 in all blocks but the last of a row.
struct listing {
  uint32_t blocks, reach, count;
};
// The entries of a row, those of one block after those of the other.
struct listed {
  const uint64_t* entries;
  const uint32_t* starts;  // LDS: of the blocks
  uint32_t blocks, reach;  // a block's entries start `reach` after those of the block before
  uint32_t step;           // the largest power of two below `blocks`
  uint32_t count;          // 0: starts are not known, for the first THREADS * HELD entries are all
};
// HELD entries from `first` on; returns a bit for each of them that there is.
DEVICE uint32_t load_entries(const listed& l, uint32_t first, uint64_t* e) {
  uint32_t block = 0, found = 0;
  if (first >= l.count) return 0;
  ROLLED
  for (uint32_t step = l.step; step; step /= 2) {
    if (block + step < l.blocks && l.starts[block + step] <= first) block += step;
  }
  UNROLL
  for (uint32_t i = 0; i < HELD; i++) {
    while (block + 1u < l.blocks && l.starts[block + 1u] <= first + i) block++;
    bool inside = first + i < l.count;
    e[i] = l.entries[inside ? (uint64_t)block * l.reach + (first + i - l.starts[block]) : 0u];
    found |= inside ? 1u << i : 0u;
  }
  return found;
}

// Counts the digits at `shift` of those entries that have the prefix above it. Equal digits in a row are added at once: all at one address would be
// slow.
DEVICE void count_digits(const uint64_t* held, uint32_t valid, uint64_t prefix, uint32_t above, uint32_t shift, uint32_t* histogram) {
  uint32_t run = 0, run_digit = 0;
  UNROLL
  for (uint32_t i = 0; i < HELD; i++) {
    uint32_t digit = (uint32_t)(held[i] >> shift) & (BINS - 1u);
    bool counted = (valid >> i & 1u) && held[i] >> above == prefix;
    if (counted && run && digit != run_digit) {
      lds_add(&histogram[run_digit], run);
      run = 0;
    }
    run_digit = counted ? digit : run_digit;
    run += counted ? 1u : 0u;
  }
  if (run) lds_add(&histogram[run_digit], run);
}

// Writes an entry to its place: the position, or in a list key and position of the whole.
DEVICE void put_entry(const step_topk_args& a, uint64_t place, uint64_t entry) {
  uint32_t row = position_of(entry);
  if (a.sides == 1) ((int32_t*)a.selected)[place] = (int32_t)row;
  else ((uint64_t*)a.best)[place] = merge::entry_of((uint32_t)(entry >> POSITION_BITS), share::position_of(row, a.extent_rows, a.side, a.sides));
}

// Writes those entries that are `lowest` or above, behind the `done` ones before them; returns how many there are now. Never more than k, whatever
// the histogram was.
DEVICE uint32_t select_entries(const step_topk_args& a, uint32_t row, const uint64_t* held, uint32_t valid, uint64_t lowest, uint32_t done,
                               uint32_t* lds) {
  uint32_t chosen = 0, total;
  UNROLL
  for (uint32_t i = 0; i < HELD; i++) chosen |= (valid >> i & 1u) && held[i] >= lowest ? 1u << i : 0u;
  uint32_t rank = done + block_scan<THREADS>(bit_count(chosen), lds, &total);
  UNROLL
  for (uint32_t i = 0; i < HELD; i++) {
    if ((chosen >> i & 1u) && rank < a.k) put_entry(a, (uint64_t)row * a.k + rank++, held[i]);
  }
  return done + total;
}

// Chooses the `limit.wanted` best of the bin's entries digit by digit, from the highest on, until all of the last digit are wanted; then writes the
// selection, or with `drawn` nothing. held: the first entries of the work-item, as `valid` says; they are loaded where l.count is known.
DEVICE void choose(const step_topk_args& a, uint32_t row, const listed& l, const threshold& limit, uint64_t* held, uint32_t valid, uint32_t* histogram,
                   uint32_t* lds) {
  SHARED(threshold, found, 1);
  uint32_t left = limit.wanted, above = RANK_BITS, done = 0, counts[BINS_EACH];
  uint64_t prefix = limit.bin, lowest = prefix << RANK_BITS;
  bool open = left != limit.weight, loaded = l.count == 0;
  while (true) {
    uint32_t shift = above > DIGIT_BITS ? above - DIGIT_BITS : 0u;
    for (uint32_t window = 0; window == 0 || window < l.count; window += THREADS * HELD) {
      uint64_t seen[HELD];
      uint32_t there = valid;
      UNROLL
      for (uint32_t i = 0; i < HELD; i++) seen[i] = held[i];
      if (window || !loaded) there = load_entries(l, window + thread_id() * HELD, seen);
      if (!loaded) {
        UNROLL
        for (uint32_t i = 0; i < HELD; i++) held[i] = seen[i];
        valid = there;
        loaded = true;
      }
      if (open) count_digits(seen, there, prefix, above, shift, histogram);
      else if (!a.drawn) done = select_entries(a, row, seen, there, lowest, done, lds);
    }
    if (!open) return;
    block_sync();
    words16* mine = (words16*)histogram + (THREADS - 1u - thread_id());
    words16 counted = *mine;
    *mine = {{0, 0, 0, 0}};
    UNROLL
    for (uint32_t i = 0; i < BINS_EACH; i++) counts[i] = counted.w[i];
    find_bin<THREADS>(counts, left, found, lds);
    prefix = prefix << (above - shift) | found[0].bin;
    lowest = prefix << shift;
    left = found[0].wanted;
    above = shift;
    open = left != found[0].weight && shift;
  }
}

// What a work-item of a row's last block asks for first: HELD entries of those that a block lists, and how many those are.
struct asked_entries {
  uint64_t held[HELD];
  uint32_t mine, there;  // entries of block thread_id(), and of the block that the held ones are of
};
// The first `share` entries of every block, while their number is not known.
struct sharing {
  uint32_t share, source, at;  // the work-item's are those from `at` on of block `source`
};
DEVICE sharing share_entries(uint32_t blocks) {
  uint32_t share = THREADS / blocks * HELD, first = thread_id() * HELD;
  return {share, first / share, first % share};
}
DEVICE asked_entries ask_entries(const step_topk_args& a, uint32_t row, const listing& from) {
  asked_entries asked;
  sharing own = share_entries(from.blocks);
  const uint64_t* entries = (const uint64_t*)a.entries + (uint64_t)row * a.score_stride;
  const uint32_t* listed_by = (const uint32_t*)a.entry_counts + (uint64_t)row * a.count_stride;
  UNROLL
  for (uint32_t i = 0; i < HELD; i += 2) {
    uint64_t place = (uint64_t)own.source * from.reach + own.at + i;
    bool there = own.source < from.blocks && place < a.score_stride;
    words16 pair = *(const words16*)(entries + (there ? place : 0u));  // a row of entries is an even number
    asked.held[i] = (uint64_t)pair.w[1] << 32 | pair.w[0];
    asked.held[i + 1] = (uint64_t)pair.w[3] << 32 | pair.w[2];
  }
  asked.mine = thread_id() < from.blocks ? listed_by[thread_id()] : 0u;
  asked.there = own.source < from.blocks ? listed_by[own.source] : 0u;
  return asked;
}

// Which of the held entries there are: all of the row, ascending. If a block has more than its share, where all of them lie. histogram, the row's
// part of `cleared`: zeros after.
DEVICE listed settle_entries(const step_topk_args& a, uint32_t row, const listing& from, const asked_entries& asked, uint32_t* valid,
                             words16* histogram, uint32_t* lds) {
  SHARED(uint32_t, starts, BLOCKS_MAX);
  SHARED(uint32_t, more, 1);
  sharing own = share_entries(from.blocks);
  uint32_t t = thread_id();
  ((words16*)a.cleared)[(uint64_t)row * (BINS / 4) + t] = {{0, 0, 0, 0}};
  histogram[t] = {{0, 0, 0, 0}};
  if (t == 0) more[0] = 0;
  block_sync();
  if (asked.mine > own.share) more[0] = 1;
  *valid = 0;
  UNROLL
  for (uint32_t i = 0; i < HELD; i++) *valid |= own.at + i < asked.there ? 1u << i : 0u;
  block_sync();
  listed l = {(const uint64_t*)a.entries + (uint64_t)row * a.score_stride, starts, from.blocks, from.reach, 0, 0};
  if (more[0]) {
    starts[t] = block_scan<THREADS>(asked.mine, lds, &l.count);
    for (l.step = 1; 2u * l.step < from.blocks; l.step *= 2) {
    }
    block_sync();
  }
  return l;
}

// What the last block of a row does; `from.count` entries are selected.
DEVICE void finish_row(const step_topk_args& a, uint32_t row, const listing& from, const threshold& limit, uint32_t* lds) {
  SHARED(words16, histogram, BINS / 4);
  uint32_t t = thread_id(), valid, count = from.count;
  asked_entries asked = ask_entries(a, row, from);
  int32_t drawn[K_MAX / THREADS] = {};
  if (a.drawn) {
    const int32_t* draw = (const int32_t*)a.drawn + (uint64_t)((*(const uint32_t*)a.draw_index + row) % a.draws) * a.k;
    UNROLL
    for (uint32_t i = 0; i < K_MAX / THREADS; i++) drawn[i] = draw[t + i * THREADS < a.k ? t + i * THREADS : 0u];
  }
  listed l = settle_entries(a, row, from, asked, &valid, histogram, lds);
  choose(a, row, l, limit, asked.held, valid, (uint32_t*)histogram, lds);
  if (a.drawn) {
    uint32_t some = 0;
    UNROLL
    for (uint32_t i = 0; i < K_MAX / THREADS; i++) {
      if (t + i * THREADS >= a.k) break;
      ((int32_t*)a.selected)[(uint64_t)row * a.k + t + i * THREADS] = drawn[i];
      some += drawn[i] >= 0 ? 1u : 0u;
    }
    block_scan<THREADS>(some, lds, &count);
  }
  if (t == 0) ((int32_t*)a.counts)[row] = (int32_t)count;
}

// The first position + 1 positions, all there are; on a side an empty list.
DEVICE void select_all(const step_topk_args& a, uint32_t row, int32_t position) {
  if (a.sides != 1) {
    if (thread_id() == 0) ((int32_t*)a.counts)[row] = 0;
    return;
  }
  for (uint32_t i = thread_id(); i < a.k; i += THREADS) ((int32_t*)a.selected)[(uint64_t)row * a.k + i] = (int32_t)i <= position ? (int32_t)i : -1;
  if (thread_id() == 0) ((int32_t*)a.counts)[row] = position + 1;
}

// What every block of a row does, with N positions a work-item and span. The first blocks load histogram and scores before they know the row's
// position.
template <uint32_t N> DEVICE listing list_row(const step_topk_args& a, uint32_t row, threshold* limit, uint32_t* lds) {
  constexpr uint32_t SPAN = THREADS * N;
  uint32_t t = thread_id(), counts[BINS_EACH], bits[N];
  bool one_span = (uint64_t)a.blocks * SPAN >= a.score_stride, eager = one_span && block_x() < EAGER_BLOCKS;
  const float* scores = (const float*)a.scores + (uint64_t)row * a.score_stride;
  const uint32_t* histogram = (const uint32_t*)a.histogram + (uint64_t)row * BINS;
  int32_t position = ((const int32_t*)a.positions)[row];
  if (eager) {
    load_bins(histogram, counts);
    load_scores<N>(a, scores, block_x() * SPAN + t * N, bits);
  }
  block_sync();  // else the loads move behind the wait for the position
  uint32_t n = share::rows_of((uint32_t)(position + 1), a.extent_rows, a.side, a.sides), spans = (n + SPAN - 1u) / SPAN;
  uint32_t reach = one_span ? SPAN : (spans + a.blocks - 1u) / a.blocks * SPAN;
  if (position < (int32_t)a.k || n == 0) {
    if (block_x() == 0) select_all(a, row, position);
    return {0, 0, 0};
  }
  if (block_x() * reach >= n) return {0, 0, 0};
  uint32_t begin = block_x() * reach, stop = begin + reach < n ? begin + reach : n, blocks = (n + reach - 1u) / reach;
  if (!eager) {
    load_bins(histogram, counts);
    load_scores<N>(a, scores, begin + t * N, bits);
  }
  uint32_t wanted = n < a.k ? n : a.k;
  find_bin<THREADS>(counts, wanted, limit, lds);
  uint64_t* entries = (uint64_t*)a.entries + (uint64_t)row * a.score_stride;
  uint32_t count = list_entries<N>(a, scores, begin, stop, limit[0].bin, bits, entries, lds);
  if (t == 0) ((uint32_t*)a.entry_counts)[(uint64_t)row * a.count_stride + block_x()] = count;
  return {arrives_last((uint32_t*)a.arrivals + row, blocks) ? blocks : 0u, reach, wanted};
}

DEVICE void select_row(const step_topk_args& a, uint32_t row) {
  SHARED(uint32_t, lds, BLOCK_SCAN);
  SHARED(threshold, limit, 1);
  bool few = (uint64_t)a.blocks * THREADS * EACH >= a.score_stride;
  listing l = few ? list_row<EACH>(a, row, limit, lds) : list_row<EACH_LONG>(a, row, limit, lds);
  if (l.blocks) finish_row(a, row, l, limit[0], lds);
}

}  // namespace step_select

// LAUNCH step_score_f32 block=256 bins=4096 heads_max=64 dim_max=128 query_max=4096 tile=16
KERNEL(step_score_f32, step_score_args, 256) { step_select::score_row<float>(a); }
// LAUNCH step_score_bf16 block=256 bins=4096 heads_max=64 dim_max=128 query_max=4096 tile=16
EARLY_KERNEL(step_score_bf16, step_score_args, 256, 2) {
  next_may_begin();
  previous_done();
  step_select::score_row<bf16>(a);
}

// LAUNCH step_topk block=1024 k_max=2048 blocks_max=1024
KERNEL(step_topk, step_topk_args, 1024) { step_select::select_row(a, block_y()); }
