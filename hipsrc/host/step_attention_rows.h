// step_attention_rows.h - step_attend_* and step_expand_* of the fast host build. Orders of additions as step_attention.hip has them on the host:
// scores in four quarters of steps of 16 columns, heads in the lanes; the output over rows ascending, columns in the lanes.
#pragma once

namespace {
namespace host {
namespace step_attention {

using step_mla::GROUP;
using step_mla::GROUPS;
using step_mla::HEADS;
using step_mla::LATENT_MAX;
using step_mla::QUARTER_STEPS;
using step_mla::QUARTERS;
using step_mla::SPLIT;
constexpr uint32_t WIDTH = step_mla::WIDTH_MAX;
constexpr uint32_t STEP = 16;      // columns of a matrix tile
constexpr uint32_t PASS_MAX = 32;  // rows of a pass
constexpr uint32_t HALVES = HEADS / LANES;

// One block: a split of the planned rows, 16 heads of one query row.
struct Split {
  alignas(32) float query[WIDTH * HEADS];  // [column][head]
  alignas(32) float rows[PASS_MAX * WIDTH];
  alignas(32) float sums[HEADS * LATENT_MAX];  // [head][column]
  alignas(32) float part[QUARTERS][PASS_MAX][HEADS];
  alignas(32) float weights[PASS_MAX][HEADS];
  alignas(32) float decay[HEADS];
  float scales[PASS_MAX][GROUPS];
  float top[HEADS], mass[HEADS];
  uint32_t halves;  // of the heads that exist: 1 or 2
};

template <class T> DEVICE void load_query(Split& s, const step_attend_args& a, uint32_t row, uint32_t first_head) {
  memset(s.query, 0, sizeof s.query);
  uint32_t heads = a.heads - first_head < HEADS ? a.heads - first_head : HEADS;
  s.halves = (heads + LANES - 1) / LANES;
  for (uint32_t h = 0; h < heads; h++) {
    uint64_t at = (uint64_t)row * a.heads + first_head + h;
    const T *latent = (const T*)a.q_latent + at * a.latent, *rope = (const T*)a.q + at * a.q_head_stride + a.q_rope_offset;
    for (uint32_t c = 0; c < a.latent; c++) s.query[c * HEADS + h] = load_f32(latent + c);
    for (uint32_t c = 0; c < a.rope; c++) s.query[(a.latent + c) * HEADS + h] = load_f32(rope + c);
  }
}

// A row as the tiles see it: values, or codes with the scales of their groups (1 past the latent).
template <class T> DEVICE void load_row(const step_mla::plain_words<T>*, const uint8_t* from, uint32_t latent, uint32_t rope, float* to, float*) {
  for (uint32_t c = 0; c < latent + rope; c++) to[c] = load_f32((const T*)from + c);
}
template <class T>
DEVICE void load_row(const step_mla::q8g64_words<T>*, const uint8_t* from, uint32_t latent, uint32_t rope, float* to, float* scales) {
  for (uint32_t c = 0; c < latent; c++) to[c] = (float)((const int8_t*)from)[c];
  const bf16* tail = (const bf16*)(from + q8_rope_offset(latent));
  for (uint32_t c = 0; c < rope; c++) to[latent + c] = bf16_to_f32(tail[c]);
  for (uint32_t g = 0; g < GROUPS; g++) scales[g] = g < latent / GROUP ? f16_value(((const uint16_t*)(from + latent))[g]) : 1.0f;
}

// part[quarter][n] of rows n0 and n0 + 1: the steps of all quarters side by side.
template <bool SCALED> DEVICE void score(Split& s, uint32_t width, uint32_t n0) {
  for (uint32_t half = 0; half < s.halves; half++) {
    lanes8 total[QUARTERS][2] = {}, group[QUARTERS][2] = {};
    for (uint32_t i = 0; i < QUARTER_STEPS; i++) {
      bool scaled = SCALED && i < 8;
      for (uint32_t q = 0; q < QUARTERS; q++) {
        uint32_t step = i < 8 ? 8 * q + i : 32 + q;
        if (scaled && i % step_mla::GROUP_STEPS == 0) group[q][0] = group[q][1] = all_lanes(0.0f);
        if (STEP * step < width) {
          lanes8 v0 = scaled ? group[q][0] : total[q][0], v1 = scaled ? group[q][1] : total[q][1];
          const float *x = s.query + STEP * step * HEADS + half * LANES, *r0 = s.rows + n0 * WIDTH + STEP * step, *r1 = r0 + WIDTH;
          UNROLL
          for (uint32_t k = 0; k < STEP; k++) {
            lanes8 v = load8(x + k * HEADS);
            v0 = fma8(v, all_lanes(r0[k]), v0);
            v1 = fma8(v, all_lanes(r1[k]), v1);
          }
          (scaled ? group[q][0] : total[q][0]) = v0;
          (scaled ? group[q][1] : total[q][1]) = v1;
        }
        if (!scaled || i % step_mla::GROUP_STEPS != step_mla::GROUP_STEPS - 1) continue;
        for (uint32_t n = 0; n < 2; n++) total[q][n] = fma8(all_lanes(s.scales[n0 + n][step / step_mla::GROUP_STEPS]), group[q][n], total[q][n]);
      }
    }
    for (uint32_t q = 0; q < QUARTERS; q++) {
      for (uint32_t n = 0; n < 2; n++) store8(&s.part[q][n0 + n][half * LANES], total[q][n]);
    }
  }
}

// Softmax of a pass of ROWS rows of which `valid` exist: 16 work-items a head, each with every 16th row.
template <uint32_t ROWS> DEVICE void weigh(Split& s, float scale, uint32_t valid) {
  for (uint32_t h = 0; h < s.halves * LANES; h++) {
    float dots[ROWS], sums[16] = {}, top = s.top[h];
    for (uint32_t n = 0; n < ROWS; n++) {
      dots[n] = (((s.part[0][n][h] + s.part[1][n][h]) + s.part[2][n][h]) + s.part[3][n][h]) * scale;
      if (n < valid) top = max_f32(top, dots[n]);
    }
    for (uint32_t n = 0; n < ROWS; n++) {
      float p = n < valid ? exp_f32(dots[n] - top) : 0.0f;
      s.weights[n][h] = p;
      sums[n % 16] += p;
    }
    for (uint32_t m = 8; m; m >>= 1) {
      for (uint32_t l = 0; l < m; l++) sums[l] += sums[l + m];
    }
    float keep = exp_f32(s.top[h] - top);
    s.mass[h] = fma_f32(s.mass[h], keep, sums[0]);
    s.top[h] = top;
    s.decay[h] = keep;
  }
}

// sums = sums * decay + p * latent over the rows of a pass, 16 columns of four heads in registers. p: T(weight), or T(weight * scale of the group).
template <class T, uint32_t ROWS, bool SCALED> DEVICE void accumulate(Split& s, uint32_t latent) {
  constexpr uint32_t H = 4;
  float p[ROWS][HEADS];
  for (uint32_t first = 0; first < latent; first += GROUP) {
    if (SCALED || first == 0) {
      for (uint32_t n = 0; n < ROWS; n++) {
        for (uint32_t h = 0; h < HEADS; h++) p[n][h] = rounded<T>::of(SCALED ? s.weights[n][h] * s.scales[n][first / GROUP] : s.weights[n][h]);
      }
    }
    uint32_t end = latent - first < GROUP ? latent : first + GROUP;
    for (uint32_t h0 = 0; h0 < s.halves * LANES; h0 += H) {
      for (uint32_t c = first; c < end; c += 2 * LANES) {
        lanes8 low[H], high[H];
        UNROLL
        for (uint32_t h = 0; h < H; h++) {
          lanes8 keep = all_lanes(s.decay[h0 + h]);
          low[h] = load8(s.sums + (h0 + h) * LATENT_MAX + c) * keep;
          high[h] = load8(s.sums + (h0 + h) * LATENT_MAX + c + LANES) * keep;
        }
        for (uint32_t n = 0; n < ROWS; n++) {
          lanes8 v0 = load8(s.rows + n * WIDTH + c), v1 = load8(s.rows + n * WIDTH + c + LANES);
          UNROLL
          for (uint32_t h = 0; h < H; h++) {
            lanes8 weight = all_lanes(p[n][h0 + h]);
            low[h] = fma8(weight, v0, low[h]);
            high[h] = fma8(weight, v1, high[h]);
          }
        }
        UNROLL
        for (uint32_t h = 0; h < H; h++) {
          store8(s.sums + (h0 + h) * LATENT_MAX + c, low[h]);
          store8(s.sums + (h0 + h) * LATENT_MAX + c + LANES, high[h]);
        }
      }
    }
  }
}

// Planned rows [done, done + ROWS) of the split; those past `valid` are zeros. False after a failed touch.
template <class Words, uint32_t ROWS> DEVICE bool load_pass(Split& s, const step_attend_args& a, Blocks& b, const uint64_t* plan, uint32_t valid) {
  for (uint32_t n = 0; n < ROWS; n++) {
    if (n >= valid) {
      memset(s.rows + n * WIDTH, 0, sizeof(float) * WIDTH);
      for (uint32_t g = 0; g < GROUPS; g++) s.scales[n][g] = g < a.latent / GROUP ? 0.0f : 1.0f;
      continue;
    }
    const uint8_t* from = b.row(plan[n], a.offsets, Words::format::bytes(a.latent, a.rope));
    if (!from) return false;
    load_row((const Words*)nullptr, from, a.latent, a.rope, s.rows + n * WIDTH, s.scales[n]);
  }
  return true;
}

DEVICE void store_partial(const Split& s, const step_attend_args& a, uint32_t row, uint32_t first_head, uint32_t split) {
  for (uint32_t h = 0; h < HEADS && first_head + h < a.heads; h++) {
    uint64_t at = ((uint64_t)row * a.heads + first_head + h) * a.splits + split;
    memcpy((float*)a.partial + at * a.latent, s.sums + h * LATENT_MAX, a.latent * sizeof(float));
    ((float*)a.tops)[at] = s.top[h];
    ((float*)a.masses)[at] = s.mass[h];
  }
}

// Grid: splits, ceil(heads / 16), rows. T, Words: as step_mla::attend.
template <class T, class Words> bool attend(const step_attend_args& a, Blocks& b) {
  constexpr uint32_t ROWS = step_mla::staged<T>::ROWS;
  Split s;
  memset(s.rows, 0, sizeof s.rows);  // between a row's width and a whole step it stays zero
  for (uint64_t block = b.first; block < b.last; block++) {
    uint32_t split = (uint32_t)(block % b.grid.x), first_head = (uint32_t)(block / b.grid.x % b.grid.y) * HEADS, first = split * SPLIT;
    uint32_t row = (uint32_t)(block / b.grid.x / b.grid.y);
    int32_t planned = ((const int32_t*)a.counts)[row];
    if (planned <= (int32_t)first) continue;
    uint32_t left = (uint32_t)planned - first;
    const uint64_t* plan = (const uint64_t*)a.plan + (uint64_t)row * a.k + first;
    load_query<T>(s, a, row, first_head);
    memset(s.sums, 0, sizeof s.sums);
    for (uint32_t h = 0; h < HEADS; h++) {
      s.top[h] = step_mla::LOWEST;
      s.mass[h] = 0.0f;
    }
    for (uint32_t done = 0; done < SPLIT && done < left; done += ROWS) {
      uint32_t valid = left - done < ROWS ? left - done : ROWS;
      if (!load_pass<Words, ROWS>(s, a, b, plan + done, valid)) return false;
      for (uint32_t n = 0; n < ROWS; n += 2) score<Words::SCALED>(s, a.latent + a.rope, n);
      weigh<ROWS>(s, a.scale, valid);
      accumulate<T, ROWS, Words::SCALED>(s, a.latent);
    }
    store_partial(s, a, row, first_head, split);
  }
  return true;
}

// x = T(the splits joined) as f32.
template <class T> DEVICE void join(const step_expand_args& a, uint32_t row, uint32_t head, uint32_t used, float* x) {
  uint64_t at = ((uint64_t)row * a.heads + head) * a.splits;
  const float *tops = (const float*)a.tops + at, *masses = (const float*)a.masses + at;
  float top = tops[0], mass = 0.0f;
  for (uint32_t s = 1; s < used; s++) top = max_f32(top, tops[s]);
  for (uint32_t c = 0; c < a.latent; c++) x[c] = 0.0f;
  for (uint32_t s = 0; s < used; s++) {
    float weight = exp_f32(tops[s] - top);
    mass = fma_f32(weight, masses[s], mass);
    const float* partial = (const float*)a.partial + (at + s) * a.latent;
    for (uint32_t c = 0; c < a.latent; c++) x[c] = fma_f32(weight, partial[c], x[c]);
  }
  float scale = 1.0f / mass;
  for (uint32_t c = 0; c < a.latent; c++) x[c] = rounded<T>::of(x[c] * scale);
}

template <class T, class W> DEVICE void expand_columns(const step_expand_args& a, uint32_t head, uint32_t first, uint32_t count, float* x, T* o) {
  using R = products::reader<W>;
  float* packed = x + a.latent;
  products::pack<R>(x, a.latent, a.latent >= gemv::LONG_K, packed);
  float sums[step_expansion::COLUMNS];
  auto row = [&](uint32_t i) { return products::weight_row<W>(a.codes, a.scales, (uint64_t)head * a.v + first + i, a.latent); };
  products::dots<R, 1>(row, count, packed, 0, a.latent, a.latent >= gemv::LONG_K, sums);
  for (uint32_t c = 0; c < count; c++) store_f32(o + first + c, sums[c]);
}

// Grid: rows, ceil(v / 128), heads.
template <class T> bool expand(const step_expand_args& a, Blocks& b) {
  constexpr uint32_t COLUMNS = step_expansion::COLUMNS;
  float* x = b.scratch(a.latent + products::packed_floats(a.latent));
  if (!x) return false;
  for (uint64_t block = b.first; block < b.last; block++) {
    uint32_t row = (uint32_t)(block % b.grid.x), first = (uint32_t)(block / b.grid.x % b.grid.y) * COLUMNS;
    uint32_t head = (uint32_t)(block / b.grid.x / b.grid.y), count = a.v - first < COLUMNS ? a.v - first : COLUMNS;
    T* o = (T*)a.o + ((uint64_t)row * a.heads + head) * a.v;
    int32_t planned = ((const int32_t*)a.counts)[row];
    if (planned <= 0) {
      for (uint32_t c = 0; c < count; c++) store_f32(o + first + c, 0.0f);
      continue;
    }
    join<T>(a, row, head, ((uint32_t)planned + SPLIT - 1) / SPLIT, x);
    if (a.format == WEIGHT_Q8G64) expand_columns<T, q8g64_weights>(a, head, first, count, x, o);
    else if (a.format == WEIGHT_Q4G64) expand_columns<T, q4g64_weights>(a, head, first, count, x, o);
    else if (a.format == WEIGHT_BF16) expand_columns<T, bf16_weights>(a, head, first, count, x, o);
    else expand_columns<T, f32_weights>(a, head, first, count, x, o);
  }
  return true;
}

}  // namespace step_attention

FAST_KERNEL(step_attend_f32_f32, step_attend_args, step_attention::attend<float, step_mla::plain_words<float>>);
FAST_KERNEL(step_attend_bf16_bf16, step_attend_args, step_attention::attend<bf16, step_mla::plain_words<bf16>>);
FAST_KERNEL(step_attend_f32_q8g64, step_attend_args, step_attention::attend<float, step_mla::q8g64_words<float>>);
FAST_KERNEL(step_attend_bf16_q8g64, step_attend_args, step_attention::attend<bf16, step_mla::q8g64_words<bf16>>);
FAST_KERNEL(step_attend_one_bf16_q8g64, step_attend_args, step_attention::attend<bf16, step_mla::q8g64_words<bf16>>);
FAST_KERNEL(step_expand_f32, step_expand_args, step_attention::expand<float>);
FAST_KERNEL(step_expand_bf16, step_expand_args, step_attention::expand<bf16>);
FAST_KERNEL(step_expand_one_bf16, step_expand_args, step_attention::expand<bf16>);

}  // namespace host
}  // namespace
