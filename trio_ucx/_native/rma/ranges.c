/* Lists of blocks: checks their numbers, and makes ranges of them. Neighbours on both sides are one range. */
#include "rma/transfer.h"

/* Returns the first index whose number is negative or not below `limit`; `count`: there is none. */
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

/* Returns the first index whose number is in the list before; `count`: there is none. All numbers are below `limit`.
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

/* Returns the ranges of a list of blocks of `size` bytes; NULL if out of memory. */
tu_range_t *tu_ranges_of_blocks(char *buffer, const int64_t *local, uint64_t offset, const int64_t *remote,
                                size_t count, uint64_t size, size_t *range_count)
{
    tu_range_t *ranges = tu_calloc(count, sizeof(*ranges));
    tu_range_t *range  = ranges;
    size_t i;

    if (ranges == NULL) {
        return NULL;
    }
    *range = (tu_range_t){
        .buffer = buffer + (uint64_t)local[0] * size,
        .offset = offset + (uint64_t)remote[0] * size,
        .length = size,
    };
    for (i = 1; i < count; i++) {
        if (local[i] == local[i - 1] + 1 && remote[i] == remote[i - 1] + 1) {
            range->length += size;
            continue;
        }
        *++range = (tu_range_t){
            .buffer = buffer + (uint64_t)local[i] * size,
            .offset = offset + (uint64_t)remote[i] * size,
            .length = size,
        };
    }
    *range_count = (size_t)(range - ranges) + 1;
    return ranges;
}

/* Returns the ranges of buffers, none of them empty, each with its offset in the remote memory; NULL if out of
 * memory. */
tu_range_t *tu_ranges_of_buffers(const tu_buffers_t *buffers, const uint64_t *offsets)
{
    tu_range_t *ranges = tu_calloc(buffers->count, sizeof(*ranges));
    size_t i;

    for (i = 0; ranges != NULL && i < buffers->count; i++) {
        ranges[i] = (tu_range_t){
            .buffer = buffers->addresses[i],
            .offset = offsets[i],
            .length = buffers->lengths[i],
        };
    }
    return ranges;
}
