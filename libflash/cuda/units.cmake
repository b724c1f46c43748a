# Reads kernels.table: selects the kernels of this build and assigns them to translation units. Two kernels that differ only in
# their type, f16 or bf16, share a unit, so that the headers are parsed once for both. Kernels with different architectures or
# versions never share a unit. The file of a unit has the name of its kernel; with two kernels, as forward_sm80_bf16_f16_d128.cu.

# Writes a file only if its content changed, so that after a new line in the table only its unit and the registry are compiled.
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

# Reads one line of the table. Sets name and its parts before_dtype, dtype and after_dtype; group (architectures.cmake);
# chosen (whether LIBFLASH_KERNELS selects it and there is an architecture to compile it for); fields (of KernelConfig);
# operation and folder.
macro(libflash_read_kernel line)
  string(REGEX REPLACE "[ \t]+" ";" columns "${line}")
  list(LENGTH columns count)
  if(NOT count EQUAL 7)
    message(FATAL_ERROR "kernels.table: a line has 7 columns, got ${count}: ${columns}")
  endif()
  list(GET columns 0 operation)
  list(GET columns 1 folder)
  list(GET columns 2 dtype)
  list(GET columns 3 head_dims)
  list(GET columns 4 tile)
  list(GET columns 5 stages)
  list(GET columns 6 marks)
  libflash_pair("${head_dims}" head_dim head_dim_v)
  libflash_pair("${tile}" tile_q tile_k)
  string(REPLACE "-" "0" stages "${stages}")

  set(before_dtype ${operation}_${folder})
  set(after_dtype "")
  if(NOT head_dims STREQUAL "-")
    string(APPEND after_dtype _d${head_dims})
  endif()
  set(group ${folder})
  if(marks MATCHES "statistics")
    string(APPEND group _statistics)
  elseif(dtype STREQUAL "f64")
    string(APPEND group _f64)
  elseif(operation MATCHES "_tangent$")
    string(APPEND group _tangent)
  elseif(head_dim GREATER 256)
    string(APPEND group _wide)
  elseif(folder STREQUAL "sm80" AND operation STREQUAL "backward")
    string(APPEND group _backward)
  elseif(folder STREQUAL "sm80" AND dtype STREQUAL "f32")
    string(APPEND group _f32)
  endif()
  if(marks MATCHES "small|large")
    string(APPEND group _${CMAKE_MATCH_0})
  endif()
  if(marks MATCHES "small")
    string(APPEND after_dtype _small)
  endif()
  set(code ${operation})  # the name of its header and its launcher
  if(marks MATCHES "statistics")
    string(APPEND after_dtype _statistics)
    string(APPEND code _statistics)
  endif()
  if(marks MATCHES "wide")
    string(APPEND code _wide)
  endif()
  set(name ${before_dtype}_${dtype}${after_dtype})
  if(dtype STREQUAL "any")
    set(name ${before_dtype}${after_dtype})
  endif()

  set(wanted "${name}")  # the text that the pattern must match
  set(pattern "${LIBFLASH_KERNELS}")
  if(pattern STREQUAL "all")
    set(pattern "")
  elseif(pattern STREQUAL "dev")
    set(wanted "${marks}")
  endif()
  set(chosen OFF)
  if(LIBFLASH_ARCHITECTURES_${group} AND "${wanted}" MATCHES "${pattern}")
    set(chosen ON)
  endif()

  foreach(known IN ITEMS versions_${dtype} versions_${code} versions)
    if(NOT DEFINED versions_${name} AND DEFINED ${known})
      set(versions_${name} ${${known}})
    endif()
  endforeach()
  list(JOIN LIBFLASH_ARCHITECTURES_${group} " " architectures)
  list(JOIN versions_${name} " " versions_of_code)
  set(fields "\"${name}\", Operation::${operation}, \"${folder}\", KernelType::${dtype}_, ${head_dim}, ${head_dim_v}")
  string(APPEND fields ", ${tile_q}, ${tile_k}, ${stages}, \"${architectures}\", \"${versions_of_code}\"")
  if(marks MATCHES "statistics")
    string(APPEND fields ", true")
  endif()
