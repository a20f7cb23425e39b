/* Gets memory of another process of this machine without that process's help: the kernel copies it (process_vm_readv),
 * where it lets this process read that one's memory.
 *
 * The owner may close the memory at any moment, or end, and its pid may become another process's. So the last thing
 * that each call reads is the memory's token, in the owner's table (owner.c). The owner erases it before it lets go of
 * the memory, and no other process has it there but children that the owner has forked: if it was still there, what was
 * read before it was the memory. Otherwise it may be other memory of the owner's, and is overwritten with zeros. Nothing
 * like that is possible for puts (process_vm_writev could be overtaken by the close), which therefore ask the owner.
 */
#define _GNU_SOURCE
#include <string.h>
#include <sys/uio.h>

#include "rma/transfer.h"

#define LONGEST_INTEGER 8      /* bytes: the kernel may copy an integer in two steps */

/* Returns true if a transfer may read the memory directly. `shortest`: of its blocks; its own length without blocks. */
bool tu_direct_takes(const tu_access_path_t *path, tu_transfer_kind_t kind, uint64_t shortest)
{
    return path->pid != 0 && kind == TU_TRANSFER_GET && shortest > LONGEST_INTEGER;
}

/* Reads ranges of the memory, at most TU_MOST_RANGES: with the token, that is below IOV_MAX. Returns false if it could
 * not, or if the memory was closed. */
bool tu_direct_read(const tu_access_path_t *path, const tu_range_t *pieces, size_t count)
{
    struct iovec local[TU_MOST_RANGES + 1], remote[TU_MOST_RANGES + 1];
    char token[TU_TOKEN_SIZE];
    ssize_t expected = TU_TOKEN_SIZE;
    size_t i;

    for (i = 0; i < count; i++) {
        local[i]  = (struct iovec){.iov_base = pieces[i].buffer, .iov_len = pieces[i].length};
        remote[i] = (struct iovec){.iov_base = (void *)(uintptr_t)(path->address + pieces[i].offset),
                                   .iov_len  = pieces[i].length};
        expected += (ssize_t)pieces[i].length;
    }
    local[count]  = (struct iovec){.iov_base = token, .iov_len = sizeof(token)};
    remote[count] = (struct iovec){.iov_base = (void *)(uintptr_t)path->token_address, .iov_len = sizeof(token)};
    if (process_vm_readv(path->pid, local, count + 1, remote, count + 1, 0) == expected &&
        memcmp(token, path->token, sizeof(token)) == 0) {
        return true;
    }
    for (i = 0; i < count; i++) {
        memset(pieces[i].buffer, 0, pieces[i].length);
    }
    return false;
}

/* Returns true if the process `pid` is the memory's owner, and lets us read it. */
bool tu_direct_allowed(const tu_access_path_t *path)
{
    return tu_direct_read(path, NULL, 0);
}
