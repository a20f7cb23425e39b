/* CRC-32C (Castagnoli), as in iSCSI and ext4: by the processor's instruction where there is one. */
#include <string.h>

#include "chain/chain.h"

/* The checksum of a byte is the sum (exclusive or) of those of its bits. */
#define ENTRY(byte)                                                                                                \
    (((byte) & 1 ? 0xf26b8303u : 0) ^ ((byte) & 2 ? 0xe13b70f7u : 0) ^ ((byte) & 4 ? 0xc79a971fu : 0) ^            \
     ((byte) & 8 ? 0x8ad958cfu : 0) ^ ((byte) & 16 ? 0x105ec76fu : 0) ^ ((byte) & 32 ? 0x20bd8edeu : 0) ^          \
     ((byte) & 64 ? 0x417b1dbcu : 0) ^ ((byte) & 128 ? 0x82f63b78u : 0))
#define ENTRIES_4(byte) ENTRY(byte), ENTRY((byte) + 1), ENTRY((byte) + 2), ENTRY((byte) + 3)
#define ENTRIES_16(byte) ENTRIES_4(byte), ENTRIES_4((byte) + 4), ENTRIES_4((byte) + 8), ENTRIES_4((byte) + 12)
#define ENTRIES_64(byte) ENTRIES_16(byte), ENTRIES_16((byte) + 16), ENTRIES_16((byte) + 32), ENTRIES_16((byte) + 48)

static uint32_t bytewise(uint32_t crc, const unsigned char *data, size_t length)
{
    static const uint32_t table[] = {ENTRIES_64(0), ENTRIES_64(64), ENTRIES_64(128), ENTRIES_64(192)};

    while (length-- > 0) {
        crc = crc >> 8 ^ table[(crc ^ *data++) & 0xff];
    }
    return crc;
}

#if defined(__x86_64__)
#include <cpuid.h>

#ifdef __clang__ /* for GCC, the instruction belongs to SSE 4.2; for Clang, it is a feature of its own */
#define TARGET "sse4.2,crc32"
#else
#define TARGET "sse4.2"
#endif

__attribute__((target(TARGET))) static uint32_t by_instruction(uint32_t crc, const unsigned char *data,
                                                                 size_t length)
{
    uint64_t eight, wide = crc;

    for (; length >= 8; length -= 8, data += 8) {
        memcpy(&eight, data, 8);
        wide = __builtin_ia32_crc32di(wide, eight);
    }
    crc = (uint32_t)wide;
    while (length-- > 0) {
        crc = __builtin_ia32_crc32qi(crc, *data++);
    }
    return crc;
}

/* Not by __builtin_cpu_supports: zig links its run-time library for that, with another __stack_chk_fail than glibc's. */
static int has_instruction(void)
{
    static int known; /* 1: no, 2: yes; other threads that find it out at the same time write the same */
    int found = __atomic_load_n(&known, __ATOMIC_RELAXED);
    unsigned a, b, c, d;

    if (found == 0) {
        found = 1 + (__get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_SSE4_2) != 0);
        __atomic_store_n(&known, found, __ATOMIC_RELAXED);
    }
    return found == 2;
}

uint32_t tu_crc32c(const void *data, size_t length)
{
    return ~(has_instruction() ? by_instruction(~0u, data, length) : bytewise(~0u, data, length));
}
#else
uint32_t tu_crc32c(const void *data, size_t length)
{
    return ~bytewise(~0u, data, length);
}
#endif
