// step_head.hip - step_gemv (step.hip) of a head: one wide q8g64 product of many columns and several rows of bf16 x, whose blocks hold their x
// (wave_held.h): the same bits. Struct: step_gemv_args, segment 0 alone, no batch, epilogues STORE, STORE_F32 and ROPE, no part. The a.blocks[0]
// blocks have equal shares of the rows (a.turns) and their teams of the sets of columns; those that have the same sets run side by side.
#include "portable.h"
#include "wave_held.h"

#if defined(TILE_MMA)
namespace step {

constexpr uint32_t HEAD_ROWS = 11;
static_assert(wave_held::LDS_BYTES<HEAD_ROWS> <= 227 * 1024, "the LDS of a block of sm_90");

DEVICE void run_head(const step_gemv_args& a) {
  using namespace wave_product;
  constexpr uint32_t N = HEAD_ROWS;
  next_may_begin();
  Segment s = segment_at(a, {0, block_x(), 0});
  uint32_t turns = a.turns, each = (a.rows + turns - 1) / turns, block = block_x() / turns, blocks = a.blocks[0] / turns;
  uint32_t first_row = (block_x() - block * turns) * each, rows = a.rows - first_row < each ? a.rows - first_row : each;
  uint32_t last = s.n - 1u, all = (s.n + TILE_COLS - 1) / TILE_COLS, mine = wave_crowd::team() * blocks + block, step = wave_held::TEAMS * blocks;
  uint32_t sets = all > mine ? (all - mine + step - 1) / step : 0u;
  Weights w = {a.k, a.k, 0, 1, true};
  const bf16* from = (const bf16*)a.x + (uint64_t)first_row * a.x_stride;
  wave_held::products<N>(
      w, {s.codes, s.scales}, lds_bytes(), sets, rows,
      [&](uint32_t set, uint32_t i) {
        uint32_t column = (mine + set * step) * TILE_COLS + i;
        return column < last ? column : last;
      },
      [&](uint32_t r) { return from + (uint64_t)r * a.x_stride; }, {(const bf16*)a.norm, a.eps, nullptr},
      [&](uint32_t set, uint32_t row, float sum) { store_sum<TILE_COLS>(a, s, mine + set * step, first_row + row, sum); });
}

}  // namespace step
#endif

// On sm_90; elsewhere it does nothing and is not launched. cols: of a block's teams together; k_max: of a product.
// LAUNCH step_gemv_head_bf16_q8g64 block=512 cols=64 long_k=1024 k_max=6144 rows=11
#if defined(TILE_MMA)
LDS_KERNEL(step_gemv_head_bf16_q8g64, step_gemv_args, 512, 1, wave_held::LDS_BYTES<step::HEAD_ROWS>) { step::run_head(a); }
#else
EARLY_KERNEL(step_gemv_head_bf16_q8g64, step_gemv_args, 512, 1) { (void)a; }
#endif
