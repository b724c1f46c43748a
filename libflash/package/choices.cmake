# Reads the settings LIBFLASH_CUDA and BUILD_SHARED_LIBS.

# Sets LIBFLASH_CUDA to auto, on, off, system or pypi. The environment variable takes precedence.
# python/build_backend/cuda_choice.py accepts the same words.
macro(libflash_choose_cuda)
  if(NOT "$ENV{LIBFLASH_CUDA}" STREQUAL "")
    set(LIBFLASH_CUDA "$ENV{LIBFLASH_CUDA}" CACHE STRING "auto, on, off, system or pypi")
  endif()
  set(LIBFLASH_CUDA auto CACHE STRING "auto, on, off, system or pypi")
  string(TOLOWER "${LIBFLASH_CUDA}" LIBFLASH_CUDA)
  if(LIBFLASH_CUDA MATCHES "^(1|true|yes)$")
    set(LIBFLASH_CUDA on)
  elseif(LIBFLASH_CUDA MATCHES "^(0|false|no)$")
    set(LIBFLASH_CUDA off)
  elseif(NOT LIBFLASH_CUDA MATCHES "^(auto|on|off|system|pypi)$")
    message(FATAL_ERROR "LIBFLASH_CUDA: one of auto, on, off, system, pypi is needed, got '${LIBFLASH_CUDA}'")
  endif()
endmacro()

# Sets LIBFLASH_KIND: STATIC if BUILD_SHARED_LIBS is OFF; SHARED if it is ON or not set.
macro(libflash_choose_kind)
  set(LIBFLASH_KIND SHARED)
  if(DEFINED BUILD_SHARED_LIBS AND NOT BUILD_SHARED_LIBS)
    set(LIBFLASH_KIND STATIC)
    if(LIBFLASH_PYTHON OR SKBUILD)
      message(FATAL_ERROR "BUILD_SHARED_LIBS: the Python module needs the shared library, got '${BUILD_SHARED_LIBS}'")
    endif()
  endif()
endmacro()
