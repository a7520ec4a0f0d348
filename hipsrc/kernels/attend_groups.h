// attend_groups.h - step_attend of bf16 queries and q8g64 rows by mma.sync: one block a (split of 64 planned rows, 16 heads, query row). Of the
// scores a wave has two groups of 64 columns of half the rows, and the rope part of 8 rows; of the output the 64 columns of a group. Rows go to LDS
// as they are; each work-item takes its codes for both products out of it, then the scores take the place of the rows.
// Order of additions: s = (pairs of groups ascending, then rope) * scale of the softmax; a pair is fma(scale 1, sum 1, scale 0 * sum 0), a group's
// sum the matrix unit's, as that of the rope part. Mass: rows 4l to 4l + 3 of work-item l of a head ascending, then a butterfly. Output: tiles of 16
// rows ascending, p * scale of the group rounded to bf16. Planned rows past the count are read as the first row of the split and weigh 0.
#pragma once
#include "row_format.h"

#if defined(TILE_MMA)
namespace attend_groups {

constexpr uint32_t THREADS = 256, HEADS = TILE, SPLIT = 64, LATENT = 512, ROPE_MAX = 64;
constexpr uint32_t GROUP = Q8_GROUP, GROUPS = LATENT / GROUP;
constexpr uint32_t PAIRS = GROUPS / 2;
constexpr uint32_t TILES = SPLIT / 2 / 8;                                  // of scores, 8 rows wide, a wave and group
constexpr uint32_t ROW_UNITS = (LATENT + 2 * GROUPS + 2 * ROPE_MAX) / 16;  // of 16 bytes
constexpr uint32_t ROW_STRIDE = (ROW_UNITS + 1) * 16;                     // bytes
constexpr uint32_t PLANE = HEADS * SPLIT;

static_assert(GROUPS == THREADS / TILE_LANES && SPLIT == 8 * GROUPS, "a wave has a group of columns, and a tile of rows for the rope part");
static_assert(THREADS == HEADS * 16, "16 work-items do the softmax of a head");
static_assert(LATENT / 16 == 32 && ROW_UNITS == 41, "copy_rows: 32 words of codes, then 8, then one");
static_assert(ROW_STRIDE % 128 == 32 && (PAIRS + 1) * PLANE * 4 <= SPLIT * ROW_STRIDE, "the scores take the place of the rows");

struct Lds {
  uint8_t* rows;  // [SPLIT, ROW_STRIDE] by slot_of; then
  float* part;    // [PAIRS + 1, HEADS, SPLIT] scores of two groups each and of the rope part, in the first plane then p; see place_of
  float* scales;  // [GROUPS, SPLIT]
};

// Where row n lies, so that no bank is met twice: by accesses to the same 64 bytes of rows 2i and 2i + 1, and to the same 32 bytes of rows i, i + 4,
// i + 8 and i + 12 of sixteen.
DEVICE uint32_t slot_of(uint32_t n) { return n / 16 * 16 + n % 4 * 4 + ((n / 8) ^ n) % 2 * 2 + n / 4 % 2; }
// Likewise the score of head h and row n in its plane: by accesses to the same 8 values of four heads, and to the same 16 of two.
DEVICE uint32_t place_of(uint32_t h, uint32_t n) { return h * SPLIT + (n ^ (h % 2 * 16 + h / 2 % 2 * 8)); }

DEVICE void store_pair(float* to, float low, float high) { *(uint64_t*)to = bits_of(low) | (uint64_t)bits_of(high) << 32; }
DEVICE void load_pair(const float* from, float* v) {
  uint64_t both = *(const uint64_t*)from;
  v[0] = float_of((uint32_t)both);
  v[1] = float_of((uint32_t)(both >> 32));
}
DEVICE void load_four(const float* from, float* v) {
  uint32_t word[4];
  load16(from, word);
  UNROLL
  for (uint32_t i = 0; i < 4; i++) v[i] = float_of(word[i]);
}

// 16 values from `from` on, the first `count` of which there are, a multiple of 8; zeros after them.
DEVICE void load_values(const bf16* from, uint32_t count, uint32_t* words) {
  UNROLL
  for (uint32_t u = 0; u < 2; u++) {
    UNROLL
    for (uint32_t i = 0; i < 4; i++) words[4 * u + i] = 0;
    if (8 * u < count) load16(from + 8 * u, words + 4 * u);
  }
}

// Pairs of values in the order in which bytes_bf16 gives those of a word: (0 2) (1 3).
template <uint32_t WORDS> DEVICE void order_values(uint32_t* words) {
  UNROLL
  for (uint32_t i = 0; i < WORDS; i += 2) {
    uint32_t low = words[i], high = words[i + 1];
    words[i] = pick_bytes<0, 1, 4, 5>(low, high);
    words[i + 1] = pick_bytes<2, 3, 6, 7>(low, high);
  }
}

// Of the scores: groups 2p and 2p + 1 of rows 32h to 32h + 31.
DEVICE uint32_t pair_of() { return tile_group() % PAIRS; }
DEVICE uint32_t half_of() { return tile_group() / PAIRS; }

// Work-item 4g + t has columns 16t to 16t + 15 of heads g and g + 8: of this wave's group, or of the rope part.
struct Query {
  uint32_t word[2][8];

