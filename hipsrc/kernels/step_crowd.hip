// step_crowd.hip - step_gemv (step.hip) of a head: one wide q8g64 product of several rows of bf16 x in blocks of three teams of waves (wave_crowd.h),
// the same bits. Struct: step_gemv_args, segment 0 alone, no batch, epilogues STORE, STORE_F32 and ROPE, no part. The a.blocks[0] blocks have equal
// shares of the sets of columns, and of the rows (a.turns).
#include "portable.h"
#include "wave_crowd.h"

#if defined(TILE_MMA)
namespace step {

constexpr uint32_t CROWD_ROWS = 10;

DEVICE void run_crowd(const step_gemv_args& a) {
  using namespace wave_product;
  constexpr uint32_t N = CROWD_ROWS, SPAN = wave_crowd::TEAMS * COLS;
  next_may_begin();
  Segment s = segment_at(a, {0, block_x(), 0});
  uint32_t turns = a.turns, each = (a.rows + turns - 1) / turns, block = block_x() / turns, blocks = a.blocks[0] / turns;
  uint32_t first_row = (block_x() - block * turns) * each, rows = a.rows - first_row < each ? a.rows - first_row : each;
  uint32_t last = s.n - 1u, crowds = (s.n + SPAN - 1) / SPAN, sets = crowds > block ? (crowds - block + blocks - 1) / blocks : 0u;
  Weights w = {a.k, a.k, 0, 1, true};
  const bf16* from = (const bf16*)a.x + (uint64_t)first_row * a.x_stride;
  auto set_of = [&](uint32_t set) { return (block + set * blocks) * wave_crowd::TEAMS + wave_crowd::team(); };
  wave_crowd::products<N>(
      w, {s.codes, s.scales}, lds_bytes(), sets, rows,
      [&](uint32_t set, uint32_t i) {
        uint32_t column = set_of(set) * COLS + i;
        return column < last ? column : last;
      },
      [&](uint32_t r) { return from + (uint64_t)r * a.x_stride; }, {(const bf16*)a.norm, a.eps, nullptr},
      [&](uint32_t set, const auto& sum) {
        Segment same = segment_at(a, {0, opaque(block_x()), 0});  // once more, so that it takes no registers while the weights do
        wave_crowd::for_rows(rows, [&](uint32_t row) { store_sum<COLS>(a, same, set_of(set), first_row + row, sum(row)); });
      });
}

}  // namespace step
#endif

// On sm_90; elsewhere it does nothing and is not launched.
// LAUNCH step_gemv_crowd_bf16_q8g64 block=768 cols=96 long_k=1024 rows=10
#if defined(TILE_MMA)
LDS_KERNEL(step_gemv_crowd_bf16_q8g64, step_gemv_args, 768, 1, (wave_crowd::LDS_BYTES<step::CROWD_ROWS, true>)) { step::run_crowd(a); }
#else
EARLY_KERNEL(step_gemv_crowd_bf16_q8g64, step_gemv_args, 768, 1) { (void)a; }
#endif
