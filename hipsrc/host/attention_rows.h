// attention_rows.h - attend_* of the fast host build. Orders of additions as in attention.hip: a dot product in four quarters, each as dot8 with its
// eight partials in the lanes; softmax sums in eight parts; the output over rows ascending, rescaled at each tile of eight rows.
#pragma once

namespace {
namespace host {
namespace attention {

using mla::HEADS;
using mla::LATENT_MAX;
using mla::PARTS;
using mla::TILE;
constexpr uint32_t PITCH = mla::WIDTH_MAX;  // whole lanes: what follows a row's width is zero

// One block: eight heads of one query row.
struct Group {
  alignas(32) float query[HEADS * PITCH];
  alignas(32) float rows[TILE * PITCH];
  alignas(32) float sums[HEADS * LATENT_MAX];  // [head][column]
  alignas(32) float scores[HEADS][TILE];
  alignas(32) float weights[TILE][HEADS];
  alignas(32) float decay[HEADS];
  alignas(32) float mass[TILE][HEADS];
  float top[HEADS];
  const float* tile[TILE];  // the rows as f32, whole lanes each
};

// scores[h][n] of R rows from `n0` and two heads from `h0`: 4 partial sums in the order of attention.hip's parts.
template <uint32_t R> DEVICE void dots(Group& g, const attend_args& a, uint32_t quarter, uint32_t width, uint32_t n0, uint32_t h0) {
  static_assert(R == 4 && PARTS == 4, "eight sums at once");
  float part[PARTS][LANES];
  for (uint32_t q = 0; q < PARTS; q++) {
    uint32_t begin = q * quarter, end = begin + quarter < width ? begin + quarter : width;
    lanes8 p[LANES] = {};
    const float *x0 = g.query + h0 * PITCH, *x1 = x0 + PITCH;
    for (uint32_t c = begin; c < end; c += LANES) {
      lanes8 v0 = load8(x0 + c), v1 = load8(x1 + c);
      UNROLL
      for (uint32_t r = 0; r < R; r++) {
        lanes8 row = load8(g.tile[n0 + r] + c);
        p[r] = fma8(v0, row, p[r]);
        p[R + r] = fma8(v1, row, p[R + r]);
      }
    }
    store8(part[q], dot8_sums(p));
  }
  lanes8 s = ((load8(part[0]) + load8(part[1])) + (load8(part[2]) + load8(part[3]))) * all_lanes(a.scale);
  for (uint32_t r = 0; r < R; r++) {
    g.scores[h0][n0 + r] = s[r];
    g.scores[h0 + 1][n0 + r] = s[R + r];
  }
}

// The online softmax of one tile of `count` rows.
DEVICE void weigh(Group& g, uint32_t count) {
  for (uint32_t h = 0; h < HEADS; h++) {
    float top = g.top[h];
    for (uint32_t i = 0; i < count; i++) top = max_f32(top, g.scores[h][i]);
    float keep = exp_f32(g.top[h] - top);
    for (uint32_t n = 0; n < TILE; n++) {
      float weight = n < count ? exp_f32(g.scores[h][n] - top) : 0.0f;
      g.weights[n][h] = weight;
      g.mass[n][h] = fma_f32(g.mass[n][h], keep, weight);
    }
    g.top[h] = top;
    g.decay[h] = keep;
  }
}

DEVICE void accumulate(Group& g, uint32_t latent) {
  constexpr uint32_t H = 4;  // heads whose sums of 16 columns stay in registers
  for (uint32_t h0 = 0; h0 < HEADS; h0 += H) {
    for (uint32_t c = 0; c < latent; c += 2 * LANES) {
      lanes8 low[H], high[H];
      UNROLL
      for (uint32_t h = 0; h < H; h++) {
        lanes8 keep = all_lanes(g.decay[h0 + h]);
        low[h] = load8(g.sums + (h0 + h) * LATENT_MAX + c) * keep;
        high[h] = load8(g.sums + (h0 + h) * LATENT_MAX + c + LANES) * keep;
      }
      UNROLL
      for (uint32_t n = 0; n < TILE; n++) {
        lanes8 v0 = load8(g.tile[n] + c), v1 = load8(g.tile[n] + c + LANES);
        UNROLL
        for (uint32_t h = 0; h < H; h++) {
          lanes8 weight = all_lanes(g.weights[n][h0 + h]);
          low[h] = fma8(weight, v0, low[h]);
          high[h] = fma8(weight, v1, high[h]);
        }
      }
      UNROLL
      for (uint32_t h = 0; h < H; h++) {
        store8(g.sums + (h0 + h) * LATENT_MAX + c, low[h]);
        store8(g.sums + (h0 + h) * LATENT_MAX + c + LANES, high[h]);
      }
    }
  }
}

template <class T> DEVICE void load_query(Group& g, const attend_args& a, uint32_t row, uint32_t first_head) {
  memset(g.query, 0, sizeof g.query);
  for (uint32_t h = 0; h < HEADS && first_head + h < a.heads; h++) {
    uint64_t at = (uint64_t)row * a.heads + first_head + h;
    const T *latent = (const T*)a.q_latent + at * a.latent, *rope = (const T*)a.q + at * a.q_head_stride + a.q_rope_offset;
    float* to = g.query + h * PITCH;
    for (uint32_t c = 0; c < a.latent; c++) to[c] = load_f32(latent + c);
    for (uint32_t c = 0; c < a.rope; c++) to[a.latent + c] = load_f32(rope + c);
  }
}

// A history row as f32, to whole lanes: in place where it is that already.
DEVICE const float* row_f32(const plain_row<float>*, const uint8_t* from, uint32_t latent, uint32_t rope, float* to) {
  uint32_t width = latent + rope;
  if (width % LANES == 0 && latent % (2 * LANES) == 0) return (const float*)from;
  memcpy(to, from, sizeof(float) * width);
  return to;
}
DEVICE const float* row_f32(const plain_row<bf16>*, const uint8_t* from, uint32_t latent, uint32_t rope, float* to) {
  for (uint32_t c = 0; c < latent + rope; c += LANES) store8(to + c, load8((const bf16*)from + c));  // a row is whole words of 16 bytes
  return to;
}
DEVICE const float* row_f32(const q8g64_row*, const uint8_t* from, uint32_t latent, uint32_t rope, float* to) {
  for (uint32_t group = 0; group < latent; group += Q8_GROUP) {
    float scale = f16_to_f32(((const uint16_t*)(from + latent))[group / Q8_GROUP]);
    const int8_t* values = (const int8_t*)from + group;
    for (uint32_t c = 0; c < Q8_GROUP; c++) to[group + c] = (float)values[c] * scale;
  }
  const bf16* tail = (const bf16*)(from + q8_rope_offset(latent));
  for (uint32_t c = 0; c < rope; c++) to[latent + c] = bf16_to_f32(tail[c]);
  return to;
}

// The rows of one tile; those past the count are zeros. False after a failed touch.
template <class Row> DEVICE bool load_tile(Group& g, const attend_args& a, Blocks& b, const uint64_t* plan, uint32_t count) {
  for (uint32_t n = 0; n < TILE; n++) {
    float* to = g.rows + n * PITCH;
    if (n >= count) {
      memset(to, 0, sizeof(float) * PITCH);
      g.tile[n] = to;
      continue;
    }
    const uint8_t* from = b.row(plan[n], a.offsets, Row::bytes(a.latent, a.rope));
    if (!from) return false;
    g.tile[n] = row_f32((const Row*)nullptr, from, a.latent, a.rope, to);
  }
  return true;
}

template <class T> DEVICE void finish(Group& g, const attend_args& a, uint32_t row, uint32_t first_head, uint32_t count) {
  for (uint32_t h = 0; h < HEADS && first_head + h < a.heads; h++) {
    float sum = 0.0f;
    for (uint32_t n = 0; n < TILE; n++) sum += g.mass[n][h];
    float scale = count ? 1.0f / sum : 0.0f;
    T* out = (T*)a.out + ((uint64_t)row * a.heads + first_head + h) * a.latent;
    for (uint32_t c = 0; c < a.latent; c++) store_f32(out + c, g.sums[h * LATENT_MAX + c] * scale);
  }
}

// Grid: ceil(heads / 8), rows. T, Row: as mla::attend.
template <class T, class Row> bool attend(const attend_args& a, Blocks& b) {
  Group g;
  memset(g.rows, 0, sizeof g.rows);  // between a row's width and whole lanes it stays zero
  uint32_t width = a.latent + a.rope, quarter = ((width + PARTS - 1) / PARTS + 7) / 8 * 8;
  for (uint64_t block = b.first; block < b.last; block++) {
    uint32_t row = (uint32_t)(block / b.grid.x), first_head = (uint32_t)(block % b.grid.x) * HEADS;
    int32_t planned = ((const int32_t*)a.counts)[row];
    uint32_t count = planned < 0 ? 0u : (uint32_t)planned;
    const uint64_t* plan = (const uint64_t*)a.plan + (uint64_t)row * a.k;
    load_query<T>(g, a, row, first_head);
    memset(g.sums, 0, sizeof g.sums);
    memset(g.mass, 0, sizeof g.mass);
    for (uint32_t h = 0; h < HEADS; h++) g.top[h] = float_of(0xff800000u);
    for (uint32_t first = 0; first < count; first += TILE) {
      uint32_t rows = count - first < TILE ? count - first : TILE;
      if (!load_tile<Row>(g, a, b, plan + first, rows)) return false;
      for (uint32_t h = 0; h < HEADS; h += 2) {
        for (uint32_t n = 0; n < TILE; n += 4) dots<4>(g, a, quarter, width, n, h);
      }
      weigh(g, rows);
      accumulate(g, a.latent);
    }
    finish<T>(g, a, row, first_head, count);
  }
  return true;
}

}  // namespace attention

FAST_KERNEL(attend_f32_f32, attend_args, attention::attend<float, plain_row<float>>);
FAST_KERNEL(attend_bf16_bf16, attend_args, attention::attend<bf16, plain_row<bf16>>);
FAST_KERNEL(attend_f32_q8g64, attend_args, attention::attend<float, q8g64_row>);
FAST_KERNEL(attend_bf16_q8g64, attend_args, attention::attend<bf16, q8g64_row>);

}  // namespace host
}  // namespace
