// step_attention.hip - absorbed MLA attention of a decode step (docs/decisions/0004-step-graph.md) in two launches.
//   step_attend   one block a (split of 64 planned rows, 16 heads, query row):
//     s[n] = (<q_latent[r, h], latent[n]> + <q_rope[r, h], rope[n]>) * scale,  top = max s,  p[n] = exp(s[n] - top)
//     partial[r, h, split] = sum p[n] * latent[n],  mass = sum p[n]
//   step_expand   one block a (query row, 128 columns of v, head):
//     o_latent = T(sum of exp(top_s - top) * partial_s / sum of exp(top_s - top) * mass_s),  o[r, h] = T(o_latent @ wv[h]^T)
//
// step_attend: products on matrix tiles of T, sums and softmax in f32. The rows of a split pass through LDS as T, 32 (bf16) or 16 (f32) at a time,
// with an online softmax; all loads of a bf16 block are issued before the first is waited for. Codes of a q8g64 row are exact in bf16: the scale of
// a group of 64 columns is applied to the group's sum for s, and to p, before it is rounded to T, for the output. Rows past counts[r] are
// zeros of weight 0. Order of additions of s: four quarters (steps of 16 columns 8q .. 8q + 7, then step 32 + q), each ascending, group by group
// where rows have scales; quarters ascending. Mass: a butterfly over n % 16, pass by pass. Output: n ascending in tiles of 16.
// That of q8g64 rows and T = bf16 on sm_90: attend_groups.h, of several rows attend_rows.h.
// step_expand: splits ascending; o as decision 0004 with LANES = 4.
// Limits: latent <= 512, latent + rope <= 576, both multiples of 8, as are the offsets and strides of q; q8g64 rows: latent 512.
#include "portable.h"
#include "attend_groups.h"
#include "attend_rows.h"
#include "gemv.h"
#include "row_format.h"
#include "weight_format.h"

