# From kernels.table: for each row one line of cuda_kernels.inc and its code in a .cu, in the build folder, which it shares with the row of the
# other type of 16 bits if all else is equal (units.cmake). Rows of one room are compiled for the architectures that room is for; a room
# without any is left out, and its rows are then in no registry.
#
# LIBFLASH_KERNELS   all, dev (the marked rows), or a regular expression that a row's name has to match
set(LIBFLASH_KERNELS all CACHE STRING "which rows of cuda/kernels.table to compile: all, dev or a regular expression")
set(table ${PROJECT_SOURCE_DIR}/libflash/cuda/kernels.table)
set(generated ${PROJECT_BINARY_DIR}/generated)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${table})

include(libflash/cuda/architectures.cmake)
include(libflash/cuda/units.cmake)
libflash_room_architectures()
# The versions that there are of a row's sources: what they ask __CUDA_ARCH__ for. Rows that spill where their machine code is not from PTX
# made for it have more: sm80/forward.cuh takes fewer scores at a time from version 100 on, the others are the same sources once more.
set(versions 80 90)
set(versions_forward_sm80_bf16_d128 80 90 100)
set(versions_forward_sm80_f16_d128 80 90 100)
set(versions_forward_sm80_f32_d128 80 90 100)
# Two warps share rows with 256 channels where there is shared memory for that, and on sm_120 there is not.
set(versions_forward_sm80_bf16_d256 80 90 120)
set(versions_forward_sm80_f16_d256 80 90 120)
set(versions_backward_sm80_f32_d64 80 90 120)
set(versions_backward_sm80_f32_d128_small 80 90 120)
set(versions_backward_sm80_f32_d256_small 80 90 120)

libflash_units("${table}" "${generated}")
foreach(room IN LISTS rooms)
  add_library(libflash_cuda_${room} OBJECT)
  foreach(file IN LISTS sources_${room})
    target_sources(libflash_cuda_${room} PRIVATE ${generated}/${file})
    set_source_files_properties(${generated}/${file} PROPERTIES COMPILE_OPTIONS "${gencode_${file}}")
  endforeach()
  target_link_libraries(libflash_cuda_${room} PRIVATE libflash_flags)
  set_target_properties(libflash_cuda_${room} PROPERTIES CUDA_ARCHITECTURES OFF CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON
                        CUDA_VISIBILITY_PRESET hidden)
  target_compile_options(libflash_cuda_${room} PRIVATE --compress-mode=size -Xcompiler=-Wall,-Wextra)
  target_sources(libflash PRIVATE $<TARGET_OBJECTS:libflash_cuda_${room}>)
endforeach()

# The host side of the backend. cudart is linked statically and the driver is asked for at run time, so the library loads without one.
file(GLOB cuda_sources CONFIGURE_DEPENDS libflash/cuda/*.cpp libflash/cuda/*/*.cpp)
list(FILTER cuda_sources EXCLUDE REGEX "/cuda/(device|machine_code).cpp$")  # in every build
target_sources(libflash PRIVATE ${cuda_sources})
target_include_directories(libflash_flags SYSTEM INTERFACE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
set_target_properties(libflash PROPERTIES CUDA_RUNTIME_LIBRARY Static LINKER_LANGUAGE CXX)
if(LIBFLASH_KIND STREQUAL "STATIC")
  # A project that links the static library may have no CUDA compiler, so the runtime is named.
  find_package(CUDAToolkit REQUIRED)
  target_link_libraries(libflash PRIVATE CUDA::cudart_static)
endif()
