// attention.hip - absorbed MLA attention over the planned rows.
//   s[n] = (<q_latent[r, h], latent[n]> + <q_rope[r, h], rope[n]>) * scale     n in plan order, n < counts[r]
//   out[r, h] = sum_n softmax(s)[n] * latent[n]                                zero if counts[r] is 0
// A history row lies at (plan[r, n] & ~15) + offsets[plan[r, n] & 3], in one of the row formats, and is read into f32 (exactly, in each):
//   f32, bf16   [latent | rope]
//   q8g64       latent i8, latent / 64 f16 scales, rope bf16; latent[c] = i8[c] * scale[c / 64]
// The bits of a result depend neither on the space nor on the address of a row. f32 arithmetic, one rounding to T at the end.
// One block a (group of 8 heads, row). Rows pass through LDS in tiles of 8 with an online softmax, so each is read once a group.
// Order of additions, the same for any batch: a dot product in four quarters, each as dot8; the softmax sum in 8 parts (n % 8), then
// ascending; the output over n ascending, rescaled at each tile. Method: FlashAttention's online softmax on the latent (MLA, absorbed).
// Limits: latent <= 512, latent + rope <= 576. LDS: 8 x 577 + 8 x 577 + 328 floats, 38 KiB (48 KiB is what nvcc takes).
#include "portable.h"
#include "row_format.h"

