// sum_mail.h - the sums of a product of which each device of a pair has a half of k, in the kernel that makes them: a block posts its sums (mailbox.h),
// then waits for the other device's sums of the same outputs and stores y = T(residual + (p0 + p1)), the bits of exchange_sums. A block posts before
// it waits, and blocks start in the order of their numbers on both devices: the first one that waits has its counterpart at work or done, however
// few of a launch fit on a device at once.
#pragma once
#include "mailbox.h"
#include "wave_product.h"

namespace sum_mail {

constexpr uint32_t OUTSIDE = ~0u;

// Of the exchange, where there is one. To be asked for before the product, for it comes from memory.
DEVICE uint32_t number_of(const sum_mail_args& m) { return m.outbox ? mailbox::number_of(m.counter, m.per_step, m.index) : 0u; }

// at(wave, row): which of all outputs is this work-item's, or OUTSIDE; sum(wave, row): its sum on this device. number: of the exchange.
template <class At, class Sum>
DEVICE void add_other(const sum_mail_args& m, uint32_t number, bool wide, uint32_t rows, const void* residual, void* y, const At& at,
                      const Sum& sum) {
  bool alone = wide && rows == 1u;  // then all outputs are wave 0's
  if (alone && tile_group()) return;
  uint64_t set = mailbox::set_of(number, m.capacity);
  wave_product::for_rows(wide, rows, [&](uint32_t wave, uint32_t row) {
    uint32_t i = at(wave, row);
    float mine = sum(wave, row);
    if (i != OUTSIDE) mailbox::post((uint64_t*)m.outbox + set + i, number, bits_of(mine));
  });
  if (alone) wave_sync();
  else block_sync();
  wave_product::for_rows(wide, rows, [&](uint32_t wave, uint32_t row) {
    uint32_t i = at(wave, row), other;
    float mine = sum(wave, row);
    if (i == OUTSIDE) return;
    float before = load_f32((const bf16*)residual + i);
    if (!mailbox::receive((const uint64_t*)m.inbox + set + i, number, m.budget, m.error, &other)) return;
    store_f32((bf16*)y + i, before + (mine + float_of(other)));
  });
}

}  // namespace sum_mail
