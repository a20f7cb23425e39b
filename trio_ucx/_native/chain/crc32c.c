/* CRC-32C (Castagnoli), as in iSCSI and ext4: by the processor's instruction where there is one. */
#include <string.h>

#include "chain/chain.h"

#define POLYNOMIAL 0x82f63b78u /* bit-reversed */

static uint32_t bytewise(uint32_t crc, const unsigned char *data, size_t length)
{
    static uint32_t table[256];
    uint32_t entry;
    int byte, bit;

    if (table[1] == 0) { /* other threads that fill it in at the same time write the same */
        for (byte = 255; byte > 0; byte--) {
            for (entry = (uint32_t)byte, bit = 0; bit < 8; bit++) {
                entry = entry & 1 ? entry >> 1 ^ POLYNOMIAL : entry >> 1;
            }
            __atomic_store_n(&table[byte], entry, __ATOMIC_RELEASE);
        }
    }
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