endmacro()

# Adds the kernel that was read last to its unit. Sets unit, unit_<unit>_dtypes, unit_<unit>_kernels (names), unit_<unit>_code,
# and what the kernels of the unit share.
macro(libflash_join_unit)
  set(kind ${dtype})
  if(dtype MATCHES "^b?f16$")
    set(kind 16)
  endif()
  string(MAKE_C_IDENTIFIER "${before_dtype}_${kind}${after_dtype}_${tile}_${stages}_${group}_from_${versions_${name}}" unit)
  list(APPEND units ${unit})
  list(APPEND unit_${unit}_dtypes ${dtype})
  list(APPEND unit_${unit}_kernels ${name})
  set(unit_${unit}_header cuda/${folder}/${code}.cuh)
  if(dtype STREQUAL "f64")
    set(unit_${unit}_header cuda/${folder}/${code}_f64.cuh)
  endif()
  set(unit_${unit}_group ${group})
  set(unit_${unit}_versions ${versions_${name}})
  list(JOIN unit_${unit}_dtypes _ dtypes)
  set(unit_${unit}_file ${before_dtype}_${dtypes}${after_dtype}.cu)
  if(dtype STREQUAL "any")
    set(unit_${unit}_file ${name}.cu)
  endif()
  string(APPEND unit_${unit}_code "struct ${name} {
    static constexpr KernelConfig config{${fields}};
};

int launch_${name}(const LaunchPlan<Operation::${operation}>& plan,
                   const LaunchParams<Operation::${operation}>& params, void* stream) {
    return launch_${code}<${name}>(plan, params, stream);
}

KernelResources resources_${name}(int step, int instance) {
    return resources_of_${code}<${name}>(step, instance);
}

")
endmacro()

# Writes the registry, the table of architectures and the units of `table` to the folder `generated`. Sets `groups` (the groups of
# architectures.cmake that have kernels), for each group sources_<group>, and for each source file its compiler options,
# gencode_<file>.
macro(libflash_units table generated)
  set(units "")
  set(groups "")
  set(folders "")
  set(registry "// Generated from cuda/kernels.table.\n")
  file(STRINGS "${table}" lines REGEX "^[a-z]")
  foreach(line IN LISTS lines)
    libflash_read_kernel("${line}")
    list(APPEND folders ${folder})
    if(chosen)
      libflash_join_unit()
      string(APPEND registry "LIBFLASH_CUDA_KERNEL(${operation}, ${name}, ${fields})\n")
    endif()
  endforeach()
  libflash_write("${generated}/cuda_kernels.inc" "${registry}")
  list(REMOVE_DUPLICATES folders)
  list(TRANSFORM folders REPLACE "(.+)" "LIBFLASH_CUDA_ARCHITECTURE(\\1)\n")
  string(CONCAT architecture_lines "// Generated from cuda/kernels.table.\n" ${folders})
  libflash_write("${generated}/cuda_architectures.inc" "${architecture_lines}")

  list(REMOVE_DUPLICATES units)
  foreach(unit IN LISTS units)
    list(JOIN unit_${unit}_kernels ", " names)
    set(file ${unit_${unit}_file})
    libflash_write("${generated}/${file}" "// Generated from cuda/kernels.table: ${names}.
#include \"${unit_${unit}_header}\"

namespace libflash::cuda {

${unit_${unit}_code}}  // namespace libflash::cuda
")
    set(group ${unit_${unit}_group})
    libflash_gencode("${LIBFLASH_ARCHITECTURES_${group}}" "${unit_${unit}_versions}" gencode_${file})
    list(APPEND sources_${group} ${file})
    list(APPEND groups ${group})
  endforeach()
  list(REMOVE_DUPLICATES groups)
endmacro()
