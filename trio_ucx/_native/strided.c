/* Strided arrays: a column, a block, every other element, a transposed or reversed array.
 *
 * To UCX this is a generic datatype: it calls functions that pack `length` bytes from position `offset` of the message
 * on, or unpack them there, fragment by fragment, into and out of its own buffers. So there is no copy but the one that
 * UCX's protocols make anyway.
 *
 * An array is kept as blocks of contiguous bytes, and the dimensions along which the blocks lie, innermost first.
 * Neighbouring dimensions that amount to one are one, so a transfer is a short loop over equal steps, whatever the
 * shape. Nothing is remembered between two calls: UCX may ask for any part of the message in any order.
 *
 * UCX passes the address that was posted to start_pack and start_unpack, and the address of the description is posted.
 * So one datatype serves all operations of a worker, and lives as long as it. */
#include <string.h>

#include "native.h"

typedef struct dimension {
    size_t count;
    ptrdiff_t stride;
} dimension_t;

struct tu_strided {
    char *base;
    size_t size;               /* of the array */
    size_t skip;               /* the message begins behind so many bytes of the array */
    size_t length;             /* of the message */
    size_t block;
    size_t dimensions;         /* 0: one block, all of it */
    dimension_t dimension[];
};

/* Where in the array a position of the message is. */
typedef struct cursor {
    char *address;
    size_t index[TU_STRIDED_DIMENSIONS];
} cursor_t;

