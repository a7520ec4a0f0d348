// step_halves.hip - y = T(residual + x @ w^T) of a decode step for T = bf16, where two blocks share a set of columns and each has half of k: the order in
// which a pair of devices, which have half of the weights each, adds. Struct: step_gemv_args, segment 0, no norm; part FETCH. The wave product
// (wave_product.h), wide where the first half of k is at least LONG_K. On a side of such a pair (a.mail) there is one half, and each block adds what
// the other device has of its outputs (sum_mail.h).
#include "portable.h"
#include "fetch.h"
#include "sum_mail.h"
#include "wave_crowd.h"

namespace step_halves {

using namespace wave_product;

// What a block multiplies: half `half` of set `set` of outputs.
struct Share {
  uint32_t set, half;
  bool sent;  // the other half is another device's
};
DEVICE Share share_of(const step_gemv_args& a, uint32_t block) {
  bool sent = a.mail.outbox;
  return {sent ? block : block / 2, sent ? 0u : block % 2, sent};
}
DEVICE Weights weights_of(const step_gemv_args& a, const Share& share) {
  bool wide = a.wide;
  return share.sent ? Weights{a.k, a.k, 0, 1, wide} : half_of(a.k, 1, share.half, wide);
}

// What a block does with the sums of up to N rows of the half that it has: sum(wave, row).
template <uint32_t N, class Sum> DEVICE void store(const step_gemv_args& a, uint32_t turns, uint32_t rows, uint32_t* word, const Sum& sum) {
  Share share = share_of(a, opaque(block_x()) - a.part_blocks);  // once more, so that it takes no registers while the weights do
  uint32_t set = share.set / turns;
  bool wide = a.wide;
  auto output = [&](uint32_t wave, uint32_t row) {
    uint32_t to = (wide ? set : set * WAVES + wave) * COLS + tile_lane();
    return to < a.n[0] ? ((share.set - set * turns) * N + row) * a.y_stride[0] + to : sum_mail::OUTSIDE;
  };
  if (share.sent) {
    sum_mail::add_other(a.mail, sum_mail::number_of(a.mail), wide, rows, a.residual, a.y[0], output, sum);
    return;
  }
  Halves halves = {(float*)a.partial, (uint32_t*)a.arrivals};
  for_both<N>(halves, share.set, share.half, wide, rows, word, sum, [&](uint32_t wave, uint32_t, uint32_t row, float both) {
    uint32_t index = output(wave, row);
    if (index != sum_mail::OUTSIDE) store_f32((bf16*)a.y[0] + index, load_f32((const bf16*)a.residual + index) + both);
  });
}

// MOST: rows of x that a block takes where weights come through rings; else it takes ROWS.
template <class W, uint32_t MOST> DEVICE void run(const step_gemv_args& a) {
#if defined(TILE_MMA)
  constexpr bool RINGS = W::SCALED;
#else
  constexpr bool RINGS = false;
#endif
  constexpr uint32_t N = RINGS ? MOST : ROWS;
  SHARED(words16, x, (RINGS ? 1 : WAVES * X_BYTES / 16));
  SHARED(float, x_scale, (RINGS ? 1 : SIDE));
  SHARED(float, sums, (RINGS ? 1 : SUMS));
  SHARED(uint32_t, word, history_rows::FETCH_ROUNDS);
  next_may_begin();
  if (block_x() < a.part_blocks) {
    history_rows::fetch_part(a.part_fetch, block_x(), a.part_blocks, a.rounds, word);
    return;
  }
  Share share = share_of(a, block_x() - a.part_blocks);
  uint32_t turns = (a.rows + N - 1) / N, set = share.set / turns, last = a.n[0] - 1u;
  uint32_t first_row = (share.set - set * turns) * N, rows = a.rows - first_row < N ? a.rows - first_row : N;
  uint32_t column = (a.wide ? set : set * WAVES + tile_group()) * COLS;
  Weights w = weights_of(a, share);
  auto at = [&](uint32_t) { return Matrix{(const uint8_t*)a.codes[0], (const uint16_t*)a.scales[0]}; };
  auto row = [&](uint32_t i) { return column + i < last ? column + i : last; };
  const bf16* from = (const bf16*)a.x + (uint64_t)first_row * a.x_stride + w.first;
  auto row_of_x = [&](uint32_t, uint32_t r) { return from + (uint64_t)r * a.x_stride; };
#if defined(TILE_MMA)
  if constexpr (RINGS) {
    wave_rows::Lds lds = wave_rows::rings_of<W, N>(lds_bytes());
    wave_rows::Walk<W, N> walk;
    wave_rows::begin(walk, w, lds, at(0), row);
    previous_done();
    wave_rows::product<2, false>(walk, w, lds, rows, row_of_x, {}, false, [] {});
    store<N>(a, turns, rows, word, [&](uint32_t wave, uint32_t r) { return wave_rows::sum_of<W, N, false>(w, lds, wave, r, {}); });
    return;
  }
#endif
  Lds lds = {x, x_scale, nullptr, sums, nullptr};
  Walk<W> walk;
  begin(walk, w, at, row);
  previous_done();
  product(walk, w, at, lds, rows, row_of_x, {});
  store<N>(a, turns, rows, word, [&](uint32_t wave, uint32_t r) { return sum_of(w, lds, wave, r, {}); });
}

#if defined(TILE_MMA)
// One row of x. T: tiles of 16 rows a wave; 1: wide, on a side of a pair.
template <class W, uint32_t T> DEVICE void multiply_one(const step_gemv_args& a, const wave_one::Lds& lds, uint32_t* word) {
  constexpr uint32_t WIDTH = wave_one::TILE_ROWS<T>;
  Share share = share_of(a, block_x() - a.part_blocks);
  uint32_t set = share.set, last = a.n[0] - 1u;
  bool wide = T == 1 || a.wide;
  uint32_t column = (wide ? set : set * WAVES + tile_group()) * WIDTH;
  Weights w = weights_of(a, share);
  auto at = [&](uint32_t) { return Matrix{(const uint8_t*)a.codes[0], (const uint16_t*)a.scales[0]}; };
  wave_one::Walk<W, T> walk;
  wave_one::begin(walk, w, lds, at, [&](uint32_t i) { return column + i < last ? column + i : last; });
  previous_done();
  uint32_t number = sum_mail::number_of(a.mail);
  const bf16* x = (const bf16*)a.x + w.first;
  wave_one::product(walk, w, at, lds, [&](uint32_t) { return x; }, {});
  auto sum = [&](uint32_t wave, uint32_t) { return wave_one::sum_of<T>(w, lds, wave, {}); };
  auto output = [&](uint32_t wave, uint32_t) {
    uint32_t to = (wide ? set : set * WAVES + wave) * WIDTH + tile_lane();
    return to <= last && tile_lane() < WIDTH ? to : sum_mail::OUTSIDE;
  };
  if (T == 1 || share.sent) {
    sum_mail::add_other(a.mail, number, wide, 1, a.residual, a.y[0], output, sum);
    return;
  }
  for_both({(float*)a.partial, (uint32_t*)a.arrivals}, set, share.half, wide, 1, word, sum, [&](uint32_t wave, uint32_t, uint32_t row, float both) {
    uint32_t to = output(wave, row);
    if (to != sum_mail::OUTSIDE) store_f32((bf16*)a.y[0] + to, load_f32((const bf16*)a.residual + to) + both);
  });
}

template <class W> DEVICE void run_one(const step_gemv_args& a) {
  SHARED(words16, ring, wave_one::RING_UNITS);
  SHARED(uint64_t, scales, WAVES * COLS);
  SHARED(words16, planes, wave_one::X_UNITS);
  SHARED(float, x_scale, WAVES * RUN);
  SHARED(float, sums, WAVES * COLS);
  SHARED(uint32_t, word, history_rows::FETCH_ROUNDS);
  next_may_begin();
  if (block_x() < a.part_blocks) {
    history_rows::fetch_part(a.part_fetch, block_x(), a.part_blocks, a.rounds, word);
    return;
  }
  wave_one::Lds lds = {ring, scales, planes, x_scale, nullptr, sums, nullptr};
  if (a.narrow) multiply_one<W, 1>(a, lds, word);
  else multiply_one<W, 2>(a, lds, word);
}
#else
template <class W> DEVICE void run_one(const step_gemv_args& a) { run<W, 1>(a); }
#endif

#if defined(TILE_MMA)
constexpr uint32_t CROWD_ROWS = 10;
// Blocks of three teams of waves (wave_crowd.h), each of which has 96 columns of a half of a wide product on one device, and one of a.turns shares of
// the rows; a block of FETCH is as large. Partial sums [blocks][TEAMS][N][COLS], one counter a pair of blocks.
DEVICE void run_crowd(const step_gemv_args& a) {
  constexpr uint32_t N = CROWD_ROWS, TEAMS = wave_crowd::TEAMS;
  SHARED(uint32_t, word, history_rows::FETCH_ROUNDS);
  next_may_begin();
  if (block_x() < a.part_blocks) {
    history_rows::fetch_part<TEAMS>(a.part_fetch, block_x(), a.part_blocks, a.rounds, word);
    return;
  }
  uint32_t block = block_x() - a.part_blocks, turns = a.turns, each = (a.rows + turns - 1) / turns, share = block / 2, half = block % 2;
  uint32_t crowd = share / turns, first_row = (share - crowd * turns) * each, rows = a.rows - first_row < each ? a.rows - first_row : each;
  uint32_t column = (crowd * TEAMS + wave_crowd::team()) * COLS, last = a.n[0] - 1u;
  Weights w = half_of(a.k, 1, half, true);
  const bf16* from = (const bf16*)a.x + (uint64_t)first_row * a.x_stride + w.first;
  wave_crowd::products<N>(
      w, {(const uint8_t*)a.codes[0], (const uint16_t*)a.scales[0]}, lds_bytes(), rows,
      [&](uint32_t i) { return column + i < last ? column + i : last; }, [&](uint32_t r) { return from + (uint64_t)r * a.x_stride; },
      [&](const auto& sum) {
        float* low = (float*)a.partial + (uint64_t)(2 * share * TEAMS + wave_crowd::team()) * N * COLS + tile_lane();
        wave_crowd::for_rows(rows, [&](uint32_t row) { low[half * TEAMS * N * COLS + row * COLS] = sum(row); });
        fence_device();
        block_sync();
        if (thread_id() == 0) *word = global_add((uint32_t*)a.arrivals + share, 1u);
        block_sync();
        if (*word == 0) return;
        fence_device();
        if (thread_id() == 0) ((uint32_t*)a.arrivals)[share] = 0;
        wave_crowd::for_rows(rows, [&](uint32_t row) {
          uint32_t to = column + tile_lane();
          if (to > last) return;
          uint64_t index = (uint64_t)(first_row + row) * a.y_stride[0] + to;
          float both = low[row * COLS] + low[TEAMS * N * COLS + row * COLS];
          store_f32((bf16*)a.y[0] + index, load_f32((const bf16*)a.residual + index) + both);
        });
      });
}
#endif

}  // namespace step_halves