namespace step_mla {

constexpr float LOWEST = -__builtin_inff();
constexpr uint32_t THREADS = 256;
constexpr uint32_t HEADS = TILE;  // a block
constexpr uint32_t SPLIT = 64;    // planned rows a block
constexpr uint32_t LATENT_MAX = 512, WIDTH_MAX = 576;
constexpr uint32_t GROUP = Q8_GROUP, GROUP_STEPS = GROUP / TILE;
constexpr uint32_t GROUPS = LATENT_MAX / GROUP, SCALE_STRIDE = GROUPS + 1;
constexpr uint32_t QUARTERS = 4;
constexpr uint32_t QUARTER_STEPS = WIDTH_MAX / TILE / QUARTERS;  // the last of them is step 32 + quarter

static_assert(GROUPS == THREADS / TILE_LANES, "a tile group has the output columns of one group of 64");
static_assert(THREADS == HEADS * 16, "16 work-items do the softmax of a head");

// Rows in LDS as T.
template <class T> struct staged {
  static constexpr uint32_t ROWS = 64 / sizeof(T);              // at a time
  static constexpr uint32_t STRIDE = WIDTH_MAX + 16 / sizeof(T);  // elements; see portable_tiles.h on banks
  static constexpr uint32_t LANES = THREADS / ROWS;             // work-items that load a row
  static constexpr uint32_t PASSES = SPLIT / ROWS;
  static constexpr uint32_t P_STRIDE = ROWS + 4;                // floats
  static constexpr bool FAST = tile_a<T>::WORDS <= 8;           // matrix hardware: registers hold the query and all rows
  static constexpr uint32_t HELD = FAST ? PASSES : 1;           // passes whose rows are loaded at once
};

DEVICE void put_word(const uint32_t* word, words16* to) {
  UNROLL
  for (uint32_t i = 0; i < 4; i++) to->w[i] = word[i];
}

// How the 16-byte words of a row get into LDS: word w of a row to `to` [width], scales to `scales` [8]. Every row has WORDS_MIN words or more.
template <class T> struct plain_words {
  using format = plain_row<T>;
  static constexpr bool SCALED = false;
  static constexpr uint32_t WORDS_MIN = 0, WORDS_MAX = WIDTH_MAX * sizeof(T) / 16;
  DEVICE void put(const uint32_t* word, uint32_t w, uint32_t, T* to, float*) { put_word(word, (words16*)to + w); }
};

DEVICE void put_values(const float* v, float* to) {
  UNROLL
  for (uint32_t i = 0; i < 4; i++) {
    uint32_t word[4];
    UNROLL
    for (uint32_t j = 0; j < 4; j++) word[j] = bits_of(v[4 * i + j]);
    put_word(word, (words16*)to + i);
  }
}
// Values that bf16 holds exactly.
DEVICE void put_values(const float* v, bf16* to) {
  UNROLL
  for (uint32_t i = 0; i < 2; i++) {
    uint32_t word[4];
    UNROLL
    for (uint32_t j = 0; j < 4; j++) word[j] = bits_of(v[8 * i + 2 * j]) >> 16 | (bits_of(v[8 * i + 2 * j + 1]) & 0xffff0000u);
    put_word(word, (words16*)to + i);
  }
}

DEVICE void put_bf16(const uint32_t* word, bf16* to) { put_word(word, (words16*)to); }
DEVICE void put_bf16(const uint32_t* word, float* to) {
  UNROLL
  for (uint32_t i = 0; i < 2; i++) {
    uint32_t wide[4] = {word[2 * i] << 16, word[2 * i] & 0xffff0000u, word[2 * i + 1] << 16, word[2 * i + 1] & 0xffff0000u};
    put_word(wide, (words16*)to + i);
  }
}

// Rows are multiples of 16 bytes and rope is a multiple of 8, so there are 8 scales: latent is 512, and one word holds them.
template <class T> struct q8g64_words {
  using format = q8g64_row;
  static constexpr bool SCALED = true;
  static constexpr uint32_t WORDS_MIN = (LATENT_MAX + GROUPS * 2) / 16, WORDS_MAX = WORDS_MIN + (WIDTH_MAX - LATENT_MAX) * 2 / 16;
  DEVICE void put(const uint32_t* word, uint32_t w, uint32_t latent, T* to, float* scales) {
    if (16 * w < latent) {
      float v[16];
      q8g64_weights::expand(word, v);
      put_values(v, to + 16 * w);
      return;
    }
    uint32_t word_of_tail = w - latent / 16;
    if (word_of_tail == 0) {
      UNROLL
      for (uint32_t j = 0; j < 8; j++) scales[j] = f16_value((uint16_t)(word[j / 2] >> (16 * (j % 2))));
      return;
    }
    put_bf16(word, to + latent + 8 * (word_of_tail - 1));
  }
};

// This work-item's words of a row. No branch, so that all loads leave together: past the end of the row the last word is read once more.
template <class T, class Words> DEVICE void load_row(const step_attend_args& a, uint64_t ref, uint32_t row_bytes, uint32_t (*raw)[4]) {
  constexpr uint32_t LANES = staged<T>::LANES;
  const words16* from = row_pointer<const words16>(ref, a.offsets, row_bytes);
  uint32_t lane = thread_id() % LANES, last = row_bytes / 16 - 1;
  UNROLL
  for (uint32_t i = 0; i * LANES < Words::WORDS_MAX; i++) {
    bool sure = (i + 1) * LANES <= Words::WORDS_MIN;
    const words16* word = from + (sure || lane + i * LANES < last ? lane + i * LANES : last);
    UNROLL
    for (uint32_t j = 0; j < 4; j++) raw[i][j] = word->w[j];
  }
}

// Step i of a quarter as a fragment: 16 columns of [q_latent | rope part of q] for the heads of the block.
template <class T> DEVICE tile_a<T> load_query(const step_attend_args& a, uint32_t row, uint32_t first_head, uint32_t quarter, uint32_t i) {
  uint32_t step = i < 8 ? 8 * quarter + i : 32 + quarter;
  return tile_a<T>::runs([&](uint32_t h, uint32_t half) -> const T* {
    uint32_t c = TILE * step + 8 * half, head = first_head + h;
    uint64_t at = (uint64_t)row * a.heads + head;
    if (head >= a.heads || c >= a.latent + a.rope) return nullptr;
    return c < a.latent ? (const T*)a.q_latent + at * a.latent + c : (const T*)a.q + at * a.q_head_stride + a.q_rope_offset + (c - a.latent);
  });
}

// Adds step i of a quarter to `total`, by way of `sum` where a group has scales.
template <class T, class Words>
DEVICE void score_step(uint32_t width, uint32_t quarter, uint32_t i, const tile_a<T>& query, const T* rows, const float* scales, tile16<T>& total,
                       tile16<T>& sum) {
  uint32_t step = i < 8 ? 8 * quarter + i : 32 + quarter;
  bool scaled = Words::SCALED && i < 8;
  if (scaled && i % GROUP_STEPS == 0) tile_clear(sum);
  if (TILE * step < width) tile_add(scaled ? sum : total, query, tile_b<T>::load(rows + TILE * step, staged<T>::STRIDE));
  if (!scaled || i % GROUP_STEPS != GROUP_STEPS - 1) return;
  UNROLL
  for (uint32_t e = 0; e < TILE_ELEMENTS; e++) total.v[e] = fma_f32(scales[total.col(e) * SCALE_STRIDE + step / GROUP_STEPS], sum.v[e], total.v[e]);
}

// part[quarter, h, n]: a quarter of <q, row n> for 16 rows, by one tile group.
template <class T, class Words>
DEVICE void score(const step_attend_args& a, uint32_t first_head, const tile_a<T>* query, const T* rows, const float* scales, float* part) {
  constexpr uint32_t TILES = staged<T>::ROWS / TILE;
  uint32_t quarter = tile_group() / TILES, first = tile_group() % TILES * TILE, width = a.latent + a.rope;
  if (quarter >= QUARTERS) return;
  const T* base = rows + first * staged<T>::STRIDE;
  tile16<T> total, sum;
  tile_clear(total);
  tile_clear(sum);
  if constexpr (staged<T>::FAST) {
    UNROLL
    for (uint32_t i = 0; i < QUARTER_STEPS; i++) score_step<T, Words>(width, quarter, i, query[i], base, scales + first * SCALE_STRIDE, total, sum);
  } else {
    ROLLED
    for (uint32_t i = 0; i < QUARTER_STEPS; i++)
      score_step<T, Words>(width, quarter, i, load_query<T>(a, block_z(), first_head, quarter, i), base, scales + first * SCALE_STRIDE, total, sum);
  }
  UNROLL
  for (uint32_t e = 0; e < TILE_ELEMENTS; e++)
    part[(quarter * HEADS + total.row(e)) * staged<T>::P_STRIDE + first + total.col(e)] = total.v[e];
}

// Softmax of a pass: work-item 16 h + l has rows l, l + 16, .. of head h. part[0, h, n] becomes p; decay[h] what earlier sums are multiplied by.
template <class T> DEVICE void weigh(float scale, uint32_t valid, float* part, float* decay, float& top, float& mass) {
  constexpr uint32_t PER = staged<T>::ROWS / 16, QUARTER = HEADS * staged<T>::P_STRIDE;
  uint32_t h = thread_id() / 16, l = thread_id() % 16;
  float* at = part + h * staged<T>::P_STRIDE + l;
  float s[PER], pass_top = LOWEST, sum[1] = {0.0f};
  UNROLL
  for (uint32_t i = 0; i < PER; i++) {
    const float* d = at + 16 * i;
    s[i] = (((d[0] + d[QUARTER]) + d[2 * QUARTER]) + d[3 * QUARTER]) * scale;
    if (l + 16 * i < valid) pass_top = max_f32(pass_top, s[i]);
  }
  UNROLL
  for (uint32_t m = 8; m; m >>= 1) pass_top = max_f32(pass_top, shuffle_xor(pass_top, m));
  pass_top = max_f32(top, pass_top);
  UNROLL
  for (uint32_t i = 0; i < PER; i++) {
    float p = l + 16 * i < valid ? exp_f32(s[i] - pass_top) : 0.0f;
    at[16 * i] = p;
    sum[0] += p;
  }
  lanes_sum<16>(sum);
  float keep = exp_f32(top - pass_top);
  mass = fma_f32(mass, keep, sum[0]);
  top = pass_top;
  if (l == 0) decay[h] = keep;
}

// acc += p * latent of a pass, tile group g the columns of group g.
template <class T, class Words>
DEVICE void accumulate(uint32_t latent, const T* rows, const float* scales, const float* part, const float* decay, tile16<T>* acc) {
  constexpr uint32_t ROWS = staged<T>::ROWS, STRIDE = staged<T>::STRIDE;
  uint32_t group = tile_group();
  if (GROUP * group >= latent) return;
  UNROLL
  for (uint32_t e = 0; e < TILE_ELEMENTS; e++) {
    float keep = decay[acc[0].row(e)];
    UNROLL
    for (uint32_t j = 0; j < GROUP_STEPS; j++) acc[j].v[e] *= keep;
  }
  UNROLL
  for (uint32_t first = 0; first < ROWS; first += TILE) {
    tile_a<T> p = tile_a<T>::make([&](uint32_t h, uint32_t n) {
      float weight = part[h * staged<T>::P_STRIDE + first + n];
      return Words::SCALED ? weight * scales[(first + n) * SCALE_STRIDE + group] : weight;
    });
    UNROLL
    for (uint32_t j = 0; j < GROUP_STEPS; j++) {
      uint32_t c = GROUP * group + TILE * j;
      if (c < latent) tile_add(acc[j], p, tile_b<T>::transposed(rows + first * STRIDE + c, STRIDE));
    }
  }
}

template <class T> DEVICE void store_partial(const step_attend_args& a, uint32_t first_head, const tile16<T>* acc, float top, float mass) {
  uint32_t split = block_x();
  uint64_t first = (uint64_t)block_z() * a.heads + first_head;
  UNROLL
  for (uint32_t j = 0; j < GROUP_STEPS; j++) {
    UNROLL
    for (uint32_t e = 0; e < TILE_ELEMENTS; e++) {
      uint32_t h = acc[j].row(e), c = GROUP * tile_group() + TILE * j + acc[j].col(e);
      if (first_head + h < a.heads && c < a.latent) ((float*)a.partial)[((first + h) * a.splits + split) * a.latent + c] = acc[j].v[e];
    }
  }
  uint32_t h = thread_id() / 16;
  if (thread_id() % 16 == 0 && first_head + h < a.heads) {
    ((float*)a.tops)[(first + h) * a.splits + split] = top;
    ((float*)a.masses)[(first + h) * a.splits + split] = mass;
  }
}

// T: of queries and tiles. Words: of a row format.
template <class T, class Words> DEVICE void attend(const step_attend_args& a) {
  using S = staged<T>;
  constexpr uint32_t LOADS = (Words::WORDS_MAX + S::LANES - 1) / S::LANES;
  SHARED(words16, row_memory, S::ROWS * S::STRIDE * sizeof(T) / 16);
  SHARED(float, part, QUARTERS * HEADS * S::P_STRIDE);
  SHARED(float, scales, S::ROWS * SCALE_STRIDE);
  SHARED(float, decay, HEADS);
  T* rows = (T*)row_memory;
  uint32_t t = thread_id(), row = block_z(), first_head = block_y() * HEADS, first = block_x() * SPLIT;
  uint32_t n = t / S::LANES, lane = t % S::LANES, width = a.latent + a.rope, row_bytes = Words::format::bytes(a.latent, a.rope);
  const uint64_t* plan = (const uint64_t*)a.plan + (uint64_t)row * a.k + first;
  int32_t planned = ((const int32_t*)a.counts)[row];
  uint64_t refs[S::HELD], some_ref = plan[0];
  UNROLL
  for (uint32_t i = 0; i < S::HELD; i++) refs[i] = first + n + i * S::ROWS < a.k ? plan[n + i * S::ROWS] : some_ref;
  if (planned <= (int32_t)first) return;
  uint32_t left = (uint32_t)planned - first;

  uint32_t raw[S::HELD][LOADS][4];
  if (S::FAST) {
    UNROLL
    for (uint32_t i = 0; i < S::HELD; i++) load_row<T, Words>(a, n + i * S::ROWS < left ? refs[i] : some_ref, row_bytes, raw[i]);
  }
  tile_a<T> query[S::FAST ? QUARTER_STEPS : 1];
  if (width % TILE && lane == 0) {  // the half step that no word of a row covers
    for (uint32_t i = 0; i < 8; i++) store_f32(rows + n * S::STRIDE + width + i, 0.0f);
  }

  tile16<T> acc[GROUP_STEPS];
  UNROLL
  for (uint32_t j = 0; j < GROUP_STEPS; j++) tile_clear(acc[j]);
  float top = LOWEST, mass = 0.0f;
  ROLLED
  for (uint32_t done = 0; done < SPLIT && done < left; done += S::HELD * S::ROWS) {
    if (!S::FAST) load_row<T, Words>(a, done + n < left ? plan[done + n] : some_ref, row_bytes, raw[0]);
    UNROLL
    for (uint32_t i = 0; i < S::HELD; i++) {
      uint32_t start = done + i * S::ROWS;
      if (start >= left) continue;
      if (S::FAST) {  // again in each pass: held over all of them it would cost a block a multiprocessor
        UNROLL
        for (uint32_t j = 0; j < QUARTER_STEPS; j++) query[S::FAST ? j : 0] = load_query<T>(a, row, first_head, tile_group() / (S::ROWS / TILE), j);
      }
      UNROLL
      for (uint32_t w = 0; w < LOADS; w++) {
        uint32_t word[4];  // rows past the plan are zeros: nothing of theirs can reach a sum
        UNROLL
        for (uint32_t j = 0; j < 4; j++) word[j] = start + n < left ? raw[i][w][j] : 0u;
        uint32_t at = lane + w * S::LANES;
        bool sure = (w + 1) * S::LANES <= Words::WORDS_MIN;
        if (sure || 16 * at < row_bytes) Words::put(word, at, a.latent, rows + n * S::STRIDE, scales + n * SCALE_STRIDE);
      }
      block_sync();
      score<T, Words>(a, first_head, query, rows, scales, part);
      block_sync();
      weigh<T>(a.scale, left - start, part, decay, top, mass);
      block_sync();
      accumulate<T, Words>(a.latent, rows, scales, part, decay, acc);
      block_sync();
    }
  }
  store_partial<T>(a, first_head, acc, top, mass);
}

#if defined(TILE_MMA)
static_assert(attend_groups::SPLIT == SPLIT && attend_groups::HEADS == HEADS, "what step_expand and the launch expect");
#endif

}  // namespace step_mla

