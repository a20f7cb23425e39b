/* Evaluates expressions: conditions and arguments that are computed from results of requests. */
#include <endian.h>
#include <string.h>

#include "chain/chain.h"

/* The commonest ones: unsigned, of 8 or 4 bytes, least significant first. Whether it is one. */
static bool load_plain(const char *from, size_t width, tu_integer_t *out)
{
    uint64_t wide;
    uint32_t half;

    if (width == sizeof(wide)) {
        memcpy(&wide, from, sizeof(wide));
        *out = (tu_integer_t)le64toh(wide);
        return true;
    }
    if (width == sizeof(half)) {
        memcpy(&half, from, sizeof(half));
        *out = (tu_integer_t)le32toh(half);
        return true;
    }
    return false;
}

/* Reads an integer of 1 to 16 bytes. */
static tu_integer_t load(const char *from, size_t width, int flags)
{
    unsigned char bytes[16];
    tu_integer_t value;
    size_t i;
    bool negative;

    if (flags == 0 && load_plain(from, width, &value)) {
        return value;
    }
    for (i = 0; i < width; i++) {
        bytes[i] = (unsigned char)from[flags & TU_LOAD_BIG ? width - 1 - i : i];
    }
    negative = (flags & TU_LOAD_SIGNED) && (bytes[width - 1] & 0x80);
    memset(bytes + width, negative ? 0xff : 0, sizeof(bytes) - width);
    for (value = 0, i = sizeof(bytes); i-- > 0;) {
        value = (tu_integer_t)((tu_natural_t)value << 8 | bytes[i]);
    }
    return value;
}

void tu_integer_store(void *to, tu_integer_t value, size_t width, bool big)
{
    char *bytes = to;
    size_t i;

    for (i = 0; i < width; i++) {
        bytes[big ? width - 1 - i : i] = (char)((tu_natural_t)value >> 8 * i);
    }
}

/* A comparison, or arithmetic; all wraps around at 128 bits. */
static tu_integer_t combine(int code, tu_integer_t left, tu_integer_t right)
{
    tu_natural_t a = (tu_natural_t)left;
    tu_natural_t b = (tu_natural_t)right;

    switch (code) {
    case TU_TERM_ADD:
        return (tu_integer_t)(a + b);
    case TU_TERM_SUBTRACT:
        return (tu_integer_t)(a - b);
    case TU_TERM_MULTIPLY:
        return (tu_integer_t)(a * b);
    case TU_TERM_AND:
        return left & right;
    case TU_TERM_OR:
        return left | right;
    case TU_TERM_XOR:
        return left ^ right;
    case TU_TERM_LEFT:
        return b < 128 ? (tu_integer_t)(a << (int)b) : 0;
    case TU_TERM_RIGHT:
        return left >> (b < 128 ? (int)b : 127);
    case TU_TERM_RIGHT_UNSIGNED:
        return b < 128 ? (tu_integer_t)(a >> (int)b) : 0;
    case TU_TERM_EQUAL:
        return left == right;
    case TU_TERM_NOT_EQUAL:
        return left != right;
    case TU_TERM_LESS:
        return left < right;
    case TU_TERM_LESS_EQUAL:
        return left <= right;
    case TU_TERM_LESS_UNSIGNED:
        return a < b;
    default: /* TU_TERM_LESS_EQUAL_UNSIGNED */
        return a <= b;
    }
}

/* Where a part of a result is; NULL, with the reason, when it is not there. */
const char *tu_chain_result(const tu_chain_t *chain, uint32_t request, uint64_t offset, uint64_t length,
                            tu_reason_t *reason)
{
    const tu_node_t *node = chain->nodes[request];

    if (!node->has_result) {
        reason->state = TU_CHAIN_NOT_EVALUATED;
    } else if (offset > node->length || length > node->length - offset) {
        reason->state = TU_CHAIN_NO_RESULT;
    } else {
        return node->result + offset;
    }
    reason->culprit = request;
    return NULL;
}

/* Evaluates a term that combines no others. Returns whether it could be evaluated; if not, there is a reason. */
static bool evaluate_one(const tu_chain_t *chain, const tu_term_t *term, tu_integer_t *out, tu_reason_t *reason)
{
    const char *from;

    switch (term->code) {
    case TU_TERM_CONSTANT:
        *out = (tu_integer_t)((tu_natural_t)term->high << 64 | term->low);
        return true;
    case TU_TERM_LOCAL:
        *out = load((const char *)(uintptr_t)term->low, term->high, (int)term->extra);
        return true;
    case TU_TERM_OFFSET:
        from = tu_chain_result(chain, term->request, 0, 0, reason);
        *out = from != NULL ? (tu_integer_t)chain->nodes[term->request]->offset : 0;
        return from != NULL;
    case TU_TERM_LOAD:
        from = tu_chain_result(chain, term->request, term->low, term->high, reason);
        *out = from != NULL ? load(from, term->high, (int)term->extra) : 0;
        return from != NULL;
    case TU_TERM_CRC32C:
        from = tu_chain_result(chain, term->request, term->low, term->high, reason);
        *out = from != NULL ? (tu_integer_t)tu_crc32c(from, term->high) : 0;
        return from != NULL;
    default: /* TU_TERM_SAME */
        from = tu_chain_result(chain, term->request, term->low, term->extra, reason);
        *out = from != NULL && memcmp(from, (const void *)(uintptr_t)term->high, term->extra) == 0;
        return from != NULL;
    }
}

bool tu_terms_evaluate(const tu_chain_t *chain, const tu_terms_t *terms, tu_integer_t *out, tu_reason_t *reason)
{
    tu_integer_t stack[TU_TERM_DEPTH];
    size_t used = 0, i;

    for (i = 0; i < terms->count; i++) {
        const tu_term_t *term = &terms->terms[i];

        if (term->code < TU_TERM_ADD) {
            if (!evaluate_one(chain, term, &stack[used], reason)) {
                return false;
            }
            used++;
        } else if (term->code == TU_TERM_NOT) {
            stack[used - 1] = !stack[used - 1];
        } else {
            used--;
            stack[used - 1] = combine(term->code, stack[used - 1], stack[used]);
        }
    }
    *out = stack[0];
    return true;
}

/* Whether it can be evaluated: codes that exist, names of requests, and never too few or too many values. */
bool tu_terms_valid(const tu_terms_t *terms, uint32_t requests)
{
    size_t used = 0, i;

    for (i = 0; i < terms->count; i++) {
        const tu_term_t *term = &terms->terms[i];

        if (term->code < TU_TERM_CONSTANT || term->code > TU_TERM_NOT) {
            return false;
        }
        if (term->code < TU_TERM_ADD) {
            if (term->code != TU_TERM_CONSTANT && term->code != TU_TERM_LOCAL && term->request >= requests) {
                return false;
            }
            if ((term->code == TU_TERM_LOAD || term->code == TU_TERM_LOCAL) && (term->high < 1 || term->high > 16)) {
                return false;
            }
            used++;
        } else if (term->code != TU_TERM_NOT) {
            if (used < 2) {
                return false;
            }
            used--;
        }
        if (used < 1 || used > TU_TERM_DEPTH) {
            return false;
        }
    }
    return terms->count == 0 || used == 1;
}
