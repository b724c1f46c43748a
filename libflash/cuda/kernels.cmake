# From kernels.table: for each row one .cu and one line of cuda_rows.inc, in the build folder. Rows of one room are compiled together, for
# the architectures that room is for; a room without any is left out, and its rows are then in no registry.
#
# LIBFLASH_ROWS   all, dev (the marked rows), or a regular expression that a row's name has to match
set(LIBFLASH_ROWS all CACHE STRING "which rows of cuda/kernels.table to compile: all, dev or a regular expression")
set(table ${PROJECT_SOURCE_DIR}/libflash/cuda/kernels.table)
set(generated ${PROJECT_BINARY_DIR}/generated)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${table})

# Writes only what changed, so that a new row recompiles itself and the registry alone.
function(libflash_write path text)
  set(old "")
  if(EXISTS ${path})
    file(READ ${path} old)
  endif()
  if(NOT old STREQUAL text OR NOT EXISTS ${path})
    file(WRITE ${path} "${text}")
  endif()
endfunction()

# "128x176" to 128 and 176, "128" to 128 and 128, "-" to 0 and 0.
function(libflash_pair text first second)
  set(a 0)
  set(b 0)
  if(text MATCHES "^([0-9]+)x([0-9]+)$")
    set(a ${CMAKE_MATCH_1})
    set(b ${CMAKE_MATCH_2})
  elseif(text MATCHES "^[0-9]+$")
    set(a ${text})
    set(b ${text})
  elseif(NOT text STREQUAL "-")
    message(FATAL_ERROR "kernels.table: a number, NxM or - is needed, got '${text}'")
  endif()
  set(${first} ${a} PARENT_SCOPE)
  set(${second} ${b} PARENT_SCOPE)
endfunction()

include(libflash/cuda/architectures.cmake)
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

set(registry "// Generated from cuda/kernels.table.\n")
file(STRINGS ${table} rows REGEX "^[a-z]")
foreach(row IN LISTS rows)
  string(REGEX REPLACE "[ \t]+" ";" row "${row}")
  list(LENGTH row columns)
  if(NOT columns EQUAL 7)
    message(FATAL_ERROR "kernels.table: a row has 7 columns, got ${columns}: ${row}")
  endif()
  list(GET row 0 operation)
  list(GET row 1 room)
  list(GET row 2 dtype)
  list(GET row 3 head_dims)
  list(GET row 4 tile)
  list(GET row 5 stages)
  list(GET row 6 marks)
  libflash_pair("${head_dims}" head_dim head_dim_v)
  libflash_pair("${tile}" tile_q tile_k)
  string(REPLACE "-" "0" stages "${stages}")

  set(name ${operation}_${room})
  if(NOT dtype STREQUAL "any")
    string(APPEND name _${dtype})
  endif()
  if(NOT head_dims STREQUAL "-")
    string(APPEND name _d${head_dims})
  endif()

  set(compiled_as ${room})
  if(marks MATCHES "small|large")
    string(APPEND compiled_as _${CMAKE_MATCH_0})
  endif()
  if(marks MATCHES "small")
    string(APPEND name _small)
  endif()

  if(LIBFLASH_ROWS STREQUAL "dev")
    if(NOT marks MATCHES "dev")
      continue()
    endif()
  elseif(NOT LIBFLASH_ROWS STREQUAL "all" AND NOT name MATCHES "${LIBFLASH_ROWS}")
    continue()
  endif()
  if(NOT LIBFLASH_ARCHITECTURES_${compiled_as})
    continue()
  endif()

  list(JOIN LIBFLASH_ARCHITECTURES_${compiled_as} " " architectures)
  set(fields "\"${name}\", \"${operation}\", \"${room}\", RowType::${dtype}_, ${head_dim}, ${head_dim_v}, ${tile_q}, ${tile_k}, ${stages}, \"${architectures}\"")
  libflash_write(${generated}/${name}.cu "// Generated from cuda/kernels.table, row ${name}.
#include \"cuda/${room}/${operation}.cuh\"

namespace libflash::cuda {

struct ${name} {
    static constexpr KernelConfig config{${fields}};
};

int launch_${name}(const LaunchParams<Operation::${operation}>& params, void* stream) {
    return launch_${operation}<${name}>(params, stream);
}

}  // namespace libflash::cuda
")
  if(NOT DEFINED versions_${name})
    set(versions_${name} ${versions})
  endif()
  libflash_gencode("${LIBFLASH_ARCHITECTURES_${compiled_as}}" "${versions_${name}}" gencode)
  set_source_files_properties(${generated}/${name}.cu PROPERTIES COMPILE_OPTIONS "${gencode}")
  string(APPEND registry "LIBFLASH_CUDA_ROW(${operation}, ${name}, ${fields})\n")
  list(APPEND sources_${compiled_as} ${generated}/${name}.cu)
  list(APPEND rooms ${compiled_as})
endforeach()
libflash_write(${generated}/cuda_rows.inc "${registry}")

list(REMOVE_DUPLICATES rooms)
foreach(room IN LISTS rooms)
  add_library(libflash_cuda_${room} OBJECT ${sources_${room}})
  target_link_libraries(libflash_cuda_${room} PRIVATE libflash_flags)
  set_target_properties(libflash_cuda_${room} PROPERTIES CUDA_ARCHITECTURES OFF CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON
                        CUDA_VISIBILITY_PRESET hidden)
  target_compile_options(libflash_cuda_${room} PRIVATE --compress-mode=size -Xcompiler=-Wall,-Wextra)
  target_sources(libflash PRIVATE $<TARGET_OBJECTS:libflash_cuda_${room}>)
endforeach()

# The host side of the backend. cudart is linked statically and the driver is asked for at run time, so the library loads without one.
file(GLOB cuda_sources CONFIGURE_DEPENDS libflash/cuda/*.cpp)
target_sources(libflash PRIVATE ${cuda_sources})
target_include_directories(libflash_flags SYSTEM INTERFACE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
set_target_properties(libflash PROPERTIES CUDA_RUNTIME_LIBRARY Static LINKER_LANGUAGE CXX)
