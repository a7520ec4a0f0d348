// module.h - host code objects: an ELF shared object that exports glm53_host_module_get (host_abi.h), loaded with dlopen.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "../../include/host_abi.h"
#include "../hip_abi.h"

namespace glm53_cpu {

// Closes the object when the last kernel of it is gone.
struct Module {
  ~Module();
  int device = 0;
  int file = -1;  // memory file behind an image; kept open so that its /proc name is not used twice
  void* library = nullptr;
  const glm53_host_module* table = nullptr;
};

struct Function {
  std::shared_ptr<Module> module;
  const glm53_host_kernel* kernel = nullptr;
};

// `message` gets the reason in words when the result is not hipSuccess.
hipError_t load_module_file(const char* path, std::shared_ptr<Module>* module, std::string* message);
hipError_t load_module_image(const void* image, std::shared_ptr<Module>* module, std::string* message);

}  // namespace glm53_cpu
