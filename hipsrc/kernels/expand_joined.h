// expand_joined.h - step_expand of several query rows whose splits are joined already (attend_rows.h), latent 512, q8g64 weights: the same bits. A
// block has 128 columns of v of a head for up to PRODUCT_ROWS rows, whose codes it asks for at once, before the launch before has ended.
#pragma once

#if defined(TILE_MMA)
namespace step_expansion {

constexpr uint32_t PRODUCT_ROWS = 16;
constexpr uint32_t ROUNDS = LATENT_MAX / q8g64_weights::CHUNK / LANES;  // of an output's lanes: one group of weights each
constexpr uint32_t OUTPUTS = 2;                                        // of a work-item
constexpr uint32_t PRODUCT_LDS = gemv::X_BYTES + COLUMNS * (LATENT_MAX + ROUNDS * 2);

static_assert(PRODUCT_ROWS * LATENT_MAX * 4 == gemv::X_BYTES, "x as f32, for each value is read by all outputs");
static_assert(ROUNDS == LATENT_MAX / WEIGHT_GROUP && ROUNDS * 2 == 16, "a round of an output has one scale, all of them 16 bytes");

// codes [ROUNDS][OUTPUTS][256] words, of which a work-item has what it copied itself; scales [COLUMNS] words, of its wave.
DEVICE void copy_columns(const step_expand_args& a, uint32_t first, words16* codes, words16* scales) {
  uint32_t lane = thread_id() % LANES;
  UNROLL
  for (uint32_t o = 0; o < OUTPUTS; o++) {
    uint32_t own = thread_id() / LANES + o * TOGETHER<2>, n = first + own;
    uint64_t row = (uint64_t)block_z() * a.v + (n < a.v ? n : a.v - 1);
    const words16* from = (const words16*)((const uint8_t*)a.codes + row * LATENT_MAX) + lane;
    UNROLL
    for (uint32_t round = 0; round < ROUNDS; round++) copy16_async(codes + (round * OUTPUTS + o) * 256 + thread_id(), from + round * LANES);
    if (lane == 0) copy16_async(scales + own, (const uint16_t*)a.scales + row * ROUNDS);
  }
}

template <uint32_t N> DEVICE void stage_rows(const step_expand_args& a, uint32_t first, uint32_t count, words16* x) {
  UNROLL
  for (uint32_t i = 0; i < N * LATENT_MAX / 8; i += 256) {
    uint32_t r = (i + thread_id()) / (LATENT_MAX / 8), unit = thread_id() % (LATENT_MAX / 8), word[4];
    if (r >= N) return;
    uint64_t row = (uint64_t)(first + (r < count ? r : count - 1)) * a.heads + block_z();
    load16((const bf16*)a.partial + row * LATENT_MAX + 8 * unit, word);
    float v[8];
    bf16_weights::expand(word, v);
    words16* to = x + r * (gemv::X_UNITS / N);
    gemv::store_unit((float*)(to + gemv::place_of(2 * unit)), v);
    gemv::store_unit((float*)(to + gemv::place_of(2 * unit + 1)), v + 4);
  }
}

// N: at least as many as the rows of the block.
template <uint32_t N>
DEVICE void expand_joined(const step_expand_args& a, uint32_t row, uint32_t count, words16* x, const words16* codes, const words16* scales) {
  uint32_t lane = thread_id() % LANES, first = block_x() * COLUMNS + thread_id() / LANES;
  stage_rows<N>(a, row, count, x);
  copies_done();
  block_sync();
  gemv::Walk<q8g64_weights, OUTPUTS, 1, true> walk;
  walk.lanes = LANES;
  float sums[N][OUTPUTS] = {};
  ROLLED
  for (uint32_t round = 0; round < ROUNDS; round++) {
    UNROLL
    for (uint32_t o = 0; o < OUTPUTS; o++) {
      load16(codes + (round * OUTPUTS + o) * 256 + thread_id(), walk.word[0][o]);
      walk.scale[0][o] = ((const uint16_t*)(scales + thread_id() / LANES + o * TOGETHER<2>))[round];
    }
    gemv::add_chunk<float, N>(walk, 0, x, round * LANES + lane, sums);
  }
  gemv::finish(walk, sums);
  UNROLL
  for (uint32_t r = 0; r < N; r++) {
    UNROLL
    for (uint32_t o = 0; o < OUTPUTS; o++) {
      uint32_t n = first + o * TOGETHER<2>;
      if (lane == r % LANES && r < count && n < a.v) store_f32((bf16*)a.o + ((uint64_t)(row + r) * a.heads + block_z()) * a.v + n, sums[r][o]);
    }
  }
}

DEVICE void step_expand_joined(const step_expand_args& a) {
  words16 *x = (words16*)lds_bytes(), *codes = x + gemv::X_UNITS, *scales = codes + ROUNDS * OUTPUTS * 256;
  uint32_t row = block_y() * PRODUCT_ROWS, count = a.rows - row < PRODUCT_ROWS ? a.rows - row : PRODUCT_ROWS;
  next_may_begin();
  copy_columns(a, block_x() * COLUMNS, codes, scales);
  previous_done();
  if (count <= 4) expand_joined<4>(a, row, count, x, codes, scales);
  else if (count <= 8) expand_joined<8>(a, row, count, x, codes, scales);
  else if (count <= 10) expand_joined<10>(a, row, count, x, codes, scales);
  else expand_joined<16>(a, row, count, x, codes, scales);
}

}  // namespace step_expansion
#else
namespace step_expansion {
DEVICE void step_expand_joined(const step_expand_args&) {}
}  // namespace step_expansion
#endif
