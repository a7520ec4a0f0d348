// memory.h - the address space of the virtual devices: allocations, registered host memory and who may touch what.
//
// Invariants
// * Every live block has one entry for the address its owner uses and, for host memory, one for its device alias; entries never overlap.
// * A block's payload is followed and, unless it is registered memory, preceded by a red zone that nobody writes.
// * used_bytes of a device is the sum of the page-rounded sizes of its live device blocks, and never more than its capacity.
// * `generation` changes whenever an address stops being valid or a right to touch one changes, so that caches of it can be dropped.
#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <shared_mutex>
#include <string>
#include <vector>

#include "../hip_abi.h"

namespace glm53_cpu {

constexpr uint64_t page_bytes = 4096;  // granularity of device memory, as hipMemGetInfo counts it
constexpr int max_devices = 16;

enum class Kind : uint8_t { device, host, registered };

struct Block {
  Kind kind = Kind::device;
  int device = 0;          // owner of device memory; current device when host memory was made
  uint64_t base = 0;       // address the owner uses: device address, or host address
  uint64_t alias = 0;      // device address: of host memory the second mapping, of device memory `base`
  uint64_t bytes = 0;      // as asked for
  uint32_t flags = 0;      // as given to the API
  bool coherent = false;   // stores become visible to others while a kernel runs (uncached, fine-grained, coherent host memory)
  uint64_t map = 0, map_bytes = 0;              // whole mapping with red zones; registered memory: the page range of the host
  uint64_t alias_map = 0, alias_map_bytes = 0;  // whole second mapping, host memory only
};

// Where an address lies. `block` is null for memory that the runtime does not know (pageable host memory).
struct Place {
  std::shared_ptr<Block> block;
  bool alias = false;  // through the device alias of host memory
  uint64_t offset = 0;
  uint64_t room = 0;   // bytes from the address to the end of the block
  bool known() const { return block != nullptr; }
  bool on_device() const { return block && block->kind == Kind::device; }
  bool pinned() const { return block && block->kind != Kind::device; }
};

class Memory {
 public:
  ~Memory();
  void configure(int devices, uint64_t bytes_per_device);

  hipError_t allocate(int device, uint64_t bytes, uint32_t flags, uint64_t* address);
  // Frees device memory. `violation` gets the text of a damaged red zone, if any; the block is gone either way.
  hipError_t release(uint64_t address, std::string* violation);
  hipError_t host_allocate(int device, uint64_t bytes, uint32_t flags, uint64_t* address);
  hipError_t host_release(uint64_t address, std::string* violation);
  hipError_t host_register(int device, uint64_t address, uint64_t bytes, uint32_t flags);
  hipError_t host_unregister(uint64_t address);

  Place find(uint64_t address) const;
  // Is the address in a red zone or in freed memory that is still kept? Then it is nobody's host memory either.
  bool out_of_bounds(uint64_t address) const;
  // [address, address + bytes) in one block that kernels of `device` may touch, by device addresses. Cached per thread.
  bool may_touch(int device, uint64_t address, uint64_t bytes) const;
  // Why not, in words, for the message of an illegal access.
  std::string explain(int device, uint64_t address, uint64_t bytes) const;
  // Text of the first damaged red zone of the device's blocks (and of host memory), or an overwritten freed block; empty: none.
  std::string check(int device) const;
  std::string check_block(const Block& block) const;

  void set_peer(int device, int peer, bool on);
  bool peer(int device, int peer) const { return peers_[device].load(std::memory_order_acquire) >> peer & 1; }
  uint64_t used(int device) const;
  uint64_t capacity() const { return capacity_; }
  uint64_t count(Kind kind, uint64_t* bytes = nullptr) const;

 private:
  struct Entry {
    uint64_t end;
    std::shared_ptr<Block> block;
    bool alias;
  };
  struct Freed {
    uint64_t map, map_bytes, base, bytes;
    int device;
  };
  struct Run {  // page range of registered host memory: [key, end)
    uint64_t end;
    uint32_t references;
    bool replaced;  // private pages of the process that we replaced by a shared mapping
  };
  // One thread's last answer of may_touch.
  struct Last {
    const Memory* memory = nullptr;
    uint64_t generation = 0, start = 0, end = 0;
    int device = -1;
  };

  const Entry* entry(uint64_t address, uint64_t* start) const;
  void add(const std::shared_ptr<Block>& block);
  void remove(const Block& block);
  void retire(const Block& block);
  bool overlaps(uint64_t start, uint64_t end) const;
  bool take_pages(uint64_t start, uint64_t end);
  void give_back_pages(uint64_t start, uint64_t end);
  void split(uint64_t at);

  mutable std::shared_mutex mutex_;
  std::map<uint64_t, Entry> entries_;
  std::map<uint64_t, Run> runs_;
  std::deque<Freed> freed_;
  uint64_t used_[max_devices] = {};
  std::atomic<uint32_t> peers_[max_devices] = {};
  static inline std::atomic<uint64_t> generation_{1};  // one for the process: a thread's cache outlives a reset
  uint64_t capacity_ = 0;
};

// Is the whole range mapped in this process (any rights)? Guards copies from and to pageable memory.
bool host_range_mapped(uint64_t address, uint64_t bytes);

}  // namespace glm53_cpu
