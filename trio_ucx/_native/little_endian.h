/* Integers as they go over the wire: little-endian, whatever the host's order is (wire.md).
 *
 * The types are structures, so that the compiler refuses one that was not converted. On a little-endian host converting
 * costs nothing.
 */
#ifndef TRIO_UCX_LITTLE_ENDIAN_H
#define TRIO_UCX_LITTLE_ENDIAN_H

#include <endian.h>
#include <stdint.h>
#include <string.h>

typedef struct tu_le64 {
    uint64_t wire;
} tu_le64_t;

static inline tu_le64_t tu_le64_from(uint64_t number)
{
    return (tu_le64_t){htole64(number)};
}

static inline uint64_t tu_le64_to(tu_le64_t number)
{
    return le64toh(number.wire);
}

static inline uint16_t tu_le16_load(const char *from)
{
    uint16_t wire;

    memcpy(&wire, from, sizeof(wire));
    return le16toh(wire);
}

static inline uint32_t tu_le32_load(const char *from)
{
    uint32_t wire;

    memcpy(&wire, from, sizeof(wire));
    return le32toh(wire);
}

static inline void tu_le16_store(char *to, uint16_t number)
{
    uint16_t wire = htole16(number);

    memcpy(to, &wire, sizeof(wire));
}

static inline void tu_le32_store(char *to, uint32_t number)
{
    uint32_t wire = htole32(number);

    memcpy(to, &wire, sizeof(wire));
}

static inline void tu_le64_store(char *to, uint64_t number)
{
    uint64_t wire = htole64(number);

    memcpy(to, &wire, sizeof(wire));
}

static inline uint64_t tu_le64_load(const char *from)
{
    uint64_t wire;

    memcpy(&wire, from, sizeof(wire));
    return le64toh(wire);
}

#endif
