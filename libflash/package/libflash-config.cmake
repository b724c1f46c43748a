# find_package(libflash): the target libflash::libflash.
include("${CMAKE_CURRENT_LIST_DIR}/libflash-targets.cmake")
