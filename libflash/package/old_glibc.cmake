# LIBFLASH_OLD_GLIBC: a shared library for glibc 2.28 and later, whichever glibc it is built with. Newer ones give functions that
# they moved or changed a new version, which older ones lack. Each function below is called by its oldest version (old_glibc.cpp),
# also by the static runtime libraries inside libflash.so. .ci/run looks at the versions that remain.
function(libflash_use_old_glibc target)
  # Moved to libc.so.6 in 2.34 (pthread_sigmask: 2.32), with the version on x86-64. On Arm all have version 2.17, its first.
  set(functions_2.2.5 dladdr dlclose dlerror dlopen dlsym dlvsym __pthread_key_create pthread_create pthread_detach
      pthread_getspecific pthread_join pthread_key_create pthread_key_delete pthread_kill pthread_mutex_trylock
      pthread_mutexattr_destroy pthread_mutexattr_init pthread_mutexattr_setpshared pthread_mutexattr_settype
      pthread_condattr_setpshared pthread_once pthread_rwlock_destroy pthread_rwlock_init pthread_rwlock_rdlock
      pthread_rwlock_timedrdlock pthread_rwlock_timedwrlock pthread_rwlock_tryrdlock pthread_rwlock_trywrlock
      pthread_rwlock_unlock pthread_rwlock_wrlock pthread_rwlockattr_destroy pthread_rwlockattr_init
      pthread_rwlockattr_setpshared pthread_setspecific pthread_sigmask pthread_spin_destroy pthread_spin_init pthread_spin_lock
      pthread_spin_trylock pthread_spin_unlock sem_destroy sem_init sem_post sem_timedwait sem_trywait sem_wait shm_open
      shm_unlink)
  # Without the error handling of System V since 2.29; the values are the same.
  list(APPEND functions_2.2.5 exp log pow)
  set(functions_2.3.3 pthread_condattr_setclock)
  set(functions_2.3.4 dlmopen pthread_getaffinity_np pthread_setaffinity_np)
  set(functions_2.12 pthread_setname_np)
  set(lines "")
  foreach(version IN ITEMS 2.2.5 2.3.3 2.3.4 2.12)
    foreach(function IN LISTS functions_${version})
      string(APPEND lines "FLASH_OLD(${function}, \"${version}\")\n")
      target_link_options(${target} PRIVATE LINKER:--wrap=${function})
    endforeach()
  endforeach()
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/generated/old_glibc.inc CONTENT "${lines}" @ONLY)
  target_sources(${target} PRIVATE ${PROJECT_SOURCE_DIR}/libflash/package/old_glibc.cpp)
  # Where those functions were before 2.34. Newer systems have these files too.
  target_link_libraries(${target} PRIVATE
                        -Wl,--push-state,--no-as-needed,-l:libpthread.so.0,-l:libdl.so.2,-l:librt.so.1,--pop-state)
endfunction()
