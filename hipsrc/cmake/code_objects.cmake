# Device code objects: which compiler builds an architecture, if any does, and the command.

set(GLM53_ALL_ARCHS gfx1100 gfx1201 gfx90a gfx942 sm_90)

find_program(GLM53_HIP_CLANG
  NAMES clang++-22 clang++-21 clang++-20 clang++-19 clang++-18 clang++
  HINTS $ENV{ROCM_PATH}/llvm/bin $ENV{ROCM_PATH}/lib/llvm/bin /opt/rocm/llvm/bin /opt/rocm/lib/llvm/bin
  DOC "clang with the AMDGPU target; no ROCm headers or device libraries are needed")
find_program(GLM53_NVCC NAMES nvcc HINTS $ENV{CUDA_PATH}/bin /usr/local/cuda/bin DOC "nvcc for sm_90")

# -fuse-cuid=none and the prefix map keep paths out of the object: equal sources give equal bytes in any directory.
set(GLM53_AMD_FLAGS -x hip --offload-device-only --no-gpu-bundle-output -nogpuinc -nogpulib -mcode-object-version=5 -fuse-cuid=none -O3 -std=c++17
  -fno-exceptions -ffp-contract=fast -fno-math-errno)
set(GLM53_CUDA_FLAGS -cubin -O3 -std=c++17 -x cu)

function(glm53_arch_command arch out_command out_missing)
  if(arch MATCHES "^sm_")
    set(${out_command} ${GLM53_NVCC} ${GLM53_CUDA_FLAGS} -arch=${arch} PARENT_SCOPE)
    set(program "${GLM53_NVCC}")
    set(missing "nvcc not found")
  else()
    set(${out_command} ${GLM53_HIP_CLANG} ${GLM53_AMD_FLAGS} --offload-arch=${arch} PARENT_SCOPE)
    set(program "${GLM53_HIP_CLANG}")
    set(missing "no clang++ found (a plain one of version 18 or later with lld, or ROCm's)")
  endif()
  if(program)
    set(missing "")
  endif()
  set(${out_missing} "${missing}" PARENT_SCOPE)
endfunction()

# Compiles a one-kernel file, which finds out at once whether target, linker and language mode are there.
function(glm53_probe_arch arch out_reason)
  glm53_arch_command(${arch} command missing)
  if(missing)
    set(${out_reason} "${missing}" PARENT_SCOPE)
    return()
  endif()
  set(probe ${CMAKE_CURRENT_BINARY_DIR}/probe_${arch})
  file(WRITE ${probe}.hip "extern \"C\" __attribute__((global)) void probe(int* p) { *p = 1; }\n")
  execute_process(COMMAND ${command} ${probe}.hip -o ${probe}.out RESULT_VARIABLE failed OUTPUT_VARIABLE text ERROR_VARIABLE text)
  set(reason "")
  if(failed)
    string(REGEX REPLACE "\n.*" "" reason "${text}")
    list(GET command 0 program)
    set(reason "${program} cannot build it: ${reason}")
  endif()
  set(${out_reason} "${reason}" PARENT_SCOPE)
endfunction()

# "clang 19.1.7", "nvcc 13.0.48": what the manifest says; no path, so that equal builds give equal manifests.
function(glm53_compiler_version program out)
  execute_process(COMMAND ${program} --version OUTPUT_VARIABLE text ERROR_QUIET)
  get_filename_component(name "${program}" NAME)
  if(text MATCHES "clang version ([0-9.]+)")
    set(name "clang")
  elseif(NOT text MATCHES "release [0-9.]+, V([0-9.]+)")
    string(REGEX MATCH "([0-9]+\\.[0-9.]+)" _ "${text}")
  endif()
  set(${out} "${name} ${CMAKE_MATCH_1}" PARENT_SCOPE)
endfunction()
