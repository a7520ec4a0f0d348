// spin.h - what kernels that wait for others need: threads of their own that can be parked in the middle (strands), and the memory model
// that such kernels meet on hardware (view).
#pragma once
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace glm53_cpu {

// The blocks of one spinning kernel, on up to `resident_blocks` threads of which at most one runs, and only inside resume(). Some threads are kept
// for the next kernel.
class Strands {
 public:
  using Body = std::function<int(uint64_t block, std::string* message)>;  // runs one block; not 0: failed
  static constexpr uint64_t resident_blocks = 16;

  Strands(uint64_t blocks, Body body);
  ~Strands();  // blocks that wait give up
  // Runs one parked strand until it gives way or ends; `choice` picks it among the unfinished ones. True when all blocks are done.
  // `gave_way` tells whether the strand only waits; `failed` and `message` report a block that failed.
  bool resume(uint64_t choice, bool* gave_way, bool* failed, std::string* message);
  size_t unfinished();
  // On a strand: parks it. 0 to go on waiting, 1 to give up. Elsewhere: 1.
  static int give_way();

 private:
  struct Strand {
    Strands* owner = nullptr;
    bool running = false;
    bool finished = false;
    bool gave_way = false;
    std::condition_variable wake;
  };
  void serve(Strand* strand);

  uint64_t blocks_;
  uint64_t next_block_ = 0;
  size_t serving_ = 0;  // strands whose thread is inside serve()
  Body body_;
  bool giving_up_ = false;
  bool failed_ = false;
  std::string message_;
  std::mutex mutex_;
  std::condition_variable parked_;
  std::vector<std::unique_ptr<Strand>> strands_;
};

// The kernel's own sight of memory that is neither uncached, fine-grained nor coherent: what others store there meanwhile is hidden from
// the kernel (its cache keeps the old lines), and what it stores is hidden from others until it ends. Between enter() and leave() the
// memory holds the kernel's bytes, else everybody's. Only the first 64 MiB of such memory a kernel has are treated so.
class View {
 public:
  void add(uint64_t address, uint64_t bytes);
  void enter();
  void leave();
  // After leave(): the kernel's stores become visible.
  void publish();

 private:
  struct Region {
    uint8_t* memory;
    std::vector<uint8_t> base, mine, shared;  // at the start, the kernel's, everybody's
  };
  uint64_t left_bytes_ = 64ull << 20;
  std::vector<Region> regions_;
};

}  // namespace glm53_cpu
