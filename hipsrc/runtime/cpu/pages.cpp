// pages.cpp - mmap, memfd and mremap behind the services of pages.h. Linux only.
#include "pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

namespace glm53_cpu {
namespace {

constexpr uint64_t piece_bytes = 2ull << 20;

void* at(uint64_t address) { return reinterpret_cast<void*>(address); }
uint64_t number(void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

int shared_file(uint64_t bytes) {
  int file = memfd_create("glm53-cpu", MFD_CLOEXEC);
  if (file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    close(file);
    return -1;
  }
  return file;
}

// The poisoned file: one piece, made at first use and kept for the life of the process.
int poisoned_file() {
  static const int file = [] {
    int made = shared_file(piece_bytes);
    if (made < 0) return -1;
    void* view = mmap(nullptr, piece_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, made, 0);
    if (view == MAP_FAILED) return -1;
    memset(view, poison_byte, piece_bytes);
    munmap(view, piece_bytes);
    return made;
  }();
  return file;
}

// Registered ranges are widened to whole pages, and so to bytes of strangers, among them the red zones of a sanitizer's heap: copies of
// such pages avoid the functions that a sanitizer replaces.
__attribute__((no_sanitize("address", "thread"))) void copy_pages(uint64_t to, uint64_t from, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; i += sizeof(uint64_t)) {
    *reinterpret_cast<volatile uint64_t*>(to + i) = *reinterpret_cast<const volatile uint64_t*>(from + i);
  }
}

bool write_whole(int file, const uint8_t* data, uint64_t bytes, uint64_t offset) {
  while (bytes) {
    long wrote = syscall(SYS_pwrite64, file, data, bytes, offset);
    if (wrote <= 0) return false;
    data += wrote;
    offset += static_cast<uint64_t>(wrote);
    bytes -= static_cast<uint64_t>(wrote);
  }
  return true;
}

}  // namespace

uint64_t map_private(uint64_t bytes) {
  void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return made == MAP_FAILED ? 0 : number(made);
}

bool poison(uint64_t address, uint64_t bytes) {
  uint64_t done = 0;
  if (bytes >= 2 * piece_bytes) {
    int file = poisoned_file();
    for (; file >= 0 && done + piece_bytes <= bytes; done += piece_bytes) {
      if (mmap(at(address + done), piece_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, file, 0) == MAP_FAILED) {
        return false;
      }
    }
  }
  memset(at(address + done), poison_byte, bytes - done);
  return true;
}

bool map_twice(uint64_t bytes, uint64_t* first, uint64_t* second) {
  int file = shared_file(bytes);
  if (file < 0) return false;
  void* one = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  void* two = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (one == MAP_FAILED || two == MAP_FAILED) {
    if (one != MAP_FAILED) munmap(one, bytes);
    if (two != MAP_FAILED) munmap(two, bytes);
    return false;
  }
  *first = number(one);
  *second = number(two);
  return true;
}

void unmap(uint64_t address, uint64_t bytes) {
  if (address && bytes) munmap(at(address), bytes);
}

std::vector<Segment> segments(uint64_t start, uint64_t end) {
  std::vector<Segment> found;
  FILE* maps = fopen("/proc/self/maps", "re");
  if (!maps) return found;
  char line[1024];
  while (fgets(line, sizeof line, maps)) {
    unsigned long long low = 0, high = 0;
    char rights[5] = {};
    if (sscanf(line, "%llx-%llx %4s", &low, &high, rights) != 3) continue;
    if (high <= start || low >= end) continue;
    found.push_back({low < start ? start : low, high > end ? end : high, rights[0] == 'r', rights[1] == 'w', rights[3] == 's'});
  }
  fclose(maps);
  return found;
}

bool replace_by_shared(uint64_t start, uint64_t end) {
  int file = shared_file(end - start);
  if (file < 0) return false;
  bool good = true;
  uint64_t done = start;
  while (good && done < end) {
    uint64_t bytes = end - done < piece_bytes ? end - done : piece_bytes;
    good = write_whole(file, static_cast<const uint8_t*>(at(done)), bytes, done - start) &&
           mmap(at(done), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, static_cast<off_t>(done - start)) != MAP_FAILED;
    if (good) done += bytes;
  }
  close(file);
  if (!good) replace_by_private(start, done);
  return good;
}

bool replace_by_private(uint64_t start, uint64_t end) {
  for (uint64_t done = start; done < end;) {
    uint64_t bytes = end - done < piece_bytes ? end - done : piece_bytes;
    uint64_t copy = map_private(bytes);
    if (!copy) return false;
    copy_pages(copy, done, bytes);
    if (mremap(at(copy), bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, at(done)) == MAP_FAILED) {
      unmap(copy, bytes);
      return false;
    }
    done += bytes;
  }
  return true;
}

uint64_t map_again(uint64_t start, uint64_t end) {
  void* target = mmap(nullptr, end - start, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (target == MAP_FAILED) return 0;
  // An old size of zero makes mremap duplicate a shared mapping instead of moving it (mremap(2)).
  for (const Segment& part : segments(start, end)) {
    void* to = at(number(target) + (part.start - start));
    if (mremap(at(part.start), 0, part.end - part.start, MREMAP_MAYMOVE | MREMAP_FIXED, to) == MAP_FAILED) {
      munmap(target, end - start);
      return 0;
    }
  }
  return number(target);
}

}  // namespace glm53_cpu