  DEVICE void step(const Query& q, uint32_t i, uint32_t* a) {
    UNROLL
    for (uint32_t j = 0; j < 4; j++) a[j] = q.word[j % 2][2 * i + j / 2];
  }
};

// Where a work-item's values of q are. Heads past the last are the last once more: nobody stores them.
struct QueryAt {
  const bf16 *latent[2], *rope[2];
};

DEVICE QueryAt query_at(const step_attend_args& a, uint32_t first_head) {
  QueryAt at;
  uint32_t column = tile_lane() % 4 * 16;
  UNROLL
  for (uint32_t i = 0; i < 2; i++) {
    uint32_t head = first_head + tile_lane() / 4 + 8 * i, last = a.heads - 1;
    uint64_t index = (uint64_t)block_z() * a.heads + (head < last ? head : last);
    at.latent[i] = (const bf16*)a.q_latent + index * LATENT + GROUP * 2 * pair_of() + column;
    at.rope[i] = (const bf16*)a.q + index * a.q_head_stride + a.q_rope_offset + column;
  }
  return at;
}

DEVICE void load_query(const QueryAt& at, uint32_t rope_left, Query* codes, Query& rope) {
  UNROLL
  for (uint32_t i = 0; i < 2; i++) {
    UNROLL
    for (uint32_t j = 0; j < 2; j++) load_values(at.latent[i] + j * GROUP, 16, codes[j].word[i]);
    load_values(at.rope[i], rope_left, rope.word[i]);
  }
}

// Scores of the wave's rows over its two groups, and of 8 rows over the rope part.
DEVICE void score(const Lds& lds, Query* query, const Query& rope_query, const uint32_t* rope, uint32_t (*again)[4][2]) {
  uint32_t g = tile_lane() / 4, t = tile_lane() % 4;
  float sum[2][TILES][4] = {}, rope_sum[4] = {};
  UNROLL
  for (uint32_t i = 0; i < 4; i++) {
    uint32_t a[4];
    Query::step(rope_query, i, a);
    mma_16x8x16(rope_sum, a, rope + 2 * i);
  }
  UNROLL
  for (uint32_t k = 0; k < 2; k++) {
    uint32_t codes[TILES][4];
    UNROLL
    for (uint32_t j = 0; j < TILES; j++) {
      load16(lds.rows + slot_of(8 * (TILES * half_of() + j) + g) * ROW_STRIDE + GROUP * (2 * pair_of() + k) + 16 * t, codes[j]);
    }
    UNROLL
    for (uint32_t i = 0; i < 4; i++) {
      uint32_t a[4];
      Query::step(query[k], i, a);
      UNROLL
      for (uint32_t j = 0; j < TILES; j++) {  // neighbours in this order do not wait for each other
        uint32_t b[2] = {bytes_bf16(codes[j][i], 0), bytes_bf16(codes[j][i], 1)};
        mma_16x8x16(sum[k][j], a, b);
      }
    }
  }
  UNROLL
  for (uint32_t i = 0; i < SPLIT / TILE; i++) {
    UNROLL
    for (uint32_t j = 0; j < 4; j++) {
      uint64_t both = *(const uint64_t*)(lds.rows + slot_of(16 * i + 4 * t + j) * ROW_STRIDE + GROUP * tile_group() + 8 * g);
      again[i][j][0] = (uint32_t)both;
      again[i][j][1] = (uint32_t)(both >> 32);
    }
  }
  block_sync();  // all waves have their codes, the scales are there
  float* to = lds.part + pair_of() * PLANE;
  UNROLL
  for (uint32_t j = 0; j < TILES; j++) {
    uint32_t n = 8 * (TILES * half_of() + j) + 2 * t;
    float scale[2][2];
    UNROLL
    for (uint32_t k = 0; k < 2; k++) load_pair(lds.scales + (2 * pair_of() + k) * SPLIT + n, scale[k]);
    UNROLL
    for (uint32_t i = 0; i < 4; i++) sum[0][j][i] = fma_f32(scale[1][i % 2], sum[1][j][i], scale[0][i % 2] * sum[0][j][i]);
    UNROLL
    for (uint32_t i = 0; i < 4; i += 2) store_pair(to + place_of(g + 4 * i, n), sum[0][j][i], sum[0][j][i + 1]);
  }
  UNROLL
  for (uint32_t i = 0; i < 4; i += 2) {
    store_pair(lds.part + PAIRS * PLANE + place_of(g + 4 * i, 8 * tile_group() + 2 * t), rope_sum[i], rope_sum[i + 1]);
  }
}

// Softmax of rows n to n + 3 of a head, by 16 work-items that have four each. at: their scores in the first plane; s: p; mass: of these four.
DEVICE void weigh_four(const float* at, uint32_t plane, float scale, uint32_t n, uint32_t left, float (&s)[4], float& top, float& mass) {
  load_four(at, s);
  UNROLL
  for (uint32_t i = 1; i <= PAIRS; i++) {
    float part[4];
    load_four(at + i * plane, part);
    UNROLL
    for (uint32_t j = 0; j < 4; j++) s[j] += part[j];
  }
  top = -__builtin_inff();
  mass = 0.0f;
  UNROLL
  for (uint32_t i = 0; i < 4; i++) {
    s[i] *= scale;
    if (n + i < left) top = max_f32(top, s[i]);
  }
  UNROLL
  for (uint32_t m = 8; m; m >>= 1) top = max_f32(top, shuffle_xor(top, m));
  UNROLL
  for (uint32_t i = 0; i < 4; i++) {
    float p = exp_f32(s[i] - top);  // of every row: no branch
    s[i] = n + i < left ? p : 0.0f;
    mass += s[i];
  }
}

// Work-item 16 h + l has rows 4l to 4l + 3 of head h. sum: of their p.
DEVICE void weigh(const Lds& lds, float scale, uint32_t left, float& top, float (&sum)[1]) {
  uint32_t n = thread_id() % 16 * 4;
  float s[4], *at = lds.part + place_of(thread_id() / 16, n);
  weigh_four(at, PLANE, scale, n, left, s, top, sum[0]);
  *(words16*)at = {{bits_of(s[0]), bits_of(s[1]), bits_of(s[2]), bits_of(s[3])}};
}

// p * scale of rows 4t to 4t + 3 of a tile of 16, of heads g and g + 8, as a fragment.
DEVICE void weigh_tile(const float* low, const float* high, const float* scale, uint32_t* a) {
  UNROLL
  for (uint32_t j = 0; j < 4; j += 2) {
    a[j] = pack_bf16(low[j] * scale[j], low[j + 1] * scale[j + 1]);
    a[j + 1] = pack_bf16(high[j] * scale[j], high[j + 1] * scale[j + 1]);
  }
}

// Adds these rows. codes: columns 8g to 8g + 7 of each, the k of a fragment in its order.
DEVICE void add_tile(const uint32_t (*codes)[2], const uint32_t* a, float (*acc)[4]) {
  UNROLL
  for (uint32_t c = 0; c < 8; c += 2) {  // two columns of four rows: bytes (row 0, row 1) of a word side by side, the columns apart
    uint32_t pair[2];
    UNROLL
    for (uint32_t j = 0; j < 2; j++) {
      uint32_t even = codes[2 * j][c / 4], odd = codes[2 * j + 1][c / 4];
      pair[j] = c % 4 ? pick_bytes<2, 3, 6, 7>(even, odd) : pick_bytes<0, 1, 4, 5>(even, odd);
    }
    UNROLL
    for (uint32_t e = 0; e < 2; e++) {
      uint32_t b[2] = {bytes_bf16(pair[0], e), bytes_bf16(pair[1], e)};
      mma_16x8x16(acc[c + e], a, b);
    }
  }
}

// acc[c]: columns 16t + c and 16t + 8 + c of heads g, then g + 8. codes: of rows 16i + 4t + j.
DEVICE void accumulate(const Lds& lds, const uint32_t (*codes)[4][2], float (*acc)[4]) {
  uint32_t g = tile_lane() / 4, t = tile_lane() % 4;
  UNROLL
  for (uint32_t i = 0; i < SPLIT / TILE; i++) {
    uint32_t n = 16 * i + 4 * t, a[4];
    float scale[4], low[4], high[4];
    load_four(lds.scales + tile_group() * SPLIT + n, scale);
    load_four(lds.part + place_of(g, n), low);
    load_four(lds.part + place_of(g + 8, n), high);
    weigh_tile(low, high, scale, a);
    add_tile(codes[i], a, acc);
  }
}

// Neighbours t and t ^ 1 exchange halves, so that a store of theirs fills whole sectors of 32 bytes.
DEVICE void store_output(const step_attend_args& a, uint32_t first_head, const float (*acc)[4]) {
  uint32_t g = tile_lane() / 4, t = tile_lane() % 4, odd = t % 2;
  UNROLL
  for (uint32_t half = 0; half < 2; half++) {
    uint32_t head = first_head + g + 8 * half;
    uint64_t split = ((uint64_t)block_z() * a.heads + head) * a.splits + block_x();
    float* to = (float*)a.partial + split * LATENT + GROUP * tile_group() + t / 2 * 32 + odd * 4;
    UNROLL
    for (uint32_t e = 0; e < 2; e++) {  // columns 8 * e.. of the work-item's 16
      uint32_t low[4], high[4];  // columns 8e + 4 * odd.. of the even work-item's 16, and of the odd one's
      UNROLL
      for (uint32_t i = 0; i < 4; i++) {
        uint32_t first = bits_of(acc[i][2 * half + e]), last = bits_of(acc[i + 4][2 * half + e]);
        uint32_t other = shuffle_xor(odd ? first : last, 1);
        low[i] = odd ? other : first;
        high[i] = odd ? last : other;
      }
      if (head < a.heads) {
        store16(to + 8 * e, low);
        store16(to + 16 + 8 * e, high);
      }
    }
  }
}

// Rows 8w to 8w + 7 to LDS; lane l has the address of row 8w + l % 8. Neighbours copy neighbouring words: the codes of a row in one access.
DEVICE void copy_rows(const Lds& lds, uint64_t from, uint32_t units) {
  uint32_t lane = tile_lane(), first = 8 * tile_group();
  UNROLL
  for (uint32_t i = 0; i < 8; i++) copy16_async(lds.rows + slot_of(first + i) * ROW_STRIDE + 16 * lane, (const words16*)shuffle_from(from, i) + lane);
  UNROLL
  for (uint32_t i = 0; i < 8; i += 4) {
    uint32_t row = i + lane / 8, unit = 32 + lane % 8;
    const words16* at = (const words16*)shuffle_from(from, row);
    if (unit < units) copy16_async(lds.rows + slot_of(first + row) * ROW_STRIDE + 16 * unit, at + unit);
  }
  if (lane < 8 && 40 < units) copy16_async(lds.rows + slot_of(first + lane) * ROW_STRIDE + 16 * 40, (const words16*)from + 40);  // row 8w + l
}

DEVICE void attend(const step_attend_args& a) {
  SHARED(words16, row_memory, SPLIT * ROW_STRIDE / 16);
  SHARED(words16, scale_memory, GROUPS * SPLIT / 4);
  Lds lds = {(uint8_t*)row_memory, (float*)row_memory, (float*)scale_memory};
  uint32_t lane = tile_lane(), g = lane / 4, t = lane % 4, first_head = block_y() * HEADS, first = block_x() * SPLIT;
  uint32_t units = q8_rope_offset(LATENT) / 16 + a.rope / 8;     // of a row
  uint32_t rope_left = 16 * t < a.rope ? a.rope - 16 * t : 0u;  // values of the rope part from this work-item's first on
  uint32_t n = 8 * tile_group() + lane % 8;                      // the row whose address this work-item finds out
  const uint64_t* plan = (const uint64_t*)a.plan + (uint64_t)block_z() * a.k + first;
  const int32_t* count = (const int32_t*)a.counts + block_z();
  QueryAt q = query_at(a, first_head);
  previous_done();
  int32_t planned = *count;
  uint64_t some_ref = plan[0], ref = first + n < a.k ? plan[n] : some_ref;
  Query query[2], rope_query;
  load_query(q, rope_left, query, rope_query);
  if (planned <= (int32_t)first) return;
  uint32_t left = (uint32_t)planned - first;
  uint64_t from = (uint64_t)row_pointer<const words16>(n < left ? ref : some_ref, a.offsets, 16 * units);
  copy_rows(lds, from, units);
  UNROLL
  for (uint32_t i = 0; i < 4; i++) order_values<8>(query[i / 2].word[i % 2]);
  copies_done();
  block_sync();

  uint32_t again[SPLIT / TILE][4][2], rope[8];
  const uint8_t* own = lds.rows + slot_of(8 * tile_group() + g) * ROW_STRIDE + LATENT;
  uint32_t scales = *(const uint32_t*)(own + 4 * t);
  load_values((const bf16*)(own + 2 * GROUPS) + 16 * t, rope_left, rope);
  UNROLL
  for (uint32_t i = 0; i < 2; i++) lds.scales[(2 * t + i) * SPLIT + 8 * tile_group() + g] = f16_value((uint16_t)(scales >> (16 * i)));
  score(lds, query, rope_query, rope, again);
  block_sync();
  float top, mass[1], acc[8][4] = {};
  weigh(lds, a.scale, left, top, mass);
  block_sync();
  accumulate(lds, again, acc);
  store_output(a, first_head, acc);
  lanes_sum<16>(mass);
  uint32_t head = first_head + thread_id() / 16;
  if (thread_id() % 16 == 0 && head < a.heads) {
    uint64_t at = ((uint64_t)block_z() * a.heads + head) * a.splits + block_x();
    ((float*)a.tops)[at] = top;
    ((float*)a.masses)[at] = mass[0];
  }
}

}  // namespace attend_groups
#endif