// LAUNCH step_attend_f32_f32 block=256 heads=16 split=64 latent_max=512 width_max=576
KERNEL(step_attend_f32_f32, step_attend_args, 256) { step_mla::attend<float, step_mla::plain_words<float>>(a); }
// LAUNCH step_attend_bf16_bf16 block=256 heads=16 split=64 latent_max=512 width_max=576
KERNEL(step_attend_bf16_bf16, step_attend_args, 256) { step_mla::attend<bf16, step_mla::plain_words<bf16>>(a); }
// LAUNCH step_attend_f32_q8g64 block=256 heads=16 split=64 latent_max=512 width_max=576
KERNEL(step_attend_f32_q8g64, step_attend_args, 256) { step_mla::attend<float, step_mla::q8g64_words<float>>(a); }
// step_attend_one_*, step_expand_one_*: the same for launches that have no more blocks than the device multiprocessors. On sm_90 they take so many
// registers that a multiprocessor holds one: where launches overlap, two blocks of a launch would else share one while others idle.
DEVICE void step_attend_q8g64(const step_attend_args& a) {
  next_may_begin();
#if defined(TILE_MMA)
  attend_groups::attend(a);
#else
  previous_done();
  step_mla::attend<bf16, step_mla::q8g64_words<bf16>>(a);
#endif
}
// LAUNCH step_attend_bf16_q8g64 block=256 heads=16 split=64 latent_max=512 width_max=576
EARLY_KERNEL(step_attend_bf16_q8g64, step_attend_args, 256, 2) { step_attend_q8g64(a); }
// Of more blocks than run at once, two a multiprocessor: three, which costs some instructions.
// LAUNCH step_attend_many_bf16_q8g64 block=256 heads=16 split=64 latent_max=512 width_max=576
EARLY_KERNEL(step_attend_many_bf16_q8g64, step_attend_args, 256, 3) { step_attend_q8g64(a); }
// LAUNCH step_attend_one_bf16_q8g64 block=256 heads=16 split=64 latent_max=512 width_max=576
EARLY_KERNEL(step_attend_one_bf16_q8g64, step_attend_args, 256, 1) { step_attend_q8g64(a); }

