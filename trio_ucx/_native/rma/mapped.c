/* Remote memory that this process has mapped: it is copied by load and store, and the processor does the atomics.
 *
 * The mapping stays until this process ends it: the kernel keeps the pages of another process's memory, and an owner in
 * this process keeps its memory (tu_memory_hold). So an access that has begun before the owner closes the memory never
 * meets other memory. Those that begin later are refused: the memory's token lies behind it, and the owner erases it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "rma/transfer.h"

#define NO_SUCH_ACTION (-1)

/* Returns true if the token is at this address of a mapping. There may be nothing: UCX maps as many bytes as the key
 * says of whatever file the owner's descriptor is now, and a load beyond the end of a file is a SIGBUS. So the kernel
 * looks first: rt_sigprocmask reads the mask before it refuses the action. */
bool tu_mapped_has_token(const char *at, const char *token)
{
    return (uintptr_t)at % sizeof(uint64_t) == 0 &&
           (syscall(SYS_rt_sigprocmask, NO_SUCH_ACTION, at, NULL, sizeof(uint64_t)) == 0 || errno != EFAULT) &&
           memcmp(at, token, TU_TOKEN_SIZE) == 0;
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

/* Writes an aligned word by one store. memcpy may write it twice, and overwrite what another peer has stored in
 * between, into a lock that was just released. */
void tu_mapped_store(char *to, const void *data, uint64_t length)
{
    uint64_t eight;
    uint32_t four;
    uint16_t two;

    if (length == 8 && (uintptr_t)to % 8 == 0) {
        memcpy(&eight, data, 8);
        __atomic_store_n((uint64_t *)(void *)to, eight, __ATOMIC_RELEASE);
    } else if (length == 4 && (uintptr_t)to % 4 == 0) {
        memcpy(&four, data, 4);
        __atomic_store_n((uint32_t *)(void *)to, four, __ATOMIC_RELEASE);
    } else if (length == 2 && (uintptr_t)to % 2 == 0) {
        memcpy(&two, data, 2);
        __atomic_store_n((uint16_t *)(void *)to, two, __ATOMIC_RELEASE);
    } else if (length == 1) {
        __atomic_store_n(to, *(const char *)data, __ATOMIC_RELEASE);
    } else {
        __atomic_thread_fence(__ATOMIC_RELEASE);
        memcpy(to, data, length);
        __atomic_thread_fence(__ATOMIC_RELEASE);
    }
}

void tu_mapped_copy(bool put, char *buffer, char *local, uint64_t length)
{
    uint64_t eight;
    uint32_t four;

    if (put) {
        tu_mapped_store(local, buffer, length);
    } else if (length == 8 && (uintptr_t)local % 8 == 0) { /* half of another process's write must not be seen */
        eight = __atomic_load_n((const uint64_t *)(const void *)local, __ATOMIC_ACQUIRE);
        memcpy(buffer, &eight, 8);
    } else if (length == 4 && (uintptr_t)local % 4 == 0) {
        four = __atomic_load_n((const uint32_t *)(const void *)local, __ATOMIC_ACQUIRE);
        memcpy(buffer, &four, 4);
    } else {
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        memcpy(buffer, local, length);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
    }
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
