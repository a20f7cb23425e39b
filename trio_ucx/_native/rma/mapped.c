/* Remote memory that this process has mapped: it is copied by load and store, and the processor does the atomics.
 *
 * The mapping stays until this process ends it: the kernel keeps the pages of another process's memory, and an owner in
 * this process keeps its memory (tu_memory_hold). So an access that has begun before the owner closes the memory never
 * meets other memory. Those that begin later are refused: the memory's token lies behind it, and the owner erases it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "rma/transfer.h"

/* True if this process can read a byte. False if there is no memory behind it, as behind the end of a file that was
 * truncated after it was mapped: to touch it would be a SIGBUS. The kernel reads the byte first, then refuses ~0. */
bool tu_can_read(const void *address)
{
    uintptr_t mask = (uintptr_t)address & ~(uintptr_t)(sizeof(uint64_t) - 1);

    return syscall(SYS_rt_sigprocmask, ~0, mask, NULL, sizeof(uint64_t)) == 0 || errno != EFAULT;
}

/* Returns true if the token is at this address of a mapping. There may be nothing: UCX maps as many bytes as the key
 * says of whatever file the owner's descriptor is now, and a load beyond the end of a file is a SIGBUS. */
bool tu_mapped_has_token(const char *at, const char *token)
{
    return (uintptr_t)at % sizeof(uint64_t) == 0 && tu_can_read(at) && memcmp(at, token, TU_TOKEN_SIZE) == 0;
}

/* Returns true if the owner has not closed the memory. An owner without trio_ucx cannot say so. */
bool tu_mapped_is_open(const tu_access_path_t *path)
{
    uint64_t token;

    if (path->local_token == NULL) {
        return true;
    }
    token = __atomic_load_n((const uint64_t *)(const void *)path->local_token, __ATOMIC_ACQUIRE);
    return memcmp(&token, path->token, sizeof(token)) == 0;
}

/* ---- preparation ---- */

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14 */
#endif
#define SMALLEST_PAGE 4096

/* Enters pages of a mapping in this process's page table: as many as were copied. Otherwise the first access to a page is
 * a fault, which takes several times as long as copying the page; System V memory has one for each page.
 *
 * It begins at the end, because programs that read all of the memory begin at its beginning. It leaves out what is not in
 * the machine's memory, as what the owner has never used. */
void tu_mapped_prepare(const tu_access_path_t *path, uint64_t length)
{
    tu_preparation_t *preparation = path->preparation;
    unsigned char in_memory[TU_COPIED_AT_ONCE / SMALLEST_PAGE];
    uint64_t size;
    char *begin;

    if (preparation == NULL || preparation->left == 0 || (preparation->copied += length) < TU_COPIED_AT_ONCE) {
        return;
    }
    preparation->copied = 0;
    size                = (preparation->left - 1) % TU_COPIED_AT_ONCE + 1;
    preparation->left -= size;
    begin = path->local + preparation->left;
    memset(in_memory, 1, sizeof(in_memory));
    if (mincore(begin, size, in_memory) == 0 && memchr(in_memory, 0, sizeof(in_memory)) == NULL) {
        (void)madvise(begin, size, MADV_POPULATE_READ);
    }
}

/* ---- copies ---- */

#if defined(__x86_64__)
#define LINE 64                         /* bytes of the processor's cache */
#define VECTORS_FROM 2048               /* bytes: memcpy is as fast for fewer, */
#define VECTORS_BELOW TU_COPIED_AT_ONCE /* and for so many */

typedef uint64_t vector_t __attribute__((vector_size(16), aligned(1), may_alias));

/* Copies by vectors if source and target lie at different places of their cache lines. There glibc's memcpy is slow on
 * AMD's processors, because it uses `rep movsb`: 1.5 times as long as this, up to 10 times within the cache. */