// Grid: part_blocks + 2 * blocks (a.mail: 1 * blocks) of `rows` rows of x and cols columns where half of k is at least long_k, else cols_short.
// LAUNCH step_halves_bf16_bf16 block=256 cols=32 cols_short=256 long_k=1024 rows=8
EARLY_KERNEL(step_halves_bf16_bf16, step_gemv_args, 256, 2) { step_halves::run<bf16_weights, 8>(a); }
// LAUNCH step_halves_bf16_q8g64 block=256 cols=32 cols_short=256 long_k=1024 rows=8
LDS_KERNEL(step_halves_bf16_q8g64, step_gemv_args, 256, 3, (wave_rows::LDS_BYTES<q8g64_weights, 8, false>)) { step_halves::run<q8g64_weights, 8>(a); }
// Of more rows, on sm_90: the same bits.
// LAUNCH step_halves_many_bf16_q8g64 block=256 cols=32 cols_short=256 long_k=1024 rows=10
LDS_KERNEL(step_halves_many_bf16_q8g64, step_gemv_args, 256, 3, (wave_rows::LDS_BYTES<q8g64_weights, 10, false>)) {
  step_halves::run<q8g64_weights, 10>(a);
}
// Wide products of several rows on one device, on sm_90: the same bits. Elsewhere it does nothing and is not launched.
// LAUNCH step_halves_crowd_bf16_q8g64 block=768 cols=96 long_k=1024 rows=10
#if defined(TILE_MMA)
LDS_KERNEL(step_halves_crowd_bf16_q8g64, step_gemv_args, 768, 1, wave_crowd::LDS_BYTES<step_halves::CROWD_ROWS>) {
  step_halves::run_crowd(a);
}
#else
EARLY_KERNEL(step_halves_crowd_bf16_q8g64, step_gemv_args, 768, 1) { (void)a; }
#endif
// Of one row of x: the same bits. a.narrow: half of cols a block.
// LAUNCH step_halves_one_bf16_q8g64 block=256 cols=32 cols_short=256 long_k=1024 rows=1
EARLY_KERNEL(step_halves_one_bf16_q8g64, step_gemv_args, 256, 3) { step_halves::run_one<q8g64_weights>(a); }
