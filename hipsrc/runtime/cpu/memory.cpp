// memory.cpp - see memory.h.
#include "memory.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <mutex>

#include "pages.h"

namespace glm53_cpu {
namespace {

constexpr uint64_t red_zone_bytes = page_bytes;
constexpr size_t freed_blocks_kept = 64;              // quarantine: this many freed blocks stay mapped and poisoned
constexpr uint64_t freed_check_bytes = 64ull << 10;   // blocks up to this size are compared with the poison at a device sync

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }
uint8_t* bytes_at(uint64_t address) { return reinterpret_cast<uint8_t*>(address); }

std::string text(const char* format, unsigned long long a, unsigned long long b, unsigned long long c = 0) {
  char out[256];
  snprintf(out, sizeof out, format, a, b, c);
  return out;
}

// First byte of [start, end) that is not `value`, or `end`.
uint64_t first_other(uint64_t start, uint64_t end, uint8_t value) {
  if (start >= end) return end;
  if (*bytes_at(start) == value && memcmp(bytes_at(start), bytes_at(start) + 1, end - start - 1) == 0) return end;
  for (uint64_t at = start; at < end; at++) {
    if (*bytes_at(at) != value) return at;
  }
  return end;
}

}  // namespace

bool host_range_mapped(uint64_t address, uint64_t bytes) {
  if (bytes == 0) return true;
  if (address == 0 || address + bytes < address) return false;
  uint64_t start = address / page_bytes * page_bytes, end = round_up(address + bytes, page_bytes);
  std::vector<unsigned char> state(1024);
  for (uint64_t at = start; at < end; at += state.size() * page_bytes) {
    uint64_t step = end - at < state.size() * page_bytes ? end - at : state.size() * page_bytes;
    if (mincore(reinterpret_cast<void*>(at), step, state.data()) != 0) return false;
  }
  return true;
}

Memory::~Memory() {
  std::vector<std::shared_ptr<Block>> blocks;
  for (const auto& item : entries_) {
    if (!item.second.alias) blocks.push_back(item.second.block);
  }
  for (const auto& block : blocks) {
    if (block->kind == Kind::registered) give_back_pages(block->map, block->map + block->map_bytes);
    else unmap(block->map, block->map_bytes);
    if (block->kind != Kind::device) unmap(block->alias_map, block->alias_map_bytes);
  }
  for (const Freed& freed : freed_) unmap(freed.map, freed.map_bytes);
}

void Memory::configure(int devices, uint64_t bytes_per_device) {
  (void)devices;
  capacity_ = bytes_per_device / page_bytes * page_bytes;
}

const Memory::Entry* Memory::entry(uint64_t address, uint64_t* start) const {
  auto next = entries_.upper_bound(address);
  if (next == entries_.begin()) return nullptr;
  --next;
  if (address >= next->second.end) return nullptr;
  *start = next->first;
  return &next->second;
}

void Memory::add(const std::shared_ptr<Block>& block) {
  entries_[block->base] = {block->base + block->bytes, block, false};
  if (block->kind != Kind::device) entries_[block->alias] = {block->alias + block->bytes, block, true};
}

void Memory::remove(const Block& block) {
  entries_.erase(block.base);
  if (block.kind != Kind::device) entries_.erase(block.alias);
  generation_.fetch_add(1, std::memory_order_release);
}

bool Memory::overlaps(uint64_t start, uint64_t end) const {
  auto next = entries_.lower_bound(end);
  if (next == entries_.begin()) return false;
  --next;
  return next->second.end > start;
}

hipError_t Memory::allocate(int device, uint64_t bytes, uint32_t flags, uint64_t* address) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  if (bytes > capacity_) return hipErrorOutOfMemory;
  uint64_t payload = round_up(bytes, page_bytes);
  if (payload > capacity_ - used_[device]) return hipErrorOutOfMemory;
  auto block = std::make_shared<Block>();
  block->map_bytes = payload + 2 * red_zone_bytes;
  block->map = map_private(block->map_bytes);
  if (!block->map) return hipErrorOutOfMemory;
  block->kind = Kind::device;
  block->device = device;
  block->base = block->alias = block->map + red_zone_bytes;
  block->bytes = bytes;
  block->flags = flags;
  block->coherent = flags != hipDeviceMallocDefault;
  if (!poison(block->base, bytes)) {
    unmap(block->map, block->map_bytes);
    return hipErrorOutOfMemory;
  }
  memset(bytes_at(block->map), red_zone_byte, red_zone_bytes);
  memset(bytes_at(block->base + bytes), red_zone_byte, payload - bytes + red_zone_bytes);
  used_[device] += payload;
  add(block);
  *address = block->base;
  return hipSuccess;
}

hipError_t Memory::release(uint64_t address, std::string* violation) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  auto found = entries_.find(address);
  if (found == entries_.end() || found->second.alias || found->second.block->kind != Kind::device) return hipErrorInvalidDevicePointer;
  std::shared_ptr<Block> block = found->second.block;
  *violation = check_block(*block);
  remove(*block);
  used_[block->device] -= round_up(block->bytes, page_bytes);
  retire(*block);
  return hipSuccess;
}

