/* Keeps other users out of UCX's System V shared memory.
 *
 * UCX makes the segments of its workers with mode 0660 (mm_sysv.c): another user of the same primary group could read
 * messages there, and write into them. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/shm.h>

#include "native.h"

#define GROUP_AND_OTHERS 077

static int private_shmget(key_t key, size_t size, int flags)
{
    return shmget(key, size, flags & ~GROUP_AND_OTHERS);
}

static bool are_private;

static void replace_once(void)
{
    const void *libucs = (const void *)(uintptr_t)ucs_status_string;

    are_private = tu_replace_import(libucs, "shmget", (const void *)(uintptr_t)private_shmget);
}

/* Lets no other user open the segments that UCX makes from now on. Returns false if libucs does not
 * import shmget(). */
bool tu_keep_segments_private(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, replace_once);
    return are_private;
}