namespace step_expansion {

constexpr uint32_t SPLIT = step_mla::SPLIT, SPLITS_MAX = 128, LATENT_MAX = step_mla::LATENT_MAX;
constexpr float LOWEST = step_mla::LOWEST;
constexpr uint32_t LANES = 4;                  // of an output: gemv::lanes_of below LONG_K
constexpr uint32_t COLUMNS = LATENT_MAX / LANES;  // of v, a block
constexpr uint32_t JOINED = 16;                // splits whose values are loaded at once
constexpr uint32_t DEPTH = 4;                  // rounds of weights in flight: half of a q8g64 row of 512

static_assert(LATENT_MAX < gemv::LONG_K, "an output has four lanes");

// A block has LATENT_MAX / PER work-items, each of which joins PER columns of the latent and has a part of PER outputs.
template <uint32_t PER> constexpr uint32_t THREADS = LATENT_MAX / PER;
template <uint32_t PER> constexpr uint32_t TOGETHER = THREADS<PER> / LANES;  // outputs side by side

template <uint32_t PER> struct Columns {
  uint32_t word[PER];
};
template <uint32_t PER> DEVICE Columns<PER> load_columns(const float* from) {
  Columns<PER> to;
  if constexpr (PER == 2) {
    uint64_t both = *(const uint64_t*)from;
    to.word[0] = (uint32_t)both;
    to.word[1] = (uint32_t)(both >> 32);
  } else {
    to.word[0] = bits_of(*from);
  }
  return to;
}

// The columns of splits [start, start + N), of the last that there is where there are fewer.
template <uint32_t PER, uint32_t N> DEVICE void load_partial(const float* from, const step_expand_args& a, uint32_t start, Columns<PER> (&to)[N]) {
  UNROLL
  for (uint32_t i = 0; i < N; i++) {
    uint32_t split = start + i < a.splits ? start + i : a.splits - 1;
    to[i] = load_columns<PER>(from + (uint64_t)split * a.latent);
  }
}

// stats: weights and masses of the splits; mass, sum: of those joined so far.
template <uint32_t PER> struct Joined {
  float mass, sum[PER];
};

// Adds splits [start, start + N) as far as they are used: what lies past them may be anything.
template <uint32_t PER, uint32_t N>
DEVICE void add_partial(Columns<PER> (&values)[N], uint32_t start, uint32_t used, const float* stats, Joined<PER>& joined) {
  if (start + N > used) {
    UNROLL
    for (uint32_t i = 0; i < N; i++) {
      UNROLL
      for (uint32_t j = 0; j < PER; j++) values[i].word[j] = start + i < used ? values[i].word[j] : 0u;
    }
  }
  UNROLL
  for (uint32_t i = 0; i < N; i++) {
    float weight = stats[start + i];
    joined.mass = fma_f32(weight, stats[SPLITS_MAX + start + i], joined.mass);
    UNROLL
    for (uint32_t j = 0; j < PER; j++) joined.sum[j] = fma_f32(weight, float_of(values[i].word[j]), joined.sum[j]);
  }
}

// weights[s] = exp(top of split s - top), 0 past the used ones; each 32 work-items find top for themselves. tops: of splits t % 32, t % 32 + 32, ..
DEVICE void weigh(const float (&tops)[SPLITS_MAX / 32], float own_top, float own_mass, uint32_t used, float* weights, float* masses) {
  uint32_t t = thread_id();
  float top = LOWEST;
  UNROLL
  for (uint32_t i = 0; i < SPLITS_MAX / 32; i++) top = max_f32(top, t % 32 + 32 * i < used ? tops[i] : LOWEST);
  UNROLL
  for (uint32_t m = 16; m; m >>= 1) top = max_f32(top, shuffle_xor(top, m));
  if (t >= SPLITS_MAX) return;
  weights[t] = t < used ? exp_f32(own_top - top) : 0.0f;
  masses[t] = t < used ? own_mass : 0.0f;
}

// Where the splits of a block's row and head begin.
DEVICE uint64_t first_split(const step_expand_args& a) { return ((uint64_t)block_x() * a.heads + block_z()) * a.splits; }
// This work-item's columns of the first split.
template <uint32_t PER> DEVICE const float* partial_of(const step_expand_args& a) {
  uint32_t c = PER * thread_id();
  return (const float*)a.partial + first_split(a) * a.latent + (c < a.latent ? c : 0u);
}
// stats [2, SPLITS_MAX] after block_sync; returns how many splits are used. start(): asks for the first ones, before that is known.
template <class F> DEVICE uint32_t weigh_splits(const step_expand_args& a, float* stats, const F& start) {
  uint32_t t = thread_id(), last = a.splits - 1;
  int32_t planned = ((const int32_t*)a.counts)[block_x()];
  const float *tops = (const float*)a.tops + first_split(a), *masses = (const float*)a.masses + first_split(a);
  float others[SPLITS_MAX / 32], own_top = tops[t < last ? t : last], own_mass = masses[t < last ? t : last];
  UNROLL
  for (uint32_t i = 0; i < SPLITS_MAX / 32; i++) others[i] = 32 * i <= last ? tops[t % 32 + 32 * i < last ? t % 32 + 32 * i : last] : LOWEST;
  start();
  uint32_t used = planned > 0 ? ((uint32_t)planned + SPLIT - 1) / SPLIT : 0u;
  weigh(others, own_top, own_mass, used, stats, stats + SPLITS_MAX);
  block_sync();
  return used;
}

// x = T(the splits joined, ascending), staged for gemv.h; zeros where none is used.
template <class T, uint32_t PER> DEVICE void store_joined(const step_expand_args& a, uint32_t used, const Joined<PER>& joined, words16* x) {
  constexpr uint32_t PER_UNIT = 16 / sizeof(T);
  uint32_t c = PER * thread_id();
  if (c < (a.latent + gemv::CHUNK_MAX - 1) / gemv::CHUNK_MAX * gemv::CHUNK_MAX) {
    T* to = (T*)(x + gemv::place_of(c / PER_UNIT)) + c % PER_UNIT;
    UNROLL
    for (uint32_t j = 0; j < PER; j++) store_f32(to + j, used && c < a.latent ? joined.sum[j] * (1.0f / joined.mass) : 0.0f);
  }
  block_sync();
}

template <class T, uint32_t PER> DEVICE void join(const step_expand_args& a, float* stats, words16* x) {
  const float* from = partial_of<PER>(a);
  Columns<PER> values[JOINED];
  Joined<PER> joined = {};
  uint32_t used = weigh_splits(a, stats, [&] { load_partial<PER>(from, a, 0, values); });
  add_partial<PER>(values, 0, used, stats, joined);
  ROLLED
  for (uint32_t start = JOINED; start < used; start += JOINED) {
    load_partial<PER>(from, a, start, values);
    add_partial<PER>(values, start, used, stats, joined);
  }
  store_joined<T>(a, used, joined, x);
}

#if defined(TILE_MMA)
// step_expand_one is short code: what runs once a layer comes from memory each time, and straight code for the same work is three times as long. The
// partial results come through a ring of LDS, of which a work-item has what it copied itself.
constexpr uint32_t STAGE = 4, STAGES = 5;  // splits of a stage, stages of the ring
constexpr uint32_t RING = STAGES * STAGE * LATENT_MAX;

DEVICE void copy_splits(const step_expand_args& a, const float* from, uint32_t start, float* slot) {
  UNROLL
  for (uint32_t i = 0; i < STAGE; i++) {
    uint32_t split = start + i < a.splits ? start + i : a.splits - 1;
    copy4_async(slot + i * LATENT_MAX, from + (uint64_t)split * a.latent);
  }
  copies_commit();
}

template <class T> DEVICE void join_one(const step_expand_args& a, float* stats, words16* x, float* ring) {
  const float* from = partial_of<1>(a);
  float* own = ring + thread_id();
  Joined<1> joined = {};
  uint32_t used = weigh_splits(a, stats, [&] {
    ROLLED
    for (uint32_t stage = 0; stage < STAGES; stage++) copy_splits(a, from, stage * STAGE, own + stage * STAGE * LATENT_MAX);
  });
  uint32_t at = 0;
  ROLLED
  for (uint32_t start = 0; start < used; start += STAGE) {
    copies_wait<STAGES - 1>();
    Columns<1> values[STAGE];
    UNROLL
    for (uint32_t i = 0; i < STAGE; i++) values[i] = load_columns<1>(own + at + i * LATENT_MAX);
    add_partial<1>(values, start, used, stats, joined);
    copy_splits(a, from, start + STAGES * STAGE, own + at);
    at = at + STAGE * LATENT_MAX < RING ? at + STAGE * LATENT_MAX : 0u;
  }
  store_joined<T>(a, used, joined, x);
}

// gemv::advance of rows whose rounds are all under way: two rounds a turn, those after them move up.
template <class T, class W, uint32_t ROUNDS> DEVICE void add_all(gemv::Walk<W, 1, ROUNDS, true>& walk, const words16* x, float (&sums)[1][1]) {
  constexpr uint32_t TURN = 2;
  ROLLED
  for (uint32_t first = 0; first < ROUNDS; first += TURN) {
    UNROLL
    for (uint32_t slot = 0; slot < TURN; slot++) {
      uint32_t chunk = (first + slot) * LANES + walk.lane;
      if (chunk < walk.chunks) gemv::add_chunk<T, 1>(walk, slot, x, chunk, sums);
    }
    UNROLL
    for (uint32_t slot = 0; slot + TURN < ROUNDS; slot++) {
      UNROLL
      for (uint32_t i = 0; i < 4; i++) walk.word[slot][0][i] = walk.word[slot + TURN][0][i];
      walk.scale[slot][0] = walk.scale[slot + TURN][0];
    }
  }
}
template <class T, uint32_t PER> constexpr bool in_loops = PER == 1;
#else
constexpr uint32_t RING = 1;
template <class T, uint32_t PER> constexpr bool in_loops = false;
#endif

// The first weights are asked for before the launch before has ended. ring: [RING], of join_one.
template <class T, class W, uint32_t PER> DEVICE void expand(const step_expand_args& a, float* stats, words16* x, float* ring) {
  constexpr bool LOOPS = in_loops<T, PER>, WHOLE = LOOPS && W::FORMAT == WEIGHT_Q8G64;  // all rounds of a row are under way at once
  uint32_t head = block_z(), first = block_y() * COLUMNS + thread_id() / LANES;
  gemv::Walk<W, PER, WHOLE ? LATENT_MAX / W::CHUNK / LANES : DEPTH, true> walk;
  UNROLL
  for (uint32_t o = 0; o < PER; o++) {
    uint32_t n = first + o * TOGETHER<PER>;
    uint64_t row = (uint64_t)head * a.v + (n < a.v ? n : a.v - 1);
    walk.codes[o] = (const uint8_t*)a.codes + row * W::row_bytes(a.latent);
    walk.scales[o] = W::SCALED ? (const uint16_t*)a.scales + row * (a.latent / WEIGHT_GROUP) : nullptr;
  }
  gemv::begin(walk, a.latent, a.latent >= gemv::LONG_K, thread_id());
  previous_done();
  float sums[1][PER] = {};
#if defined(TILE_MMA)
  if constexpr (LOOPS) join_one<T>(a, stats, x, ring);
  else join<T, PER>(a, stats, x);
  if constexpr (WHOLE) add_all<T>(walk, x, sums);
  else gemv::advance<T>(walk, x, 0, sums);
#else
  (void)ring;
  join<T, PER>(a, stats, x);
  gemv::advance<T>(walk, x, 0, sums);
#endif
  gemv::finish(walk, sums);
  UNROLL
  for (uint32_t o = 0; o < PER; o++) {
    uint32_t n = first + o * TOGETHER<PER>;
    if (thread_id() % LANES == 0 && n < a.v) store_f32((T*)a.o + ((uint64_t)block_x() * a.heads + head) * a.v + n, sums[0][o]);
  }
}

template <class T, uint32_t PER> DEVICE void step_expand(const step_expand_args& a) {
  SHARED(float, stats, 2 * SPLITS_MAX);
  SHARED(words16, x, LATENT_MAX * sizeof(T) / 16);
  SHARED(float, ring, (in_loops<T, PER> ? RING : 1));
  next_may_begin();
  if (a.format == WEIGHT_Q8G64) expand<T, q8g64_weights, PER>(a, stats, x, ring);
  else if (a.format == WEIGHT_Q4G64) expand<T, q4g64_weights, PER>(a, stats, x, ring);
  else if (a.format == WEIGHT_BF16) expand<T, bf16_weights, PER>(a, stats, x, ring);
  else expand<T, f32_weights, PER>(a, stats, x, ring);
}

}  // namespace step_expansion