// Poisons a freed block and keeps its addresses out of use for a while.
void Memory::retire(const Block& block) {
  poison(block.base, block.bytes);
  freed_.push_back({block.map, block.map_bytes, block.base, block.bytes, block.device});
  while (freed_.size() > freed_blocks_kept) {
    unmap(freed_.front().map, freed_.front().map_bytes);
    freed_.pop_front();
  }
}

hipError_t Memory::host_allocate(int device, uint64_t bytes, uint32_t flags, uint64_t* address) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  if (bytes > (1ull << 46)) return hipErrorOutOfMemory;
  auto block = std::make_shared<Block>();
  uint64_t payload = round_up(bytes, page_bytes);
  block->map_bytes = block->alias_map_bytes = payload + 2 * red_zone_bytes;
  if (!map_twice(block->map_bytes, &block->map, &block->alias_map)) return hipErrorOutOfMemory;
  block->kind = Kind::host;
  block->device = device;
  block->base = block->map + red_zone_bytes;
  block->alias = block->alias_map + red_zone_bytes;
  block->bytes = bytes;
  block->flags = flags;
  block->coherent = !(flags & hipHostMallocNonCoherent);
  memset(bytes_at(block->map), red_zone_byte, red_zone_bytes);
  memset(bytes_at(block->base + bytes), red_zone_byte, payload - bytes + red_zone_bytes);
  add(block);
  *address = block->base;
  return hipSuccess;
}

hipError_t Memory::host_release(uint64_t address, std::string* violation) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  auto found = entries_.find(address);
  if (found == entries_.end() || found->second.alias || found->second.block->kind != Kind::host) return hipErrorInvalidValue;
  std::shared_ptr<Block> block = found->second.block;
  *violation = check_block(*block);
  remove(*block);
  unmap(block->map, block->map_bytes);
  unmap(block->alias_map, block->alias_map_bytes);
  return hipSuccess;
}

void Memory::split(uint64_t at) {
  auto next = runs_.upper_bound(at);
  if (next == runs_.begin()) return;
  --next;
  if (next->first == at || next->second.end <= at) return;
  Run tail = next->second;
  next->second.end = at;
  runs_[at] = tail;
}

// Makes the pages [start, end) shared and counts one more user of each. Pages of an earlier registration are shared already.
bool Memory::take_pages(uint64_t start, uint64_t end) {
  std::vector<Segment> parts = segments(start, end);
  uint64_t covered = start;
  for (const Segment& part : parts) {
    if (part.start != covered || !part.readable || !part.writable) return false;
    covered = part.end;
  }
  if (covered != end) return false;
  split(start);
  split(end);
  for (const Segment& part : parts) {
    for (uint64_t at = part.start; at < part.end;) {
      auto next = runs_.lower_bound(at);
      if (next != runs_.end() && next->first == at) {
        next->second.references++;
        at = next->second.end;
        continue;
      }
      uint64_t stop = next != runs_.end() && next->first < part.end ? next->first : part.end;
      if (!part.shared && !replace_by_shared(at, stop)) {
        give_back_pages(start, at);
        return false;
      }
      runs_[at] = {stop, 1, !part.shared};
      at = stop;
    }
    split(part.end);
  }
  return true;
}

void Memory::give_back_pages(uint64_t start, uint64_t end) {
  split(start);
  split(end);
  auto run = runs_.lower_bound(start);
  while (run != runs_.end() && run->first < end) {
    if (--run->second.references) {
      ++run;
      continue;
    }
    if (run->second.replaced) replace_by_private(run->first, run->second.end);
    run = runs_.erase(run);
  }
}

hipError_t Memory::host_register(int device, uint64_t address, uint64_t bytes, uint32_t flags) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  if (address + bytes < address) return hipErrorInvalidValue;
  if (overlaps(address, address + bytes)) return hipErrorHostMemoryAlreadyRegistered;
  uint64_t start = address / page_bytes * page_bytes, end = round_up(address + bytes, page_bytes);
  if (!take_pages(start, end)) return hipErrorInvalidValue;
  uint64_t alias = map_again(start, end);
  if (!alias) {
    give_back_pages(start, end);
    return hipErrorOutOfMemory;
  }
  auto block = std::make_shared<Block>();
  block->kind = Kind::registered;
  block->device = device;
  block->base = address;
  block->bytes = bytes;
  block->flags = flags;
  block->coherent = !(flags & hipExtHostRegisterCoarseGrained);
  block->map = start;
  block->map_bytes = block->alias_map_bytes = end - start;
  block->alias_map = alias;
  block->alias = alias + (address - start);
  add(block);
  return hipSuccess;
}

