// pages.h - page-level services of memory.cpp: poisoned mappings, second mappings, the process's own map.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace glm53_cpu {

constexpr uint8_t poison_byte = 0xFF;    // fresh and freed memory: NaN as a float, -1 as an integer, an unmapped address as a pointer
constexpr uint8_t red_zone_byte = 0xFD;

// Reserves `bytes` (a multiple of the page) of private memory; 0 if the system refuses.
uint64_t map_private(uint64_t bytes);
// Fills [address, address + bytes) with the poison byte. Whole 2 MiB pieces become copy-on-write mappings of one shared poisoned file, so
// that large buffers cost memory only where they are written.
bool poison(uint64_t address, uint64_t bytes);
// A shared file of `bytes` mapped twice; false if the system refuses.
bool map_twice(uint64_t bytes, uint64_t* first, uint64_t* second);
void unmap(uint64_t address, uint64_t bytes);

struct Segment {  // one line of /proc/self/maps, clipped to a range
  uint64_t start, end;
  bool readable, writable, shared;
};
// The mapped parts of [start, end), ascending.
std::vector<Segment> segments(uint64_t start, uint64_t end);

// Replaces private pages by a shared mapping with the same contents, in place, piece by piece. The owner must not write meanwhile.
bool replace_by_shared(uint64_t start, uint64_t end);
// The way back: private pages with the same contents.
bool replace_by_private(uint64_t start, uint64_t end);
// Maps the shared pages at [start, end) a second time; 0 if the system refuses.
uint64_t map_again(uint64_t start, uint64_t end);

}  // namespace glm53_cpu
