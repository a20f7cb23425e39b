/* Requests for several ranges of the memory at once: blocks that are small compared with a message. */
#include <string.h>

#include "rma/transfer.h"

/* Describes the runs of a part as its request says them. Returns false if there is no memory. */
bool tu_gathered_prepare(tu_transfer_t *part)
{
    const tu_run_t *runs = tu_runs_of(part);
    size_t i, count      = part->run_count;

    part->ranges = tu_calloc(count, sizeof(*part->ranges));
    part->iov    = part->kind == TU_TRANSFER_PUT ? tu_calloc(count + 1, sizeof(*part->iov)) : NULL;
    if (part->ranges == NULL || (part->kind == TU_TRANSFER_PUT && part->iov == NULL)) {
        return false;
    }
    for (i = 0; i < count; i++) {
        part->ranges[i].offset = tu_le64_from(runs[i].offset);
        part->ranges[i].length = tu_le64_from(runs[i].length);
        if (part->iov != NULL) {
            part->iov[i + 1] = (ucp_dt_iov_t){.buffer = runs[i].buffer, .length = runs[i].length};
        }
    }
    if (part->iov != NULL) {
        part->iov[0] = (ucp_dt_iov_t){.buffer = part->ranges, .length = count * sizeof(*part->ranges)};
    }
    return true;
}

/* Copies the data of an answer to where it belongs. */
void tu_gathered_scatter(const tu_run_t *runs, size_t count, const char *data)
{
    size_t i;

    for (i = 0; i < count; i++) {
        memcpy(runs[i].buffer, data, runs[i].length);
        data += runs[i].length;
    }
}

/* Whether a peer's ranges are in memory of `limit` bytes, and of `length` bytes in all. */
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
