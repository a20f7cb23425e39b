/* BLAKE2s with a key and a result of 32 bytes (RFC 7693): the codes of the key gate. It is here because UCX's thread,
 * in which connections are accepted, runs no Python. Python's name for it: hashlib.blake2s(data, key=key). */
#include <string.h>

#include "little_endian.h"
#include "native.h"

#define BLOCK 64
#define WORDS 8
#define ROUNDS 10

static const uint32_t initial[WORDS] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

/* The order in which each round takes the words of a block. */
static const unsigned char order[ROUNDS][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static uint32_t rotate(uint32_t word, unsigned bits)
{
    return word >> bits | word << (32 - bits);
}

static void mix(uint32_t *v, unsigned a, unsigned b, unsigned c, unsigned d, uint32_t x, uint32_t y)
{
    v[a] += v[b] + x;
    v[d] = rotate(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = rotate(v[b] ^ v[c], 12);
    v[a] += v[b] + y;
    v[d] = rotate(v[d] ^ v[a], 8);
    v[c] += v[d];
    v[b] = rotate(v[b] ^ v[c], 7);
}

/* Adds a block to the state; `count` is the number of bytes up to its end. */
static void compress(uint32_t *state, const char *block, uint64_t count, bool last)
{
    uint32_t v[2 * WORDS], m[16];

    for (unsigned i = 0; i < 16; i++) {
        m[i] = tu_le32_load(block + 4 * i);
    }
    memcpy(v, state, WORDS * sizeof(*v));
    memcpy(v + WORDS, initial, sizeof(initial));
    v[12] ^= (uint32_t)count;
    v[13] ^= (uint32_t)(count >> 32);
    v[14] ^= last ? UINT32_MAX : 0;
    for (unsigned round = 0; round < ROUNDS; round++) {
        const unsigned char *s = order[round];

        for (unsigned i = 0; i < 4; i++) { /* columns */
            mix(v, i, i + 4, i + 8, i + 12, m[s[2 * i]], m[s[2 * i + 1]]);
        }
        for (unsigned i = 0; i < 4; i++) { /* diagonals */
            mix(v, i, (i + 1) % 4 + 4, (i + 2) % 4 + 8, (i + 3) % 4 + 12, m[s[2 * i + 8]], m[s[2 * i + 9]]);
        }
    }
    for (unsigned i = 0; i < WORDS; i++) {
        state[i] ^= v[i] ^ v[i + WORDS];
    }
    explicit_bzero(v, sizeof(v));
    explicit_bzero(m, sizeof(m));
}

/* Writes the code of the data with a key of TU_KEY bytes: TU_KEY bytes, too. */
void tu_blake2s(const char *key, const char *data, size_t size, char *out)
{
    uint32_t state[WORDS];
    char block[BLOCK] = {0};
    uint64_t count    = BLOCK;

    memcpy(state, initial, sizeof(state));
    state[0] ^= 0x01010000 ^ TU_KEY << 8 ^ TU_KEY; /* parameters: no tree; the sizes of key and result */
    memcpy(block, key, TU_KEY);
    while (size > 0) { /* `block` has been filled, and more follows */
        size_t part = size < BLOCK ? size : BLOCK;

        compress(state, block, count, false);
        memset(block, 0, sizeof(block));
        memcpy(block, data, part);
        data  += part;
        size  -= part;
        count += part;
    }
    compress(state, block, count, true);
    explicit_bzero(block, sizeof(block));
    for (unsigned i = 0; i < WORDS; i++) {
        tu_le32_store(out + 4 * i, state[i]);
    }
}