hipError_t Memory::host_unregister(uint64_t address) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  auto found = entries_.find(address);
  if (found == entries_.end() || found->second.alias || found->second.block->kind != Kind::registered) {
    return hipErrorHostMemoryNotRegistered;
  }
  std::shared_ptr<Block> block = found->second.block;
  remove(*block);
  unmap(block->alias_map, block->alias_map_bytes);
  give_back_pages(block->map, block->map + block->map_bytes);
  return hipSuccess;
}

Place Memory::find(uint64_t address) const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  uint64_t start = 0;
  const Entry* found = entry(address, &start);
  if (!found) return {};
  return {found->block, found->alias, address - start, found->end - address};
}

bool Memory::out_of_bounds(uint64_t address) const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  for (const Freed& freed : freed_) {
    if (address >= freed.map && address < freed.map + freed.map_bytes) return true;
  }
  auto next = entries_.upper_bound(address);
  auto in_map = [&](const Entry& entry) {
    const Block& block = *entry.block;
    if (block.kind == Kind::registered && !entry.alias) return false;  // pages of the process around a registered range
    uint64_t map = entry.alias ? block.alias_map : block.map, bytes = entry.alias ? block.alias_map_bytes : block.map_bytes;
    return address >= map && address < map + bytes;
  };
  if (next != entries_.end() && in_map(next->second)) return true;
  return next != entries_.begin() && (--next, address >= next->second.end) && in_map(next->second);
}

bool Memory::may_touch(int device, uint64_t address, uint64_t bytes) const {
  static thread_local Last last;
  uint64_t generation = generation_.load(std::memory_order_acquire);
  bool fresh = last.memory == this && last.generation == generation && last.device == device;
  if (!fresh || address < last.start || address >= last.end) {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    uint64_t start = 0;
    const Entry* found = entry(address, &start);
    if (!found) return false;
    const Block& block = *found->block;
    if (block.kind == Kind::device ? block.device != device && !peer(device, block.device) : !found->alias) return false;
    last = {this, generation, start, found->end, device};
  }
  return bytes <= last.end - address;
}

std::string Memory::explain(int device, uint64_t address, uint64_t bytes) const {
  Place place = find(address);
  if (!place.known()) {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    for (const Freed& freed : freed_) {
      if (address >= freed.base && address < freed.base + freed.bytes) {
        return text("it lies in freed memory of device %llu (%llu bytes)", static_cast<unsigned>(freed.device), freed.bytes);
      }
    }
    return "it is not memory of any device, nor the device address of registered host memory";
  }
  const Block& block = *place.block;
  if (block.kind != Kind::device && !place.alias) {
    return text("it is a host address; use the device address from hipHostGetDevicePointer (0x%llx)", block.alias + place.offset, 0);
  }
  if (block.kind == Kind::device && block.device != device && !peer(device, block.device)) {
    return text("it is memory of device %llu, and device %llu has not enabled peer access to it", static_cast<unsigned>(block.device),
                static_cast<unsigned>(device));
  }
  return text("%llu bytes are asked for, and only %llu are left to the end of its allocation", bytes, place.room);
}

std::string Memory::check_block(const Block& block) const {
  if (block.kind == Kind::registered) return "";
  uint64_t before = first_other(block.map, block.base, red_zone_byte);
  if (before != block.base) {
    return text("red zone before the %llu-byte allocation at 0x%llx was overwritten %llu bytes before its start", block.bytes, block.base,
                block.base - before);
  }
  uint64_t tail = block.base + block.bytes, end = block.map + block.map_bytes, after = first_other(tail, end, red_zone_byte);
  if (after != end) {
    return text("red zone after the %llu-byte allocation at 0x%llx was overwritten %llu bytes past its end", block.bytes, block.base,
                after - tail);
  }
  return "";
}

std::string Memory::check(int device) const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  for (const auto& item : entries_) {
    const Block& block = *item.second.block;
    if (item.second.alias || (block.kind == Kind::device && block.device != device)) continue;
    std::string problem = check_block(block);
    if (!problem.empty()) return problem;
  }
  for (const Freed& freed : freed_) {
    if (freed.device != device || freed.bytes > freed_check_bytes) continue;
    uint64_t wrong = first_other(freed.base, freed.base + freed.bytes, poison_byte);
    if (wrong != freed.base + freed.bytes) {
      return text("freed memory (%llu bytes at 0x%llx) was written at offset %llu", freed.bytes, freed.base, wrong - freed.base);
    }
  }
  return "";
}

void Memory::set_peer(int device, int peer, bool on) {
  if (on) peers_[device].fetch_or(1u << peer, std::memory_order_acq_rel);
  else peers_[device].fetch_and(~(1u << peer), std::memory_order_acq_rel);
  generation_.fetch_add(1, std::memory_order_release);
}

uint64_t Memory::used(int device) const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  return used_[device];
}

uint64_t Memory::count(Kind kind, uint64_t* bytes) const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  uint64_t found = 0, sum = 0;
  for (const auto& item : entries_) {
    if (item.second.alias || item.second.block->kind != kind) continue;
    found++;
    sum += item.second.block->bytes;
  }
  if (bytes) *bytes = sum;
  return found;
}

}  // namespace glm53_cpu
