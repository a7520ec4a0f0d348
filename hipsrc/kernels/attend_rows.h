// attend_rows.h - attention of several query rows, bf16 queries and q8g64 rows, without partial results in memory: the bits of attend_groups.h and of
// the join in step_expand. Two launches:
//   weigh   one block a (split of 64 planned rows, 32 heads, query row): the scores, and of a split p[n] = exp(s[n] - top), top, mass
//   join    one block a (group of 64 columns, 16 heads, query row): sum p[n] * latent[n] of each split by a wave, eight splits a turn, and of these
//           in LDS the sum of exp(top_s - top) * partial_s, ascending; x = bf16(that / the same sum of masses)
// Each is what it is where a split has a block, addition for addition: only where p and the partial results pass differs.
#pragma once
#include "attend_groups.h"

#if defined(TILE_MMA)
namespace attend_rows {

using namespace attend_groups;

constexpr uint32_t WAVES = THREADS / TILE_LANES, SPLITS_MAX = 128;
constexpr uint32_t CODES_BYTES = SPLIT * GROUP, WEIGHTS_BYTES = HEADS * SPLIT * 4, SPLIT_SCALES = SPLIT * 4;  // of a split: what a wave of join has

static_assert(CODES_BYTES == THREADS * 16, "store_codes: 16 bytes of a group a work-item");

// What weigh leaves for join is as a wave of join has it in LDS: of a split and group the codes, of a split and 16 heads p. A copy is one of a whole
// block: by the plan, join would have as many instructions for copies as for products.
// Where 16 bytes of codes of row n lie: 8 of rows i, i + 4, i + 8 and i + 12 of sixteen, and of four work-items each, meet no bank twice.
DEVICE uint32_t code_at(uint32_t n, uint32_t unit) { return (n / 16 * 16 + n % 4 * 4 + n / 4 % 4) * GROUP + (unit ^ (n / 8 % 2 * 2)) * 16; }
// The same for 16 bytes of p of head h, four in a row of two heads; of even and of odd heads they lie alike.
DEVICE uint32_t weight_at(uint32_t h, uint32_t unit) { return h * SPLIT + (unit ^ (h % 2 * 4)) * 4; }

// weigh

constexpr uint32_t HEAD_TILES = 2, WIDE = HEAD_TILES * TILE;  // heads of a block
constexpr uint32_t WIDE_PLANE = WIDE * SPLIT;
constexpr uint32_t Q_STRIDE = LATENT + ROPE_MAX + 8;  // values
constexpr uint32_t ROWS_BYTES = SPLIT * ROW_STRIDE, SCALES_BYTES = GROUPS * SPLIT * 4;
constexpr uint32_t WEIGH_LDS = ROWS_BYTES + SCALES_BYTES + WIDE * Q_STRIDE * 2;

static_assert((PAIRS + 1) * WIDE_PLANE * 4 <= ROWS_BYTES, "the scores take the place of the rows");
static_assert(Q_STRIDE * 2 % 128 == 16, "16 bytes of two heads, 32 apart, meet no bank twice");
static_assert(WIDE == 4 * WAVES, "copy_query: four heads a wave");

// [q_latent | rope part of q] of the block's heads to q [WIDE, Q_STRIDE], zeros past the rope part. Heads past the last are the last once more.
DEVICE void copy_query(const step_join_args& a, uint32_t first_head, bf16* q) {
  uint32_t lane = tile_lane(), last = a.heads - 1;
  auto row_of = [&](uint32_t h) { return (uint64_t)block_z() * a.heads + (first_head + h < last ? first_head + h : last); };
  UNROLL
  for (uint32_t i = 0; i < 8; i++) {
    uint32_t h = 4 * tile_group() + i / 2, c = 8 * (lane + i % 2 * TILE_LANES);
    copy16_async(q + h * Q_STRIDE + c, (const bf16*)a.q_latent + row_of(h) * LATENT + c);
  }
  uint32_t h = 4 * tile_group() + lane / 8, c = 8 * (lane % 8);
  bf16* to = q + h * Q_STRIDE + LATENT + c;
  if (c < a.rope) copy16_async(to, (const bf16*)a.q + row_of(h) * a.q_head_stride + a.q_rope_offset + c);
  else *(words16*)to = {{0, 0, 0, 0}};
}

// Scores of the wave's rows over its two groups and all heads of the block, times the scales.
DEVICE void score_groups(const Lds& lds, const bf16* q, float (&sum)[HEAD_TILES][TILES][4]) {
  uint32_t g = tile_lane() / 4, t = tile_lane() % 4;
  UNROLL
  for (uint32_t k = 0; k < 2; k++) {
    uint32_t group = 2 * pair_of() + k, codes[TILES][4];
    float part[HEAD_TILES][TILES][4] = {};
    UNROLL
    for (uint32_t j = 0; j < TILES; j++) load16(lds.rows + slot_of(8 * (TILES * half_of() + j) + g) * ROW_STRIDE + GROUP * group + 16 * t, codes[j]);
    UNROLL
    for (uint32_t half = 0; half < 2; half++) {
      uint32_t word[HEAD_TILES][2][4];  // values 8 * half.. of the work-item's 16, of heads g and g + 8
      UNROLL
      for (uint32_t m = 0; m < HEAD_TILES; m++) {
        UNROLL
        for (uint32_t e = 0; e < 2; e++) {
          load16(q + (TILE * m + 8 * e + g) * Q_STRIDE + GROUP * group + 16 * t + 8 * half, word[m][e]);
          order_values<4>(word[m][e]);
        }
      }
      UNROLL
      for (uint32_t i = 0; i < 4; i += 2) {
        UNROLL
        for (uint32_t j = 0; j < TILES; j++) {
          uint32_t code = codes[j][2 * half + i / 2], b[2] = {bytes_bf16(code, 0), bytes_bf16(code, 1)};
          UNROLL
          for (uint32_t m = 0; m < HEAD_TILES; m++) {
            uint32_t a[4] = {word[m][0][i], word[m][1][i], word[m][0][i + 1], word[m][1][i + 1]};
            mma_16x8x16(part[m][j], a, b);
          }
        }
      }
    }
    UNROLL
    for (uint32_t j = 0; j < TILES; j++) {
      float scale[2];
      load_pair(lds.scales + group * SPLIT + 8 * (TILES * half_of() + j) + 2 * t, scale);
      UNROLL
      for (uint32_t m = 0; m < HEAD_TILES; m++) {
        UNROLL
        for (uint32_t i = 0; i < 4; i++) {
          sum[m][j][i] = k ? fma_f32(scale[i % 2], part[m][j][i], sum[m][j][i]) : scale[i % 2] * part[m][j][i];
        }
      }
    }
  }
}

// Scores of 8 rows over the rope part.
DEVICE void score_rope(const bf16* q, const uint32_t* rope, float (&sum)[HEAD_TILES][4]) {
  UNROLL
  for (uint32_t m = 0; m < HEAD_TILES; m++) {
    Query query;
    UNROLL
    for (uint32_t e = 0; e < 2; e++) {
      load_values(q + (TILE * m + 8 * e + tile_lane() / 4) * Q_STRIDE + LATENT + tile_lane() % 4 * 16, 16, query.word[e]);
    }
    UNROLL
    for (uint32_t i = 0; i < 4; i++) {
      uint32_t a[4];
      Query::step(query, i, a);
      mma_16x8x16(sum[m], a, rope + 2 * i);
    }
  }
}

// The codes of every group that is this block's among those of the other heads to memory. Neighbours store neighbouring words.
DEVICE void store_codes(const step_join_args& a, const Lds& lds) {
  uint8_t* to = (uint8_t*)a.codes + ((uint64_t)block_z() * a.splits + block_x()) * GROUPS * CODES_BYTES;
  uint32_t at = 16 * thread_id(), slot = at / GROUP, n = slot / 16 * 16 + slot % 4 * 4 + slot / 4 % 4, unit = thread_id() % 4 ^ (n / 8 % 2 * 2);
  const uint8_t* from = lds.rows + slot_of(n) * ROW_STRIDE + 16 * unit;
  uint32_t blocks = (a.heads + WIDE - 1) / WIDE;
  ROLLED
  for (uint32_t group = block_y(); group < GROUPS; group += blocks) {
    uint32_t word[4];
    load16(from + GROUP * group, word);
    store16(to + group * CODES_BYTES + at, word);
  }
}

// The rows' scales to LDS, and from the first block of heads to memory; then the scores.
DEVICE void score_all(const step_join_args& a, const Lds& lds, const bf16* q, uint32_t rope_left) {
  uint32_t g = tile_lane() / 4, t = tile_lane() % 4, rope[8];
  const uint8_t* own = lds.rows + slot_of(8 * tile_group() + g) * ROW_STRIDE + LATENT;
  uint32_t scales = *(const uint32_t*)(own + 4 * t);
  load_values((const bf16*)(own + 2 * GROUPS) + 16 * t, rope_left, rope);
  UNROLL
  for (uint32_t i = 0; i < 2; i++) lds.scales[(2 * t + i) * SPLIT + 8 * tile_group() + g] = f16_value((uint16_t)(scales >> (16 * i)));
  float sum[HEAD_TILES][TILES][4], rope_sum[HEAD_TILES][4] = {};
  score_rope(q, rope, rope_sum);
  block_sync();
  if (block_y() == 0) {
    float pair[2], *to = (float*)a.scales + ((uint64_t)block_z() * a.splits + block_x()) * GROUPS * SPLIT;
    load_pair(lds.scales + 2 * thread_id(), pair);
    store_pair(to + 2 * thread_id(), pair[0], pair[1]);
  }
  store_codes(a, lds);
  score_groups(lds, q, sum);
  block_sync();
  UNROLL
  for (uint32_t m = 0; m < HEAD_TILES; m++) {
    UNROLL
    for (uint32_t i = 0; i < 4; i += 2) {
      uint32_t h = TILE * m + g + 4 * i;
      UNROLL
      for (uint32_t j = 0; j < TILES; j++) {
        store_pair(lds.part + pair_of() * WIDE_PLANE + place_of(h, 8 * (TILES * half_of() + j) + 2 * t), sum[m][j][i], sum[m][j][i + 1]);
      }
      store_pair(lds.part + PAIRS * WIDE_PLANE + place_of(h, 8 * tile_group() + 2 * t), rope_sum[m][i], rope_sum[m][i + 1]);
    }
  }
  block_sync();
}

// [HEADS, SPLIT] p by weight_at.
DEVICE float* weights_of(const step_join_args& a, uint32_t heads, uint32_t split) {
  return (float*)a.weights + (uint64_t)((block_z() * ((a.heads + HEADS - 1) / HEADS) + heads) * a.splits + split) * (HEADS * SPLIT);
}

DEVICE void weigh(const step_join_args& a) {
  uint8_t* memory = lds_bytes();
  Lds lds = {memory, (float*)memory, (float*)(memory + ROWS_BYTES)};
  bf16* q = (bf16*)(memory + ROWS_BYTES + SCALES_BYTES);
  uint32_t t = tile_lane() % 4, first_head = block_y() * WIDE, first = block_x() * SPLIT;
  uint32_t units = q8_rope_offset(LATENT) / 16 + a.rope / 8, rope_left = 16 * t < a.rope ? a.rope - 16 * t : 0u;
  uint32_t row = 8 * tile_group() + tile_lane() % 8;
  const uint64_t* plan = (const uint64_t*)a.plan + (uint64_t)block_z() * a.k + first;
  next_may_begin();
  previous_done();
  int32_t planned = ((const int32_t*)a.counts)[block_z()];
  uint64_t some_ref = plan[0], ref = first + row < a.k ? plan[row] : some_ref;
  if (planned <= (int32_t)first) return;
  uint32_t left = (uint32_t)planned - first;
  copy_query(a, first_head, q);
  copy_rows(lds, (uint64_t)row_pointer<const words16>(row < left ? ref : some_ref, a.offsets, 16 * units), units);
  copies_done();
  block_sync();
  score_all(a, lds, q, rope_left);
  float s[HEAD_TILES][4], top[HEAD_TILES], mass[HEAD_TILES];
  uint32_t n = thread_id() % 16 * 4;
  UNROLL
  for (uint32_t m = 0; m < HEAD_TILES; m++) {
    weigh_four(lds.part + place_of(thread_id() / 16 + TILE * m, n), WIDE_PLANE, a.scale, n, left, s[m], top[m], mass[m]);
  }
  lanes_sum<16>(mass);
  UNROLL
  for (uint32_t m = 0; m < HEAD_TILES; m++) {
    uint32_t h = thread_id() / 16, head = first_head + h + TILE * m, word[4];
    if (head >= a.heads) continue;
    uint64_t at = ((uint64_t)block_z() * a.heads + head) * a.splits + block_x();
    UNROLL
    for (uint32_t i = 0; i < 4; i++) word[i] = bits_of(s[m][i]);
    store16(weights_of(a, head / HEADS, block_x()) + weight_at(h, n / 4), word);
    if (n == 0) {
      ((float*)a.tops)[at] = top[m];
      ((float*)a.masses)[at] = mass[m];
    }
  }
}

// join

constexpr float LOWEST = -__builtin_inff();
constexpr uint32_t JOIN_LDS = WAVES * (CODES_BYTES + WEIGHTS_BYTES + SPLIT_SCALES) + HEADS * (SPLITS_MAX + 4) * 4;

static_assert(HEADS * GROUP * 4 == WEIGHTS_BYTES, "the partial result of a split takes the place of its p");

// What a wave has of its split, and what the block has of all.
struct Turn {
  uint8_t* codes;  // [SPLIT, GROUP] by code_at
  float* weights;  // [HEADS, SPLIT] p, then [HEADS, GROUP] partial results, by unit_at
  float* scales;   // [SPLIT]
};

// Where 16 bytes of a split's partial results lie: every fourth of two heads, or every second of one, meet no bank twice.
DEVICE uint32_t unit_at(uint32_t h, uint32_t unit) { return h * GROUP + (unit ^ (unit / 8) ^ (h % 2 * 2)) * 4; }

DEVICE void copy_codes(const step_join_args& a, uint32_t split, const Turn& turn) {
  uint32_t at = 16 * tile_lane(), group = (block_z() * a.splits + split) * GROUPS + block_x();
  const uint8_t* from = (const uint8_t*)a.codes + (uint64_t)group * CODES_BYTES + at;
  UNROLL
  for (uint32_t i = 0; i < CODES_BYTES; i += 16 * TILE_LANES) copy16_async(turn.codes + at + i, from + i);
  if (at < SPLIT_SCALES) copy16_async((uint8_t*)turn.scales + at, (const uint8_t*)a.scales + (uint64_t)group * SPLIT_SCALES + at);
}

DEVICE void copy_weights(const step_join_args& a, uint32_t split, const Turn& turn) {
  const float* from = weights_of(a, block_y(), split) + 4 * tile_lane();
  float* to = turn.weights + 4 * tile_lane();
  UNROLL
  for (uint32_t i = 0; i < HEADS * SPLIT; i += 4 * TILE_LANES) copy16_async(to + i, from + i);
}

// accumulate of attend_groups.h, whose acc it has; then the sums take the place of p.
DEVICE void multiply(const Turn& turn) {
  uint32_t g = tile_lane() / 4, t = tile_lane() % 4;
  float acc[8][4] = {};
  ROLLED
  for (uint32_t i = 0; i < SPLIT / TILE; i++) {
    uint32_t n = 16 * i + 4 * t, codes[4][2], a[4];
    float scale[4], low[4], high[4];
    UNROLL
    for (uint32_t j = 0; j < 4; j++) {
      uint64_t both = *(const uint64_t*)(turn.codes + code_at(n + j, g / 2) + g % 2 * 8);
      codes[j][0] = (uint32_t)both;
      codes[j][1] = (uint32_t)(both >> 32);
    }
    load_four(turn.scales + n, scale);
    load_four(turn.weights + weight_at(g, n / 4), low);
    load_four(turn.weights + weight_at(g + 8, n / 4), high);
    weigh_tile(low, high, scale, a);
    add_tile(codes, a, acc);
  }
  wave_sync();
  UNROLL
  for (uint32_t i = 0; i < 4; i++) {  // columns 16t + 4i to 16t + 4i + 3 of heads g and g + 8
    float* to = turn.weights + unit_at(g, 4 * t + i);
    UNROLL
    for (uint32_t half = 0; half < 2; half++) {
      uint32_t c = i % 2 * 4, e = 2 * half + i / 2;
      *(words16*)(to + half * 8 * GROUP) = {{bits_of(acc[c][e]), bits_of(acc[c + 1][e]), bits_of(acc[c + 2][e]), bits_of(acc[c + 3][e])}};
    }
  }
}

// weights [HEADS, SPLITS_MAX]: exp(top of split s - top) of the used ones; shares [HEADS]: 1 / the mass of all. 16 work-items a head; two heads a
// wave, which has `masses` [2, SPLITS_MAX] to itself.
DEVICE void weigh_splits(const step_join_args& a, uint32_t used, float* weights, float* masses, float* shares) {
  uint32_t h = thread_id() / 16, lane = thread_id() % 16, last = a.heads - 1, head = block_y() * HEADS + h;
  uint64_t at = (uint64_t)(block_z() * a.heads + (head < last ? head : last)) * a.splits;
  float top = LOWEST, mass = 0.0f;
  weights += h * SPLITS_MAX;
  masses += h % 2 * SPLITS_MAX;
  ROLLED
  for (uint32_t first = 0; first < used; first += 32) {  // two splits a work-item
    float own[2], of_split[2];
    UNROLL
    for (uint32_t i = 0; i < 2; i++) {
      uint32_t s = first + 16 * i + lane, some = s < used ? s : used - 1;
      own[i] = ((const float*)a.tops)[at + some];
      of_split[i] = ((const float*)a.masses)[at + some];
    }
    UNROLL
    for (uint32_t i = 0; i < 2; i++) {
      uint32_t s = first + 16 * i + lane;
      weights[s] = s < used ? own[i] : LOWEST;
      masses[s] = s < used ? of_split[i] : 0.0f;
      top = max_f32(top, own[i]);
    }
  }
  UNROLL
  for (uint32_t m = 8; m; m >>= 1) top = max_f32(top, shuffle_xor(top, m));
  ROLLED
  for (uint32_t s = lane; s < used; s += 16) weights[s] = exp_f32(weights[s] - top);
  wave_sync();
  ROLLED
  for (uint32_t s = 0; s < used; s += 8) {
    float weight[8], of_split[8];
    UNROLL
    for (uint32_t i = 0; i < 8; i += 4) {
      load_four(weights + s + i, weight + i);
      load_four(masses + s + i, of_split + i);
    }
    UNROLL
    for (uint32_t i = 0; i < 8; i++) mass = s + i < used ? fma_f32(weight[i], of_split[i], mass) : mass;
  }
  if (lane == 0) shares[h] = 1.0f / mass;
  wave_sync();
}

DEVICE void join(const step_join_args& a) {
  uint8_t* memory = lds_bytes();
  uint32_t wave = tile_group(), first_head = block_y() * HEADS, h = thread_id() / 16, unit = thread_id() % 16;
  float *partial = (float*)(memory + WAVES * CODES_BYTES), *scales = partial + WAVES * WEIGHTS_BYTES / 4;
  float *weights = scales + WAVES * SPLIT, *shares = weights + HEADS * SPLITS_MAX;
  Turn turn = {memory + wave * CODES_BYTES, partial + wave * (WEIGHTS_BYTES / 4), scales + wave * SPLIT};
  next_may_begin();
  previous_done();
  int32_t count = ((const int32_t*)a.counts)[block_z()];
  uint32_t used = count > 0 ? ((uint32_t)count + SPLIT - 1) / SPLIT : 0u;
  if (wave < used) copy_codes(a, wave, turn);
  weigh_splits(a, used, weights, turn.weights, shares);
  if (wave < used) copy_weights(a, wave, turn);
  float sum[4] = {};
  ROLLED
  for (uint32_t first = 0; first < used; first += WAVES) {
    uint32_t next = first + wave + WAVES;
    copies_done();
    wave_sync();
    multiply(turn);  // of no split: of whatever there is, for nobody
    if (next < used) copy_codes(a, next, turn);
    block_sync();
    UNROLL
    for (uint32_t s = 0; s < WAVES; s++) {
      if (first + s >= used) break;
      float weight = weights[h * SPLITS_MAX + first + s], values[4];
      load_four(partial + s * (WEIGHTS_BYTES / 4) + unit_at(h, unit), values);
      UNROLL
      for (uint32_t i = 0; i < 4; i++) sum[i] = fma_f32(weight, values[i], sum[i]);
    }
    block_sync();
    if (next < used) copy_weights(a, next, turn);
  }
  if (first_head + h >= a.heads) return;
  bf16* to = (bf16*)a.x + ((uint64_t)block_z() * a.heads + first_head + h) * LATENT + GROUP * block_x() + 4 * unit;
  UNROLL
  for (uint32_t i = 0; i < 4; i++) sum[i] = used ? sum[i] * shares[h] : 0.0f;
  *(uint64_t*)to = pack_bf16(sum[0], sum[1]) | (uint64_t)pack_bf16(sum[2], sum[3]) << 32;
}

}  // namespace attend_rows
#else
namespace attend_rows {
DEVICE void weigh(const step_join_args&) {}
DEVICE void join(const step_join_args&) {}
}  // namespace attend_rows
#endif
