/* Lists of blocks: checks the numbers of blocks, and makes runs of them, each of neighbours on both sides. */
#include "rma/transfer.h"

/* The first index at which a list has a number that is not one of `limit` blocks; `count`: there is none. */
size_t tu_blocks_beyond(const int64_t *blocks, size_t count, uint64_t limit)
{
    size_t i;

    for (i = 0; i < count; i++) {
        if ((uint64_t)blocks[i] >= limit) {
            return i;
        }
    }
    return count;
}

/* The first index at which a list has a number that it had before; `count`: there is none. All are below `limit`.
 * Returns SIZE_MAX if there is no memory. */
size_t tu_blocks_repeated(const int64_t *blocks, size_t count, uint64_t limit)
{
    uint8_t *seen = tu_calloc(limit / 8 + 1, 1);
    size_t i;

    if (seen == NULL) {
        return SIZE_MAX;
    }
    for (i = 0; i < count; i++) {
        uint8_t *bits = &seen[blocks[i] / 8], bit = (uint8_t)(1u << (blocks[i] % 8));

        if ((*bits & bit) != 0) {
            break;
        }
        *bits |= bit;
    }
    free(seen);
    return i;
}

/* The runs of a list of blocks of `size` bytes. NULL: there is no memory. */
tu_run_t *tu_runs_of_blocks(char *buffer, const int64_t *local, uint64_t offset, const int64_t *remote, size_t count,
                            uint64_t size, size_t *run_count)
{
    tu_run_t *runs = tu_calloc(count, sizeof(*runs));
    tu_run_t *run  = runs;
    size_t i;

    if (runs == NULL) {
        return NULL;
    }
    *run = (tu_run_t){
        .buffer = buffer + (uint64_t)local[0] * size,
        .offset = offset + (uint64_t)remote[0] * size,
        .length = size,
    };
    for (i = 1; i < count; i++) {
        if (local[i] == local[i - 1] + 1 && remote[i] == remote[i - 1] + 1) {
            run->length += size;
            continue;
        }
        *++run = (tu_run_t){
            .buffer = buffer + (uint64_t)local[i] * size,
            .offset = offset + (uint64_t)remote[i] * size,
            .length = size,
        };
    }
    *run_count = (size_t)(run - runs) + 1;
    return runs;
}

/* The runs of buffers, of which none is empty, each with its offset in the remote memory. NULL: there is no memory. */
tu_run_t *tu_runs_of_buffers(const tu_buffers_t *buffers, const uint64_t *offsets)
{
    tu_run_t *runs = tu_calloc(buffers->count, sizeof(*runs));
    size_t i;

    for (i = 0; runs != NULL && i < buffers->count; i++) {
        runs[i] = (tu_run_t){
            .buffer = buffers->addresses[i],
            .offset = offsets[i],
            .length = buffers->lengths[i],
        };
    }
    return runs;
}
