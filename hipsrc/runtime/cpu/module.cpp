// module.cpp - see module.h.
#include "module.h"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <cstring>

namespace glm53_cpu {
namespace {

hipError_t check_header(const Elf64_Ehdr& header, std::string* message) {
  if (memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) {
    *message = "code object is not an ELF file; the cpu runtime loads kernels.so";
    return hipErrorInvalidImage;
  }
  if (header.e_machine != EM_X86_64 || header.e_ident[EI_CLASS] != ELFCLASS64) {
    *message = "code object is for ELF machine " + std::to_string(header.e_machine) +
               ", the cpu runtime needs x86-64 (62): load kernels.so";
    return hipErrorNoBinaryForGpu;
  }
  if (header.e_type != ET_DYN) {
    *message = "code object is not a shared object (ELF type " + std::to_string(header.e_type) + ")";
    return hipErrorInvalidImage;
  }
  return hipSuccess;
}

hipError_t open_library(const char* path, Module* module, std::string* message) {
  module->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!module->library) {
    const char* why = dlerror();
    *message = std::string("code object cannot be opened: ") + (why ? why : "unknown reason");
    return hipErrorInvalidImage;
  }
  auto get = reinterpret_cast<const glm53_host_module* (*)()>(dlsym(module->library, "glm53_host_module_get"));
  if (!get) {
    *message = "code object does not export glm53_host_module_get";
    return hipErrorInvalidImage;
  }
  module->table = get();
  if (!module->table || module->table->abi != GLM53_HOST_ABI) {
    *message = "code object has host ABI " + std::to_string(module->table ? module->table->abi : 0) + ", the runtime has " +
               std::to_string(GLM53_HOST_ABI) + ": rebuild both";
    return hipErrorNoBinaryForGpu;
  }
  return hipSuccess;
}

// Bytes of an ELF image: the end of its section table, program header table and segments.
uint64_t image_bytes(const uint8_t* image, const Elf64_Ehdr& header) {
  uint64_t end = header.e_shoff + static_cast<uint64_t>(header.e_shnum) * header.e_shentsize;
  for (unsigned i = 0; i < header.e_phnum; i++) {
    Elf64_Phdr segment;
    memcpy(&segment, image + header.e_phoff + static_cast<uint64_t>(i) * header.e_phentsize, sizeof segment);
    if (segment.p_offset + segment.p_filesz > end) end = segment.p_offset + segment.p_filesz;
  }
  return end;
}

}  // namespace

Module::~Module() {
  if (library) dlclose(library);
  if (file >= 0) close(file);
}

hipError_t load_module_file(const char* path, std::shared_ptr<Module>* module, std::string* message) {
  char full[PATH_MAX];
  struct stat status;
  int file = realpath(path, full) ? open(full, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0 || fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) {
    if (file >= 0) close(file);
    *message = std::string("no code object file ") + path;
    return hipErrorFileNotFound;
  }
  Elf64_Ehdr header;
  ssize_t got = read(file, &header, sizeof header);
  close(file);
  if (got != static_cast<ssize_t>(sizeof header)) {
    *message = std::string("code object is too short: ") + path;
    return hipErrorInvalidImage;
  }
  auto made = std::make_shared<Module>();
  hipError_t error = check_header(header, message);
  if (error == hipSuccess) error = open_library(full, made.get(), message);
  if (error == hipSuccess) *module = made;
  return error;
}

hipError_t load_module_image(const void* image, std::shared_ptr<Module>* module, std::string* message) {
  auto bytes = static_cast<const uint8_t*>(image);
  Elf64_Ehdr header = {};
  // The caller gives no size: the magic is looked at before the rest of the header.
  if (memcmp(bytes, ELFMAG, SELFMAG) == 0) memcpy(&header, bytes, sizeof header);
  hipError_t error = check_header(header, message);
  if (error != hipSuccess) return error;
  auto made = std::make_shared<Module>();
  made->file = memfd_create("glm53-code-object", MFD_CLOEXEC);
  if (made->file < 0) return hipErrorOperatingSystem;
  uint64_t left = image_bytes(bytes, header);
  while (left) {
    ssize_t wrote = write(made->file, bytes, left);
    if (wrote <= 0) return hipErrorInvalidImage;
    bytes += wrote;
    left -= static_cast<uint64_t>(wrote);
  }
  std::string path = "/proc/self/fd/" + std::to_string(made->file);
  error = open_library(path.c_str(), made.get(), message);
  if (error == hipSuccess) *module = made;
  return error;
}

}  // namespace glm53_cpu