static void copy(char *to, const char *from, uint64_t length)
{
    size_t head = -(uintptr_t)to % LINE;

    if (length >= VECTORS_FROM && length < VECTORS_BELOW && ((uintptr_t)to ^ (uintptr_t)from) % LINE != 0) {
        memcpy(to, from, head);
        for (to += head, from += head, length -= head; length >= LINE; to += LINE, from += LINE, length -= LINE) {
            const vector_t *source = (const void *)from;
            vector_t *target       = (void *)to;
            vector_t first = source[0], second = source[1], third = source[2], fourth = source[3];

            target[0] = first;
            target[1] = second;
            target[2] = third;
            target[3] = fourth;
        }
    }
    memcpy(to, from, length);
}
#else
#define copy memcpy
#endif

/* Copies an integer whose address in the remote memory is aligned, by one store or load. memcpy may write it twice, and
 * overwrite what another peer has stored in between, into a lock that was just released; or read half of a write. */
#define COPY_INTEGER(type)                                                                                         \
    case sizeof(type):                                                                                             \
        if ((uintptr_t)local % sizeof(type) == 0) {                                                                \
            type value;                                                                                            \
                                                                                                                   \
            if (put) {                                                                                             \
                memcpy(&value, buffer, sizeof(value));                                                             \
                __atomic_store_n((type *)(void *)local, value, __ATOMIC_RELEASE);                                  \
            } else {                                                                                               \
                value = __atomic_load_n((const type *)(const void *)local, __ATOMIC_ACQUIRE);                      \
                memcpy(buffer, &value, sizeof(value));                                                             \
            }                                                                                                      \
            return;                                                                                                \
        }                                                                                                          \
        break

void tu_mapped_copy(bool put, char *buffer, char *local, uint64_t length)
{
    switch (length) {
        COPY_INTEGER(uint8_t);
        COPY_INTEGER(uint16_t);
        COPY_INTEGER(uint32_t);
        COPY_INTEGER(uint64_t);
    }
    __atomic_thread_fence(__ATOMIC_ACQ_REL);
    copy(put ? local : buffer, put ? buffer : local, length);
    __atomic_thread_fence(__ATOMIC_ACQ_REL);
}

/* ---- atomics ---- */

#define DEFINE_ATOMIC(type)                                                                                        \
    static type atomic_##type(const tu_atomic_terms_t *atomic, type *at)                                           \
    {                                                                                                              \
        type operand = (type)atomic->operand;                                                                      \
                                                                                                                   \
        switch (atomic->operation) {                                                                               \
        case TU_ATOMIC_ADD:                                                                                        \
            return __atomic_fetch_add(at, operand, __ATOMIC_SEQ_CST);                                              \
        case TU_ATOMIC_AND:                                                                                        \
            return __atomic_fetch_and(at, operand, __ATOMIC_SEQ_CST);                                              \
        case TU_ATOMIC_OR:                                                                                         \
            return __atomic_fetch_or(at, operand, __ATOMIC_SEQ_CST);                                               \
        case TU_ATOMIC_XOR:                                                                                        \
            return __atomic_fetch_xor(at, operand, __ATOMIC_SEQ_CST);                                              \
        case TU_ATOMIC_SWAP:                                                                                       \
            return __atomic_exchange_n(at, operand, __ATOMIC_SEQ_CST);                                             \
        default:                                                                                                   \
            __atomic_compare_exchange_n(at, &operand, (type)atomic->swapped, false, __ATOMIC_SEQ_CST,              \
                                        __ATOMIC_SEQ_CST);                                                         \
            return operand; /* now what was there */                                                               \
        }                                                                                                          \
    }

DEFINE_ATOMIC(uint32_t)
DEFINE_ATOMIC(uint64_t)

/* Does an atomic to an aligned integer of 4 or 8 bytes. Returns what was there before. */
uint64_t tu_mapped_atomic(const tu_atomic_terms_t *atomic, char *at, uint64_t length)
{
    return length == 4 ? atomic_uint32_t(atomic, (uint32_t *)(void *)at) :
                         atomic_uint64_t(atomic, (uint64_t *)(void *)at);
}
