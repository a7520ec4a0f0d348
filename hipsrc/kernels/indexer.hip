// indexer.hip - index score of every position a query row may see (the "lightning indexer").
//   score[r, p] = sum_j gate[r, j] * head_scale * max(0, <q[r, j], key[p]> * key_scale)      p <= positions[r]
// q [rows, heads, dim] T, keys [dim] T found through the session's extent table, f32 arithmetic. ReLU comes before the head weighting.
// Order of additions: a dot product as dot8; heads j = part, part + 8, ... ascending in each of eight parts; parts added pairwise.
// It depends on nothing but heads and dim, so a row's bits depend on neither its neighbours, the extent size nor the session's length.
// A side of a pair scores the positions that it holds, as the rows of its own tables and columns (share.h).
// Limits: dim <= 128, heads * dim <= 4096. Grid (tiles of 32 rows of keys, rows): fixed by the longest row; tiles past positions[r] leave.
#include "portable.h"
#include "share.h"

namespace indexer {

constexpr uint32_t THREADS = 256;
constexpr uint32_t TILE = 32;                // keys a block
constexpr uint32_t PARTS = THREADS / TILE;   // work-items a key
constexpr uint32_t DIM_MAX = 128;
constexpr uint32_t KEY_STRIDE = DIM_MAX + 1;  // odd: work-items with different keys meet different LDS banks
constexpr uint32_t QUERY_MAX = 4096;
constexpr uint32_t HEADS_MAX = 64;

static_assert(PARTS == 8, "the order of additions in the header counts eight parts");

template <class T> DEVICE void index_score(const index_score_args& a) {
  SHARED(float, query, QUERY_MAX);
  SHARED(float, keys, TILE * KEY_STRIDE);
  SHARED(float, gates, HEADS_MAX);
  SHARED(float, partial, THREADS);
  SHARED(const T*, key_rows, TILE);
  uint32_t t = thread_id(), row = block_y(), first = block_x() * TILE;
  int32_t position = ((const int32_t*)a.positions)[row];
  uint32_t keys_visible = share::rows_of(position < 0 ? 0u : (uint32_t)position + 1u, a.extent_rows, a.side, a.sides);
  if (first >= keys_visible) return;
  uint32_t visible = keys_visible - first, count = visible < TILE ? visible : TILE;

  if (t < count) {
    uint32_t p = first + t;
    const uint64_t* table = (const uint64_t*)a.tables + (uint64_t)((const int32_t*)a.sessions)[row] * a.table_stride;
    uint64_t offset = ((uint64_t)a.plane * a.extent_rows + p % a.extent_rows) * a.key_bytes;
    key_rows[t] = pointer_from<const T>(table[p / a.extent_rows] + offset, a.key_bytes);
  }
  const T* q = (const T*)a.q + (uint64_t)row * a.heads * a.dim;
  for (uint32_t i = t; i < a.heads * a.dim; i += THREADS) query[i] = load_f32(q + i);
  for (uint32_t j = t; j < a.heads; j += THREADS) gates[j] = ((const float*)a.gate)[(uint64_t)row * a.heads + j] * a.head_scale;
  block_sync();
  // A wave copies whole keys, lanes along the key.
  for (uint32_t n = t / WAVE; n < count; n += THREADS / WAVE) {
    const T* key = key_rows[n];
    for (uint32_t c = lane_id(); c < a.dim; c += WAVE) keys[n * KEY_STRIDE + c] = load_f32(key + c);
  }
  block_sync();

  uint32_t n = t % TILE, part = t / TILE;
  float sum = 0;
  if (n < count) {
    for (uint32_t j = part; j < a.heads; j += PARTS) {
      float similarity = dot8(query + j * a.dim, keys + n * KEY_STRIDE, a.dim) * a.key_scale;
      sum = fma_f32(gates[j], max_f32(0.0f, similarity), sum);
    }
  }
  partial[t] = sum;
  block_sync();
  if (t < count) {
    float p[PARTS];
    UNROLL
    for (uint32_t i = 0; i < PARTS; i++) p[i] = partial[i * TILE + t];
    float score = ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
    ((float*)a.scores)[(uint64_t)row * a.score_stride + first + t] = score;
  }
}

}  // namespace indexer

// LAUNCH index_score_f32 block=256 tile=32 dim_max=128 query_max=4096 heads_max=64
KERNEL(index_score_f32, index_score_args, 256) { indexer::index_score<float>(a); }
// LAUNCH index_score_bf16 block=256 tile=32 dim_max=128 query_max=4096 heads_max=64
KERNEL(index_score_bf16, index_score_args, 256) { indexer::index_score<bf16>(a); }
