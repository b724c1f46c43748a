# Compiles the kernels of kernels.table. Each kernel has a line in cuda_kernels.inc and its code in a generated .cu file. Two
# kernels that differ only in their type, f16 or bf16, share a .cu file (units.cmake). The kernels of a folder are compiled for
# the architectures of that folder; if the build has none of these architectures, the kernels are not in the registry.
#
# LIBFLASH_KERNELS   all, dev (the marked kernels), or a regular expression that the name of a kernel must match
set(LIBFLASH_KERNELS all CACHE STRING "which kernels of cuda/kernels.table to compile: all, dev or a regular expression")
set(table ${PROJECT_SOURCE_DIR}/libflash/cuda/kernels.table)
set(generated ${PROJECT_BINARY_DIR}/generated)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${table})

include(libflash/cuda/architectures.cmake)
include(libflash/cuda/units.cmake)
libflash_folder_architectures()
# The versions of a kernel: the values of __CUDA_ARCH__ / 10 that its sources test. PTX is generated for each of them. Kernels
# that would spill registers unless their machine code comes from PTX for the same architecture have one more version, 100 or 120.
# sm80/forward.cuh computes fewer scores at a time from version 100 on; the sources of backward do not test version 120.
set(versions 80 90)
# The versions of all kernels of an operation or a type. The sources of the tangent kernels test no version. Matrix products of
# float64 are single instructions from sm_90 on. Forward with statistics is compiled for few architectures (architectures.cmake).
set(versions_forward_tangent 80)
set(versions_backward_tangent 80)
set(versions_f64 80 90)
set(versions_forward_statistics 80)
set(versions_forward_sm80_bf16_d128 80 90 100)
set(versions_forward_sm80_f16_d128 80 90 100)
set(versions_forward_sm80_f32_d128 80 90 100)
# With 256 channels two warps share rows if there is enough shared memory, which sm_120 does not have.
set(versions_forward_sm80_bf16_d256 80 90 120)
set(versions_forward_sm80_f16_d256 80 90 120)
set(versions_backward_sm80_f32_d64 80 90 120)
set(versions_backward_sm80_f32_d128_small 80 90 120)
set(versions_backward_sm80_f32_d256_small 80 90 120)

# The host code of a unit only fills parameters and launches kernels, so it is compiled for size. An option -O of nvcc is for host
# code alone, and would come after that of -Xcompiler.
string(REGEX REPLACE "(^| )-O[0-3]( |$)" " " CMAKE_CUDA_FLAGS_RELEASE "${CMAKE_CUDA_FLAGS_RELEASE}")
set(host_options $<$<CONFIG:Release>:-Xcompiler=-Os>)

libflash_units("${table}" "${generated}")
foreach(group IN LISTS groups)
  add_library(libflash_cuda_${group} OBJECT)
  foreach(file IN LISTS sources_${group})
    target_sources(libflash_cuda_${group} PRIVATE ${generated}/${file})
    set_source_files_properties(${generated}/${file} PROPERTIES COMPILE_OPTIONS "${gencode_${file}}")
  endforeach()
  target_link_libraries(libflash_cuda_${group} PRIVATE libflash_flags)
  set_target_properties(libflash_cuda_${group} PROPERTIES CUDA_ARCHITECTURES OFF CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON
                        CUDA_VISIBILITY_PRESET hidden)
  target_compile_options(libflash_cuda_${group} PRIVATE --compress-mode=size -Xcompiler=-Wall,-Wextra ${host_options})
  if(LIBFLASH_RACECHECK AND group MATCHES "^sm90")
    target_compile_definitions(libflash_cuda_${group} PRIVATE LIBFLASH_RACECHECK)
  endif()
  target_sources(libflash PRIVATE $<TARGET_OBJECTS:libflash_cuda_${group}>)
endforeach()

# The host code of the backend. cudart is linked statically and driver functions are looked up at run time, so the library loads
# without a driver.
file(GLOB cuda_sources CONFIGURE_DEPENDS libflash/cuda/*.cpp libflash/cuda/*/*.cpp)
list(FILTER cuda_sources EXCLUDE REGEX "/cuda/(device|machine_code).cpp$")  # in every build
target_sources(libflash PRIVATE ${cuda_sources})
target_include_directories(libflash_flags SYSTEM INTERFACE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
# The target was added before the language was enabled, so its architectures are unset, which CMake refuses.
set_target_properties(libflash PROPERTIES CUDA_ARCHITECTURES OFF CUDA_RUNTIME_LIBRARY Static LINKER_LANGUAGE CXX)
if(LIBFLASH_KIND STREQUAL "STATIC")
  # A project that links the static library may have no CUDA compiler, so the runtime is named here.
  find_package(CUDAToolkit REQUIRED)
  target_link_libraries(libflash PRIVATE CUDA::cudart_static)
endif()