#include "expand_rows.h"
#include "expand_joined.h"

// LAUNCH step_expand_f32 block=256 columns=128 splits_max=128 latent_max=512
EARLY_KERNEL(step_expand_f32, step_expand_args, 256, 2) { step_expansion::step_expand<float, 2>(a); }
// LAUNCH step_expand_bf16 block=256 columns=128 splits_max=128 latent_max=512
EARLY_KERNEL(step_expand_bf16, step_expand_args, 256, 2) { step_expansion::step_expand<bf16, 2>(a); }
// LAUNCH step_expand_one_bf16 block=512 columns=128 splits_max=128 latent_max=512
EARLY_KERNEL(step_expand_one_bf16, step_expand_args, 512, 1) { step_expansion::step_expand<bf16, 1>(a); }
// Of several rows and q8g64 weights, on sm_90: a block has all columns of v of min(rows, ceil(rows of the launch / groups)) rows.
// LAUNCH step_expand_many_bf16 block=256 columns=128 splits_max=128 latent_max=512 rows=4 groups=4
#if defined(TILE_MMA)
LDS_KERNEL(step_expand_many_bf16, step_expand_args, 256, 2, step_expansion::EXPAND_LDS) { step_expansion::step_expand_many(a); }
#else
EARLY_KERNEL(step_expand_many_bf16, step_expand_args, 256, 2) { step_expansion::step_expand<bf16, 2>(a); }
#endif
// On sm_90: attention of more query rows in two launches, and wv for what they leave, in place of `partial`. Elsewhere nothing launches them.
// LAUNCH step_weigh_bf16_q8g64 block=256 heads=32 split=64
LDS_KERNEL(step_weigh_bf16_q8g64, step_join_args, 256, 2, attend_rows::WEIGH_LDS) { attend_rows::weigh(a); }
// LAUNCH step_join_bf16_q8g64 block=256 heads=16 columns=64 splits_max=128
LDS_KERNEL(step_join_bf16_q8g64, step_join_args, 256, 3, attend_rows::JOIN_LDS) { attend_rows::join(a); }
// LAUNCH step_expand_joined_bf16 block=256 columns=128 rows=16
LDS_KERNEL(step_expand_joined_bf16, step_expand_args, 256, 1, step_expansion::PRODUCT_LDS) { step_expansion::step_expand_joined(a); }
