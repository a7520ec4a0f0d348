// copy.h - copies and fills, which land in pieces.
#pragma once
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "state.h"

namespace glm53_cpu {

struct CopyShape {
  uint64_t target = 0, source = 0;
  uint64_t width = 0, height = 1;              // bytes of a row, rows
  uint64_t target_pitch = 0, source_pitch = 0;  // bytes between rows
};

// Pieces of a transfer: byte ranges [first, second) of the rows laid end to end, in the order in which they land.
class Pieces {
 public:
  void plan(Random* random, uint64_t total);
  bool empty() const { return pieces_.empty(); }
  std::pair<uint64_t, uint64_t> take();

 private:
  std::vector<std::pair<uint64_t, uint64_t>> pieces_;  // last first
};

class CopyOp : public Op {
 public:
  CopyOp(Memory& memory, const CopyShape& shape) : memory_(memory), shape_(shape) {}
  // The source bytes were read at the API call (pageable host memory).
  CopyOp(Memory& memory, const CopyShape& shape, std::vector<uint8_t> staged)
      : memory_(memory), shape_(shape), staged_(std::move(staged)) {}
  bool advance(Step& step) override;
  const char* label() const override { return "copy"; }
  std::shared_ptr<CopyOp> copy() const { return std::make_shared<CopyOp>(memory_, shape_, staged_); }

 private:
  bool begin(Step& step);
  Memory& memory_;
  CopyShape shape_;
  std::vector<uint8_t> staged_;
  Pieces pieces_;
  bool begun_ = false;
};

class FillOp : public Op {
 public:
  FillOp(Memory& memory, uint64_t target, uint8_t value, uint64_t bytes) : memory_(memory), target_(target), bytes_(bytes), value_(value) {}
  bool advance(Step& step) override;
  const char* label() const override { return "fill"; }
  std::shared_ptr<FillOp> copy() const { return std::make_shared<FillOp>(memory_, target_, value_, bytes_); }

 private:
  Memory& memory_;
  uint64_t target_, bytes_;
  uint8_t value_;
  Pieces pieces_;
  bool begun_ = false;
};

// One side of a copy, as the API sees it: is the range whole, and which kind of memory is it?
struct Side {
  bool valid = false;     // inside one block, or mapped pageable memory
  bool device = false;    // device memory
  bool pageable = false;  // host memory that the runtime does not know
  bool alias = false;     // device alias of host memory: counts as either side
  int owner = -1;         // device of device memory
};
Side side_of(const Memory& memory, uint64_t address, uint64_t bytes);

}  // namespace glm53_cpu
