# Finds a CUDA compiler, tests it, and enables the language, or gives the reason why there is no CUDA part.
#
# In: LIBFLASH_CUDA (auto, on, off, system, pypi). Out: LIBFLASH_CUDA_WHY_NOT, empty if CUDA is enabled.
# Search order: CMAKE_CUDA_COMPILER, $CUDACXX, PATH, $CUDA_HOME, $CUDA_PATH, /usr/local/cuda (these are `system`), then the
# compiler wheels in this Python (`pypi`). python/build_backend/cuda_choice.py searches in the same order.

# Machine code for the architectures whose fastest instructions the kernels use, and one PTX version for all newer architectures.
# sm_100 has matrix instructions of its own, which no kernel uses, so machine code for it would only make the library larger.
set(LIBFLASH_DEFAULT_ARCHITECTURES 80-real 90a-real 80-virtual)

if(NOT DEFINED LIBFLASH_CUDA_PREFIX)
  set(LIBFLASH_CUDA_PREFIX /usr/local/cuda)  # the conventional prefix
endif()

# Compiles and links a program that includes the headers the kernels need. The presence of a compiler is not enough: parts of
# the toolkit may be missing or of another version, and the host compiler may be too new for it.
function(libflash_probe_nvcc nvcc flags why_not)
  set(dir ${PROJECT_BINARY_DIR}/nvcc_probe)
  file(WRITE ${dir}/probe.cu "#include <cuda.h>\n#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n#include <cuda_runtime.h>\n\
#if CUDART_VERSION < 12080\n#error \"CUDA 12.8 or newer is needed\"\n#endif\n\
__global__ void probe(__nv_bfloat16 *x) { *x = __float2bfloat16(1.0f); }\nint main() { probe<<<1, 1>>>(nullptr); }\n")
  set(host "")
  if(CMAKE_CUDA_HOST_COMPILER)
    set(host -ccbin ${CMAKE_CUDA_HOST_COMPILER})
  elseif(NOT "$ENV{CUDAHOSTCXX}" STREQUAL "")
    set(host -ccbin $ENV{CUDAHOSTCXX})
  endif()
  file(REMOVE ${dir}/probe)
  execute_process(COMMAND ${nvcc} ${host} ${flags} -std=c++17 -arch=sm_80 -cudart static ${dir}/probe.cu -o ${dir}/probe
                  RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  set(text "")
  if(NOT result EQUAL 0 OR NOT EXISTS ${dir}/probe)
    # The line that most likely names the error, without characters that CMake or C would interpret.
    string(REGEX MATCH "[^\n]*(error|fatal|Unsupported|unsupported|cannot|not found)[^\n]*" text "${output}")
    if(NOT text)
      string(REGEX MATCH "[^\n]+" text "${output} (${result})")
    endif()
    string(REGEX REPLACE "[\\\\\";]" "'" text "${text}")
    set(text "${nvcc} does not work: ${text}")
  endif()
  set(${why_not} "${text}" PARENT_SCOPE)
endfunction()

# The nvcc of the system, or an empty string.
function(libflash_system_nvcc result)
  set(found "")
  if(CMAKE_CUDA_COMPILER)
    set(found "${CMAKE_CUDA_COMPILER}")
  elseif(NOT "$ENV{CUDACXX}" STREQUAL "")
    set(found "$ENV{CUDACXX}")
  else()
    find_program(nvcc nvcc PATHS ENV PATH NO_DEFAULT_PATH NO_CACHE)
    if(NOT nvcc)
      find_program(nvcc nvcc PATHS $ENV{CUDA_HOME}/bin $ENV{CUDA_PATH}/bin ${LIBFLASH_CUDA_PREFIX}/bin NO_DEFAULT_PATH NO_CACHE)
    endif()
    if(nvcc)
      set(found "${nvcc}")
    endif()
  endif()
  set(${result} "${found}" PARENT_SCOPE)
endfunction()

# The nvcc of the compiler wheels, or an empty string. `nvidia` is a namespace package that may have several roots.
function(libflash_wheel_nvcc result)
  set(${result} "" PARENT_SCOPE)
  find_package(Python QUIET COMPONENTS Interpreter)
  if(NOT Python_Interpreter_FOUND)
    return()
  endif()
  execute_process(COMMAND ${Python_EXECUTABLE} -c
    "import importlib.util as u; s = u.find_spec('nvidia'); print(';'.join(s.submodule_search_locations) if s else '')"
    OUTPUT_VARIABLE roots OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  foreach(root IN LISTS roots)
    if(EXISTS "${root}/cu13/bin/nvcc")
      set(${result} "${root}/cu13/bin/nvcc" PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

set(LIBFLASH_CUDA_WHY_NOT "")
if(LIBFLASH_CUDA STREQUAL "off")
  set(LIBFLASH_CUDA_WHY_NOT "LIBFLASH_CUDA=off")
else()
  set(candidates "")
  if(NOT LIBFLASH_CUDA STREQUAL "pypi")
    libflash_system_nvcc(system_nvcc)
    list(APPEND candidates ${system_nvcc})
  endif()
  if(NOT LIBFLASH_CUDA STREQUAL "system")
    libflash_wheel_nvcc(wheel_nvcc)
    list(APPEND candidates ${wheel_nvcc})
  endif()

  set(chosen "")
  foreach(nvcc IN LISTS candidates)
    set(flags "")
    get_filename_component(root "${nvcc}" DIRECTORY)
    get_filename_component(root "${root}" DIRECTORY)
    # In the compiler wheels of 13.0 and 13.1, nvcc looks for the runtime in lib64, but it is in lib.
    if(EXISTS "${root}/lib/libcudart_static.a" AND NOT EXISTS "${root}/lib64")
      set(flags "-L${root}/lib")
    endif()
    set(problem "")
    if(NOT LIBFLASH_PROVEN_NVCC STREQUAL nvcc)
      libflash_probe_nvcc("${nvcc}" "${flags}" problem)
    endif()
    if(NOT problem)
      set(chosen "${nvcc}")
      set(LIBFLASH_PROVEN_NVCC "${nvcc}" CACHE INTERNAL "the nvcc that the last configuration found working")
      break()
    endif()
    list(APPEND LIBFLASH_CUDA_WHY_NOT "${problem}")
  endforeach()

  if(chosen)
    set(LIBFLASH_CUDA_WHY_NOT "")
    if(flags)
      set(ENV{NVCC_PREPEND_FLAGS} "${flags} $ENV{NVCC_PREPEND_FLAGS}")
    endif()
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND "$ENV{CUDAARCHS}" STREQUAL "")
      set(CMAKE_CUDA_ARCHITECTURES ${LIBFLASH_DEFAULT_ARCHITECTURES})
    endif()
    set(CMAKE_CUDA_COMPILER "${chosen}" CACHE FILEPATH "")
    enable_language(CUDA)
  elseif(NOT LIBFLASH_CUDA_WHY_NOT)
    set(LIBFLASH_CUDA_WHY_NOT "no CUDA compiler found")
    if(LIBFLASH_CUDA STREQUAL "pypi")
      string(APPEND LIBFLASH_CUDA_WHY_NOT " in this Python (the package nvidia-cuda-nvcc)")
    endif()
  endif()
endif()

if(LIBFLASH_CUDA_WHY_NOT)
  list(JOIN LIBFLASH_CUDA_WHY_NOT "; then " LIBFLASH_CUDA_WHY_NOT)
  if(LIBFLASH_CUDA MATCHES "^(on|system|pypi)$")
    message(FATAL_ERROR "LIBFLASH_CUDA=${LIBFLASH_CUDA}: ${LIBFLASH_CUDA_WHY_NOT}")
  elseif(LIBFLASH_CUDA_WHY_NOT MATCHES "does not work")
    message(WARNING "Building the CPU library only: ${LIBFLASH_CUDA_WHY_NOT}")
  else()
    message(STATUS "libflash: CPU only: ${LIBFLASH_CUDA_WHY_NOT}")
  endif()
endif()
