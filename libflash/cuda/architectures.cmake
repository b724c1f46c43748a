# Which architectures a room is compiled for, and how: from CMAKE_CUDA_ARCHITECTURES, CMake's list ("80-real;90a-real;80-virtual": machine
# code, PTX, or without a word both).

# Sets LIBFLASH_ARCHITECTURES_<room> for each room, and for rows marked large or small LIBFLASH_ARCHITECTURES_<room>_<mark>.
macro(libflash_room_architectures)
  foreach(architecture IN LISTS CMAKE_CUDA_ARCHITECTURES)
    if(NOT architecture MATCHES "^([0-9]+)[af]?(-real|-virtual)?$" OR CMAKE_MATCH_1 LESS 80)
      message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES: numbers from 80 on are needed, as in 80-real;90a-real;80-virtual, got '${architecture}'")
    endif()
  endforeach()
  # wgmma and TMA are in sm_90a alone. No other room needs a letter: 90a is 90 there.
  set(LIBFLASH_ARCHITECTURES_sm90 ${CMAKE_CUDA_ARCHITECTURES})
  list(FILTER LIBFLASH_ARCHITECTURES_sm90 INCLUDE REGEX "^90a")
  string(REGEX REPLACE "([0-9])[af]" "\\1" LIBFLASH_ARCHITECTURES_any "${CMAKE_CUDA_ARCHITECTURES}")
  list(REMOVE_DUPLICATES LIBFLASH_ARCHITECTURES_any)
  set(LIBFLASH_ARCHITECTURES_sm80 ${LIBFLASH_ARCHITECTURES_any})
  # Rows marked large: for the architectures whose thread blocks may have 227 KB of shared memory. Small: for the others, PTX included, or for
  # whatever there is in a build for large ones alone.
  set(LIBFLASH_ARCHITECTURES_sm80_large ${LIBFLASH_ARCHITECTURES_sm80})
  list(FILTER LIBFLASH_ARCHITECTURES_sm80_large INCLUDE REGEX "^(90|100|103)")
  set(LIBFLASH_ARCHITECTURES_sm80_small ${LIBFLASH_ARCHITECTURES_sm80})
  list(FILTER LIBFLASH_ARCHITECTURES_sm80_small EXCLUDE REGEX "^(90|100|103)")
  if(NOT LIBFLASH_ARCHITECTURES_sm80_small)
    set(LIBFLASH_ARCHITECTURES_sm80_small ${LIBFLASH_ARCHITECTURES_sm80})
  endif()
endmacro()

# nvcc's options for `architectures`. Making PTX is what a row takes longest for, so that machine code is made from as few as
# there are versions of the sources: `versions` are the architectures that they ask for (__CUDA_ARCH__ >= ...), and each architecture takes
# the last version that is not above it. What is kept as PTX, for GPUs to come, is what the list says. CMake by itself would make PTX for
# each architecture.
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
