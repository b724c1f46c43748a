# The architectures that the kernels of a folder are compiled for, and the compiler options for them, from
# CMAKE_CUDA_ARCHITECTURES, CMake's list ("80-real;90a-real;80-virtual": machine code, PTX, or both without a suffix).

# Sets LIBFLASH_ARCHITECTURES_<group> for each group of kernels. The groups: each folder; sm80_backward, sm80_f32, sm80_f64;
# sm80_tangent, sm90_tangent; sm80_wide, sm90_wide (more than 256 channels); sm80_statistics, sm90_statistics. The groups of sm80
# also exist with the mark large or small at the end, as sm80_large or sm80_backward_small.
macro(libflash_folder_architectures)
  foreach(architecture IN LISTS CMAKE_CUDA_ARCHITECTURES)
    if(NOT architecture MATCHES "^([0-9]+)[af]?(-real|-virtual)?$" OR CMAKE_MATCH_1 LESS 80)
      message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES: numbers from 80 on are needed, "
                          "as in 80-real;90a-real;80-virtual, got '${architecture}'")
    endif()
  endforeach()
  # wgmma needs sm_90a, so sm90 is compiled for 90a alone. No other folder needs the letter: 90a is 90 there.
  set(LIBFLASH_ARCHITECTURES_sm90 ${CMAKE_CUDA_ARCHITECTURES})
  list(FILTER LIBFLASH_ARCHITECTURES_sm90 INCLUDE REGEX "^90a")
  set(LIBFLASH_ARCHITECTURES_sm90_tangent ${LIBFLASH_ARCHITECTURES_sm90})
  set(LIBFLASH_ARCHITECTURES_sm90_wide ${LIBFLASH_ARCHITECTURES_sm90})
  set(LIBFLASH_ARCHITECTURES_sm90_statistics ${LIBFLASH_ARCHITECTURES_sm90})
  string(REGEX REPLACE "([0-9])[af]" "\\1" LIBFLASH_ARCHITECTURES_any "${CMAKE_CUDA_ARCHITECTURES}")
  list(REMOVE_DUPLICATES LIBFLASH_ARCHITECTURES_any)
  set(LIBFLASH_ARCHITECTURES_sm80 ${LIBFLASH_ARCHITECTURES_any})
  # These groups contain all kernels of sm80 but forward and decode in 16 bits with up to 256 channels. If the list has PTX that
  # newer GPUs can run, they get no machine code for sm_100 and newer.
  set(kinds sm80_backward sm80_f32 sm80_f64 sm80_statistics sm80_tangent sm80_wide)
  foreach(kind IN LISTS kinds)
    set(LIBFLASH_ARCHITECTURES_${kind} ${LIBFLASH_ARCHITECTURES_sm80})
    if(LIBFLASH_ARCHITECTURES_sm80 MATCHES "(^|;)[89][0-9](-virtual)?(;|$)")
      list(FILTER LIBFLASH_ARCHITECTURES_${kind} EXCLUDE REGEX "^1[0-9]+-real$")
    endif()
  endforeach()
  # Kernels marked large: for architectures whose thread blocks may have 227 KB of shared memory. Small: for the others, PTX
  # included. Some kernels are only small, so if the others have no PTX that the large architectures can run, they are compiled
  # for all architectures.
  foreach(kind IN ITEMS sm80 ${kinds})
    set(LIBFLASH_ARCHITECTURES_${kind}_large ${LIBFLASH_ARCHITECTURES_${kind}})
    list(FILTER LIBFLASH_ARCHITECTURES_${kind}_large INCLUDE REGEX "^(90|100|103)")
    set(LIBFLASH_ARCHITECTURES_${kind}_small ${LIBFLASH_ARCHITECTURES_${kind}})
    list(FILTER LIBFLASH_ARCHITECTURES_${kind}_small EXCLUDE REGEX "^(90|100|103)")
    if(NOT LIBFLASH_ARCHITECTURES_${kind}_small MATCHES "(^|;)8[0-9](-virtual)?(;|$)")
      set(LIBFLASH_ARCHITECTURES_${kind}_small ${LIBFLASH_ARCHITECTURES_${kind}})
    endif()
  endforeach()
endmacro()

# nvcc's options for `architectures`. Generating PTX takes most of the time, so machine code is made from as few PTX versions as
# possible: `versions` are the architectures for which the sources differ (__CUDA_ARCH__ >= ...), and the machine code of each
# architecture is made from the last version that is not above it. PTX for future GPUs is kept only for the architectures of the
# list that ask for it. CMake by itself would generate PTX for each architecture.
function(libflash_gencode architectures versions result)
  set(from "")
  foreach(architecture IN LISTS architectures)
    string(REGEX MATCH "^([0-9]+)([af]?)" ignored "${architecture}")
    set(number ${CMAKE_MATCH_1})
    set(letter "${CMAKE_MATCH_2}")
    set(version ${number}${letter})
    foreach(known IN LISTS versions)
      if(NOT letter AND NOT known GREATER number)
        set(version ${known})
      endif()
    endforeach()
    if(NOT architecture MATCHES "-virtual$")
      list(APPEND from ${version})
      list(APPEND codes_${version} sm_${number}${letter})
    endif()
    if(NOT architecture MATCHES "-real$")
      list(APPEND from ${number}${letter})
      list(APPEND codes_${number}${letter} compute_${number}${letter})
    endif()
  endforeach()
  set(options "")
  list(REMOVE_DUPLICATES from)
  foreach(version IN LISTS from)
    list(REMOVE_DUPLICATES codes_${version})
    list(JOIN codes_${version} "," codes)
    list(APPEND options --generate-code=arch=compute_${version},code=[${codes}])
  endforeach()
  set(${result} "${options}" PARENT_SCOPE)
endfunction()
