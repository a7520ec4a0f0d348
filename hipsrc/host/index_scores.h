// index_scores.h - index_score_* of the fast host build. Orders of additions as in indexer.hip: a dot product as dot8 with its partials in the lanes;
// then eight heads in the lanes, which are the eight parts of a position's score.
#pragma once

namespace {
namespace host {
namespace scores {

using indexer::HEADS_MAX;
using indexer::QUERY_MAX;
using indexer::TILE;
constexpr uint32_t KEYS = 4;  // beside two heads: eight sums in registers
constexpr uint32_t DIM_MAX = indexer::DIM_MAX;
constexpr uint32_t ROW_MAX = HEADS_MAX * DIM_MAX;

struct Query {
  alignas(32) float q[ROW_MAX];  // [head][pitch]; heads beyond the last one of whole lanes are zero
  alignas(32) float gates[HEADS_MAX];
  alignas(32) float keys[TILE * DIM_MAX];
  uint32_t row;
};

// A: index_score_args or step_score_args.
template <class T, class A> DEVICE void load_query(Query& s, const A& a, uint32_t row, uint32_t pitch) {
  memset(s.q, 0, sizeof(float) * pitch * ((a.heads + LANES - 1) / LANES * LANES));
  memset(s.gates, 0, sizeof s.gates);
  const T* q = (const T*)a.q + (uint64_t)row * a.heads * a.dim;
  for (uint32_t j = 0; j < a.heads; j++) {
    for (uint32_t c = 0; c < a.dim; c++) s.q[j * pitch + c] = load_f32(q + j * a.dim + c);
    s.gates[j] = ((const float*)a.gate)[(uint64_t)row * a.heads + j] * a.head_scale;
  }
  s.row = row;
}

// Similarities of heads [h0, h0 + 8) with KEYS keys: out[key][head].
DEVICE void similarities(const Query& s, const float* keys, uint32_t pitch, uint32_t h0, float (*out)[LANES]) {
  for (uint32_t h = 0; h < LANES; h += 2) {
    const float *q0 = s.q + (h0 + h) * pitch, *q1 = q0 + pitch;
    lanes8 p[LANES] = {};
    for (uint32_t c = 0; c < pitch; c += LANES) {
      lanes8 v0 = load8(q0 + c), v1 = load8(q1 + c);
      UNROLL
      for (uint32_t n = 0; n < KEYS; n++) {
        lanes8 key = load8(keys + n * pitch + c);
        p[n] = fma8(v0, key, p[n]);
        p[KEYS + n] = fma8(v1, key, p[KEYS + n]);
      }
    }
    lanes8 sums = dot8_sums(p);
    for (uint32_t n = 0; n < KEYS; n++) {
      out[n][h] = sums[n];
      out[n][h + 1] = sums[KEYS + n];
    }
  }
}

// Scores of `count` keys, those past it computed and dropped.
template <class A> DEVICE void score_keys(const Query& s, const A& a, uint32_t pitch, uint32_t count, float* out) {
  for (uint32_t n0 = 0; n0 < count; n0 += KEYS) {
    lanes8 parts[KEYS] = {};
    for (uint32_t h0 = 0; h0 < a.heads; h0 += LANES) {
      float similar[KEYS][LANES];
      similarities(s, s.keys + n0 * pitch, pitch, h0, similar);
      lanes8 gates = load8(s.gates + h0);
      for (uint32_t n = 0; n < KEYS; n++) parts[n] = fma8(gates, max8(all_lanes(0.0f), load8(similar[n]) * all_lanes(a.key_scale)), parts[n]);
    }
    for (uint32_t n = 0; n < KEYS && n0 + n < count; n++) {
      lanes8 p = parts[n];
      out[n0 + n] = ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
    }
  }
}

// Rows of keys [first, first + count) of a session's tables as f32; false after a failed touch.
template <class T, class A> DEVICE bool load_keys(Query& s, const A& a, Blocks& b, uint32_t first, uint32_t count, uint32_t pitch) {
  const uint64_t* table = (const uint64_t*)a.tables + (uint64_t)((const int32_t*)a.sessions)[s.row] * a.table_stride;
  for (uint32_t n = 0; n < count; n++) {
    uint32_t p = first + n;
    uint64_t address = table[p / a.extent_rows] + ((uint64_t)a.plane * a.extent_rows + p % a.extent_rows) * a.key_bytes;
    if (!b.touch(address, a.key_bytes)) return false;
    for (uint32_t c = 0; c < a.dim; c++) s.keys[n * pitch + c] = load_f32((const T*)address + c);
    for (uint32_t c = a.dim; c < pitch; c++) s.keys[n * pitch + c] = 0.0f;
  }
  for (uint32_t n = count; n < (count + KEYS - 1) / KEYS * KEYS; n++) memset(s.keys + n * pitch, 0, sizeof(float) * pitch);
  return true;
}

// Grid: tiles of 32 positions, rows.
template <class T> bool score(const index_score_args& a, Blocks& b) {
  Query s;
  s.row = ~0u;
  uint32_t pitch = (a.dim + LANES - 1) / LANES * LANES;
  for (uint64_t block = b.first; block < b.last; block++) {
    uint32_t row = (uint32_t)(block / b.grid.x), first = (uint32_t)(block % b.grid.x) * TILE;
    int32_t position = ((const int32_t*)a.positions)[row];
    uint32_t keys = share::rows_of(position < 0 ? 0u : (uint32_t)position + 1u, a.extent_rows, a.side, a.sides);
    if (first >= keys) continue;
    uint32_t visible = keys - first, count = visible < TILE ? visible : TILE;
    if (row != s.row) load_query<T>(s, a, row, pitch);
    if (!load_keys<T>(s, a, b, first, count, pitch)) return false;
    score_keys(s, a, pitch, count, (float*)a.scores + (uint64_t)row * a.score_stride + first);
  }
  return true;
}

}  // namespace scores

FAST_KERNEL(index_score_f32, index_score_args, scores::score<float>);
FAST_KERNEL(index_score_bf16, index_score_args, scores::score<bf16>);

}  // namespace host
}  // namespace