int tu_strided_create(void *address, size_t item, size_t dimensions, const size_t *shape, const ptrdiff_t *strides,
                      tu_strided_t **out)
{
    tu_strided_t *strided;
    dimension_t *last;
    size_t i;

    if (dimensions > TU_STRIDED_DIMENSIONS) {
        return UCS_ERR_EXCEEDS_LIMIT;
    }
    strided = tu_calloc(1, sizeof(*strided) + dimensions * sizeof(strided->dimension[0]));
    if (strided == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    strided->base = address;
    strided->size = item;
    for (i = 0; i < dimensions; i++) {
        if (__builtin_mul_overflow(strided->size, shape[i], &strided->size)) {
            free(strided);
            return UCS_ERR_EXCEEDS_LIMIT;
        }
    }
    strided->block = strided->size == 0 ? 0 : item;
    for (i = strided->size == 0 ? 0 : dimensions; i-- > 0;) {
        last = strided->dimensions == 0 ? NULL : &strided->dimension[strided->dimensions - 1];
        if (shape[i] == 1) {
            continue;
        } else if (last == NULL && strides[i] == (ptrdiff_t)strided->block) {
            strided->block *= shape[i];
        } else if (last != NULL && strides[i] == last->stride * (ptrdiff_t)last->count) {
            last->count *= shape[i];
        } else {
            strided->dimension[strided->dimensions].count  = shape[i];
            strided->dimension[strided->dimensions].stride = strides[i];
            strided->dimensions++;
        }
    }
    strided->length = strided->size;
    *out            = strided;
    return UCS_OK;
}

tu_strided_t *tu_strided_copy(const tu_strided_t *strided)
{
    size_t size        = sizeof(*strided) + strided->dimensions * sizeof(strided->dimension[0]);
    tu_strided_t *copy = tu_malloc(size);

    return copy == NULL ? NULL : memcpy(copy, strided, size);
}

tu_strided_t *tu_strided_part(const tu_strided_t *strided, size_t offset, size_t length)
{
    tu_strided_t *part = tu_strided_copy(strided);

    if (part != NULL) {
        part->skip   += offset;
        part->length  = length;
    }
    return part;
}

/* ---- between the array and packed bytes ---- */

static void seek(const tu_strided_t *strided, size_t block, cursor_t *cursor)
{
    size_t i;

    cursor->address = strided->base;
    for (i = 0; i < strided->dimensions; i++) {
        cursor->index[i]  = block % strided->dimension[i].count;
        block           /= strided->dimension[i].count;
        cursor->address  += (ptrdiff_t)cursor->index[i] * strided->dimension[i].stride;
    }
}

/* Moves on by some blocks, at most to the end of the innermost dimension. */
static void advance(const tu_strided_t *strided, size_t blocks, cursor_t *cursor)
{
    const dimension_t *dimension = strided->dimension;
    size_t i;

    cursor->index[0] += blocks;
    cursor->address  += (ptrdiff_t)blocks * dimension[0].stride;
    for (i = 0; i + 1 < strided->dimensions && cursor->index[i] == dimension[i].count; i++) {
        cursor->address  += dimension[i + 1].stride - (ptrdiff_t)dimension[i].count * dimension[i].stride;
        cursor->index[i]  = 0;
        cursor->index[i + 1]++;
    }
}

/* Copies `count` blocks; the strides are the distances between them. With a size that the compiler knows, a block is
 * one load and one store. */
static inline void copy_equal(char *to, ptrdiff_t to_stride, const char *from, ptrdiff_t from_stride, size_t size,
                              size_t count)
{
    while (count-- > 0) {
        memcpy(to, from, size);
        to   += to_stride;
        from += from_stride;
    }
}

static void copy_blocks(char *to, ptrdiff_t to_stride, const char *from, ptrdiff_t from_stride, size_t size,
                        size_t count)
{
    switch (size) {
    case 1:
        copy_equal(to, to_stride, from, from_stride, 1, count);
        break;
    case 2:
        copy_equal(to, to_stride, from, from_stride, 2, count);
        break;
    case 4:
        copy_equal(to, to_stride, from, from_stride, 4, count);
        break;
    case 8:
        copy_equal(to, to_stride, from, from_stride, 8, count);
        break;
    case 16:
        copy_equal(to, to_stride, from, from_stride, 16, count);
        break;
    default:
        copy_equal(to, to_stride, from, from_stride, size, count);
    }
}

/* Copies `length` bytes from position `offset` on, out of the array (pack) or into it. */
static void transfer(const tu_strided_t *strided, size_t offset, char *packed, size_t length, bool pack)
{
    size_t block = strided->block;
    size_t start, size, count;
    ptrdiff_t stride;
    cursor_t cursor;

    if (length == 0) {
        return;
    }
    stride = strided->dimensions == 0 ? 0 : strided->dimension[0].stride;
    start = offset % block;
    seek(strided, offset / block, &cursor);
    while (length > 0) {
        if (start > 0 || length < block || strided->dimensions == 0) { /* a part of one block */
            size  = block - start < length ? block - start : length;
            count = 1;
        } else {
            size  = block;
            count = strided->dimension[0].count - cursor.index[0];
            count = length / block < count ? length / block : count;
        }
        if (pack) {
            copy_blocks(packed, (ptrdiff_t)size, cursor.address + start, stride, size, count);
        } else {
            copy_blocks(cursor.address + start, stride, packed, (ptrdiff_t)size, size, count);
        }
        packed += size * count;
        length -= size * count;
        start   = 0;
        if (length > 0) {
            advance(strided, count, &cursor);
        }
    }
}

static size_t within(const tu_strided_t *strided, size_t offset, size_t length)
{
    size_t rest = offset < strided->length ? strided->length - offset : 0;

    return length < rest ? length : rest;
}

size_t tu_strided_pack(const tu_strided_t *strided, size_t offset, void *out, size_t length)
{
    length = within(strided, offset, length);
    transfer(strided, strided->skip + offset, out, length, true);
    return length;
}

size_t tu_strided_unpack(const tu_strided_t *strided, size_t offset, const void *data, size_t length)
{
    length = within(strided, offset, length);
    transfer(strided, strided->skip + offset, (char *)(uintptr_t)data, length, false);
    return length;
}

/* ---- what UCX calls ---- */

static void *start_pack(void *context, const void *buffer, size_t count)
{
    (void)context;
    (void)count;
    return (void *)(uintptr_t)buffer;
}

static void *start_unpack(void *context, void *buffer, size_t count)
{
    (void)context;
    (void)count;
    return buffer;
}

static size_t packed_size(void *state)
{
    return ((const tu_strided_t *)state)->length;
}

static size_t pack(void *state, size_t offset, void *out, size_t length)
{
    return tu_strided_pack(state, offset, out, length);
}

/* UCX compares the lengths before it begins; this is for the one protocol that might not. */
static ucs_status_t unpack(void *state, size_t offset, const void *data, size_t length)
{
    if (within(state, offset, length) < length) {
        return UCS_ERR_MESSAGE_TRUNCATED;
    }
    tu_strided_unpack(state, offset, data, length);
    return UCS_OK;
}

static void finish(void *state)
{
    (void)state;
}

ucs_status_t tu_strided_datatype(ucp_datatype_t *out)
{
    static const ucp_generic_dt_ops_t operations = {
        .start_pack   = start_pack,
        .start_unpack = start_unpack,
        .packed_size  = packed_size,
        .pack         = pack,
        .unpack       = unpack,
        .finish       = finish,
    };

    return ucp_dt_create_generic(&operations, NULL, out);
}