namespace mla {

constexpr uint32_t THREADS = 256;
constexpr uint32_t HEADS = 8;        // heads a block
constexpr uint32_t TILE = 8;         // history rows a tile
constexpr uint32_t PARTS = 4;        // work-items a dot product
constexpr uint32_t LATENT_MAX = 512;
constexpr uint32_t WIDTH_MAX = 576;
constexpr uint32_t STRIDE = WIDTH_MAX + 1;  // odd: work-items on different rows meet different LDS banks
constexpr uint32_t LANES = THREADS / TILE;  // work-items that copy a row
constexpr uint32_t UNIT = ROW_UNIT;         // values a work-item copies in one go
constexpr uint32_t COLUMNS = LATENT_MAX / THREADS;  // output columns a work-item

constexpr uint32_t OWNERS = TILE * HEADS;    // work-items of the softmax

static_assert(PARTS * OWNERS == THREADS, "a work-item takes one part of the dot product of one (row, head)");

template <class T> DEVICE void stage_query(const attend_args& a, uint32_t row, uint32_t first_head, float* query) {
  uint32_t width = a.latent + a.rope;
  for (uint32_t i = thread_id(); i < HEADS * width; i += THREADS) {
    uint32_t head = first_head + i / width, c = i % width;
    uint64_t at = (uint64_t)row * a.heads + head;
    float v = 0.0f;
    if (head < a.heads) {
      if (c < a.latent) v = load_f32((const T*)a.q_latent + at * a.latent + c);
      else v = load_f32((const T*)a.q + at * a.q_head_stride + a.q_rope_offset + (c - a.latent));
    }
    query[(i / width) * STRIDE + c] = v;
  }
}

// Copies history rows [first, first + TILE) of the plan into LDS; rows past `count` become zeros, since a weight of 0 must not meet a NaN.
// One wave or half a wave a row, eight values a work-item in turn: full lines on the device, vectors on the host.
template <class Row> DEVICE void stage_rows(const attend_args& a, const uint64_t* plan, uint32_t first, uint32_t count, float* rows) {
  uint32_t width = a.latent + a.rope, n = thread_id() / LANES, lane = thread_id() % LANES;
  float* to = rows + n * STRIDE;
  if (first + n >= count) {
    for (uint32_t c = lane; c < width; c += LANES) to[c] = 0.0f;
    return;
  }
  const uint8_t* from = row_pointer<const uint8_t>(plan[first + n], a.offsets, Row::bytes(a.latent, a.rope));
  for (uint32_t c = lane * UNIT; c < width; c += LANES * UNIT) Row::load(from, a.latent, a.rope, c, to + c);
}

// out += p[n, h] * latent[n, c] over the tile, after out *= decay[h]. acc[i][h] is column thread_id() + i * THREADS.
DEVICE void accumulate(const attend_args& a, const float* rows, const float* weights, const float* decay, float acc[COLUMNS][HEADS]) {
  UNROLL
  for (uint32_t i = 0; i < COLUMNS; i++) {
    uint32_t c = thread_id() + i * THREADS;
    if (c >= a.latent) return;
    UNROLL
    for (uint32_t h = 0; h < HEADS; h++) acc[i][h] *= decay[h];
    UNROLL
    for (uint32_t n = 0; n < TILE; n++) {
      float v = rows[n * STRIDE + c];
      UNROLL
      for (uint32_t h = 0; h < HEADS; h++) acc[i][h] = fma_f32(weights[n * HEADS + h], v, acc[i][h]);
    }
  }
}

// T: of queries and output. Row: a row format.
template <class T, class Row> DEVICE void attend(const attend_args& a) {
  SHARED(float, query, HEADS * STRIDE);
  SHARED(float, rows, TILE * STRIDE);
  SHARED(float, dots, THREADS);
  SHARED(float, weights, TILE * HEADS);  // [n, h]
  SHARED(float, decay, HEADS);
  uint32_t t = thread_id(), row = block_y(), first_head = block_x() * HEADS;
  uint32_t width = a.latent + a.rope, quarter = ((width + PARTS - 1) / PARTS + 7) / 8 * 8;
  int32_t planned = ((const int32_t*)a.counts)[row];
  uint32_t count = planned < 0 ? 0u : (uint32_t)planned;
  const uint64_t* plan = (const uint64_t*)a.plan + (uint64_t)row * a.k;

  stage_query<T>(a, row, first_head, query);
  float acc[COLUMNS][HEADS];
  for (uint32_t i = 0; i < COLUMNS; i++)
    for (uint32_t h = 0; h < HEADS; h++) acc[i][h] = 0.0f;
  // Work-item t works on row n = t % 8 of the tile and head h = t / 8 % 8. Those of part 0 own the softmax: the eight of a head share its
  // maximum, and each sums every eighth row.
  float top = float_of(0xff800000u), mass = 0.0f;
  uint32_t n = t % TILE, h = (t / TILE) % HEADS;
  uint32_t start = t / OWNERS * quarter, part_width = start < width ? width - start : 0u;
  part_width = part_width < quarter ? part_width : quarter;
  for (uint32_t first = 0; first < count; first += TILE) {
    stage_rows<Row>(a, plan, first, count, rows);
    block_sync();
    dots[t] = dot8(query + h * STRIDE + start, rows + n * STRIDE + start, part_width);
    block_sync();
    if (t < OWNERS) {
      float tile_top = top, mine = 0.0f;
      for (uint32_t i = 0; i < TILE && first + i < count; i++) {
        const float* d = dots + h * TILE + i;
        float s = ((d[0] + d[OWNERS]) + (d[2 * OWNERS] + d[3 * OWNERS])) * a.scale;
        if (i == n) mine = s;
        tile_top = max_f32(tile_top, s);
      }
      float keep = exp_f32(top - tile_top), weight = first + n < count ? exp_f32(mine - tile_top) : 0.0f;
      mass = fma_f32(mass, keep, weight);
      top = tile_top;
      weights[n * HEADS + h] = weight;
      if (n == 0) decay[h] = keep;
    }
    block_sync();
    accumulate(a, rows, weights, decay, acc);
    block_sync();
  }

  if (t < OWNERS) dots[t] = mass;
  block_sync();
  if (t < HEADS) {
    float sum = 0.0f;
    for (uint32_t i = 0; i < TILE; i++) sum += dots[t * TILE + i];
    decay[t] = count ? 1.0f / sum : 0.0f;
  }
  block_sync();
  for (uint32_t i = 0; i < COLUMNS; i++) {
    uint32_t c = t + i * THREADS;
    for (uint32_t g = 0; g < HEADS; g++) {
      if (c < a.latent && first_head + g < a.heads)
        store_f32((T*)a.out + ((uint64_t)row * a.heads + first_head + g) * a.latent + c, acc[i][g] * decay[g]);
    }
  }
}

}  // namespace mla

// LAUNCH attend_f32_f32 block=256 heads=8 tile=8 latent_max=512 width_max=576
KERNEL(attend_f32_f32, attend_args, 256) { mla::attend<float, plain_row<float>>(a); }
// LAUNCH attend_bf16_bf16 block=256 heads=8 tile=8 latent_max=512 width_max=576
KERNEL(attend_bf16_bf16, attend_args, 256) { mla::attend<bf16, plain_row<bf16>>(a); }
// LAUNCH attend_f32_q8g64 block=256 heads=8 tile=8 latent_max=512 width_max=576
KERNEL(attend_f32_q8g64, attend_args, 256) { mla::attend<float, q8g64_row>(a); }
// LAUNCH attend_bf16_q8g64 block=256 heads=8 tile=8 latent_max=512 width_max=576
KERNEL(attend_bf16_q8g64, attend_args, 256) { mla::attend<bf16, q8g64_row>(a); }
