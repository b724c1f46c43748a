# Install rules: the library, its header, the CMake package, the pkg-config file. A wheel gets the library under one name only:
# wheels cannot hold links, so each further name would be a copy.
include(CMakePackageConfigHelpers)

if(SKBUILD)
  set(CMAKE_INSTALL_LIBDIR lib)
  set(CMAKE_INSTALL_INCLUDEDIR include)
  set(namelink NAMELINK_SKIP)
  set(LIBFLASH_PC_LIB "-l:libflash.so.${LIBFLASH_SOVERSION}")
else()
  set_target_properties(libflash PROPERTIES VERSION ${PROJECT_VERSION})
  set(namelink "")
  set(LIBFLASH_PC_LIB "-lflash")
endif()
set(pc libflash)
if(LIBFLASH_KIND STREQUAL "STATIC")
  # A file of its own, since both kinds may be installed in one place.
  set(pc libflash-static)
  set(LIBFLASH_PC_LIB "-l:libflash.a")
  # A program that links a static library must name every library that its objects need.
  string(APPEND LIBFLASH_PC_LIB " -pthread -ldl")
  if(CMAKE_CUDA_COMPILER_LOADED)
    string(APPEND LIBFLASH_PC_LIB " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lrt")
  endif()
  foreach(library IN LISTS CMAKE_CXX_IMPLICIT_LINK_LIBRARIES)
    if(library MATCHES "^(stdc\\+\\+|c\\+\\+|c\\+\\+abi|m)$")
      string(APPEND LIBFLASH_PC_LIB " -l${library}")
    endif()
  endforeach()
endif()
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/libflash)

install(TARGETS libflash EXPORT libflash-targets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ${namelink}
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${PROJECT_SOURCE_DIR}/include/libflash.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
string(TOLOWER ${LIBFLASH_KIND} kind)
install(EXPORT libflash-targets NAMESPACE libflash:: DESTINATION ${package_dir} FILE libflash-${kind}-targets.cmake)

# While the major version is 0, a minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/libflash-config-version.cmake COMPATIBILITY SameMinorVersion)
configure_file(${CMAKE_CURRENT_LIST_DIR}/libflash-config.cmake.in ${PROJECT_BINARY_DIR}/libflash-config.cmake @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/libflash-config.cmake ${PROJECT_BINARY_DIR}/libflash-config-version.cmake
        DESTINATION ${package_dir})
if(LIBFLASH_KIND STREQUAL "STATIC")
  configure_file(${CMAKE_CURRENT_LIST_DIR}/libflash-static-needs.cmake.in ${PROJECT_BINARY_DIR}/libflash-static-needs.cmake @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/libflash-static-needs.cmake DESTINATION ${package_dir})
endif()

file(RELATIVE_PATH LIBFLASH_PC_UP /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" LIBFLASH_PC_UP "${LIBFLASH_PC_UP}")
configure_file(${CMAKE_CURRENT_LIST_DIR}/libflash.pc.in ${PROJECT_BINARY_DIR}/${pc}.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/${pc}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
