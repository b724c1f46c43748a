# The workspace of small calls on the CPU. One block of memory is kept from call to call. If the block is large enough, a call
# needs neither a workspace query nor an allocation, which take longer than a tiny problem.

cdef extern from *:
    """
    #include <stdatomic.h>
    #include <stdlib.h>

    enum { KEPT_BYTES = 1 << 20, KEPT_ALIGNMENT = 256 }; /* the largest block that is kept; a workspace's alignment */

    /* The block that no call uses. A call takes it, so that no other thread has it at the same time. */
    static _Atomic(char *) libflash_kept;

    /* The size of a block is stored in front of its memory. */
    static size_t libflash_block_size(const char *memory) { return memory ? *(const size_t *)(memory - KEPT_ALIGNMENT) : 0; }

    static char *libflash_new_block(size_t size) {
        void *block = NULL;
        if (posix_memalign(&block, KEPT_ALIGNMENT, size + KEPT_ALIGNMENT) != 0) return NULL;
        *(size_t *)block = size;
        return (char *)block + KEPT_ALIGNMENT;
    }

    static char *libflash_take_block(void) { return atomic_exchange(&libflash_kept, NULL); }

    static void libflash_give_block(char *memory) {
        if (libflash_block_size(memory) <= KEPT_BYTES) memory = atomic_exchange(&libflash_kept, memory);
        if (memory) free(memory - KEPT_ALIGNMENT);
    }
    """
    size_t block_size "libflash_block_size"(const char *memory) noexcept nogil
    char *new_block "libflash_new_block"(size_t size) noexcept nogil
    char *take_block "libflash_take_block"() noexcept nogil
    void give_block "libflash_give_block"(char *memory) noexcept nogil


cdef char *kept_workspace(Call *call, size_t *size) except? NULL:
    """Take the kept block until finish(call), and set its size; NULL and 0 if there is none or another call has it."""
    cdef char *memory = take_block()
    size[0] = block_size(memory)
    if memory != NULL:
        hold(call, HELD_BLOCK, memory)
    return memory


cdef char *larger_workspace(Call *call, size_t size) except NULL:
    """A new block of `size` bytes. finish(call) keeps it for later calls, unless it is larger than KEPT_BYTES."""
    cdef char *memory = new_block(size)
    if memory == NULL:
        raise OutOfMemoryError(f"no memory for a workspace of {size} bytes")
    hold(call, HELD_BLOCK, memory)
    return memory
