/* Requests for several ranges of the memory at once: blocks that are small compared with a message. */
#include <string.h>

#include "rma/transfer.h"

/* Builds the ranges of a part's request and, for a put, its iov. Returns false if there is no memory. */
bool tu_gathered_prepare(tu_transfer_t *part)
{
    const tu_range_t *ranges = tu_ranges_of(part);
    size_t i, count      = part->range_count;

    part->wire_ranges = tu_calloc(count, sizeof(*part->wire_ranges));
    part->iov    = part->kind == TU_TRANSFER_PUT ? tu_calloc(count + 1, sizeof(*part->iov)) : NULL;
    if (part->wire_ranges == NULL || (part->kind == TU_TRANSFER_PUT && part->iov == NULL)) {
        return false;
    }
    for (i = 0; i < count; i++) {
        part->wire_ranges[i].offset = tu_le64_from(ranges[i].offset);
        part->wire_ranges[i].length = tu_le64_from(ranges[i].length);
        if (part->iov != NULL) {
            part->iov[i + 1] = (ucp_dt_iov_t){.buffer = ranges[i].buffer, .length = ranges[i].length};
        }
    }
    if (part->iov != NULL) {
        part->iov[0] = (ucp_dt_iov_t){.buffer = part->wire_ranges, .length = count * sizeof(*part->wire_ranges)};
    }
    return true;
}

/* Copies the data of an answer to where it belongs. */
void tu_gathered_scatter(const tu_range_t *ranges, size_t count, const char *data)
{
    size_t i;

    for (i = 0; i < count; i++) {
        memcpy(ranges[i].buffer, data, ranges[i].length);
        data += ranges[i].length;
    }
}

/* Returns true if a peer's ranges are in memory of `limit` bytes, and of `length` bytes in all. */
bool tu_gathered_check(const tu_remote_range_t *ranges, size_t count, uint64_t limit, uint64_t length)
{
    uint64_t total = 0;
    size_t i;

    for (i = 0; i < count; i++) {
        uint64_t from = tu_le64_to(ranges[i].offset), bytes = tu_le64_to(ranges[i].length);

        if (bytes == 0 || bytes > limit || from > limit - bytes || bytes > length - total) {
            return false;
        }
        total += bytes;
    }
    return total == length;
}
