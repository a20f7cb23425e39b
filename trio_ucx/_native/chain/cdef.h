/* What Python may call of request chains: see ../cdef.h. */

/* expressions.c: expressions over results, in postfix notation, of integers of 128 bits. Terms name a request by
 * its index. A comparison gives 0 or 1. The operations called "unsigned" are for unsigned integers of 128 bits; the
 * others are signed, which holds every narrower integer. */
#define TU_TERM_CONSTANT 0     /* low, high: its halves */
#define TU_TERM_LOAD 1         /* request, low: offset in its result, high: width in bytes, extra: TU_LOAD_... */
#define TU_TERM_OFFSET 2        /* request: the offset in its region that it read last */
#define TU_TERM_CRC32C 3       /* request, low: offset, high: length */
#define TU_TERM_SAME 4         /* request, low: offset, high: address of a local buffer, extra: length */
#define TU_TERM_LOCAL 5        /* low: address, high and extra: as of a load */
#define TU_TERM_ADD 6
#define TU_TERM_SUBTRACT 7
#define TU_TERM_MULTIPLY 8
#define TU_TERM_AND 9
#define TU_TERM_OR 10
#define TU_TERM_XOR 11
#define TU_TERM_LEFT 12
#define TU_TERM_RIGHT 13
#define TU_TERM_RIGHT_UNSIGNED 14
#define TU_TERM_EQUAL 15
#define TU_TERM_NOT_EQUAL 16
#define TU_TERM_LESS 17
#define TU_TERM_LESS_EQUAL 18
#define TU_TERM_LESS_UNSIGNED 19
#define TU_TERM_LESS_EQUAL_UNSIGNED 20
#define TU_TERM_NOT 21         /* of a condition */
#define TU_TERM_DEPTH 32       /* values on the stack at once */
#define TU_LOAD_SIGNED 1
#define TU_LOAD_BIG 2          /* most significant byte first */

typedef struct tu_term {
    int32_t code;
    uint32_t request;
    uint64_t low;
    uint64_t high;
    uint64_t extra;
} tu_term_t;

typedef struct tu_terms {
    const tu_term_t *terms;
    size_t count;
    uint64_t value;            /* if there are no terms */
} tu_terms_t;

/* build.c */
typedef struct tu_chain tu_chain_t;

#define TU_CHAIN_CHECK 0       /* evaluates its condition, and does nothing else */
#define TU_CHAIN_GET 1
#define TU_CHAIN_PUT 2
#define TU_CHAIN_ATOMIC 3
#define TU_CHAIN_TAG_SEND 4
#define TU_CHAIN_AM_SEND 5
#define TU_CHAIN_FOLLOW 6

/* What a false condition does. */
#define TU_FALSE_ERROR 0
#define TU_FALSE_SKIP 1
#define TU_FALSE_STOP 2

/* What became of a request. */
#define TU_CHAIN_WAITING 0     /* it has not begun */
#define TU_CHAIN_POSTED 1      /* UCX has it, or a flush after it */
#define TU_CHAIN_DONE 2
#define TU_CHAIN_SKIPPED 3     /* the states after this one are errors */
#define TU_CHAIN_FALSE 4
#define TU_CHAIN_NOT_EVALUATED 5
#define TU_CHAIN_OUT_OF_BOUNDS 6
#define TU_CHAIN_NO_RESULT 7   /* it refers to bytes that a result does not have */
#define TU_CHAIN_FAILED 8      /* status says why */
#define TU_CHAIN_CANCELLED 9   /* before it was begun */
/* The length of the result of a request that was skipped: see tu_chain_values. */
#define TU_CHAIN_NO_VALUE 0xFFFFFFFFFFFFFFFF

/* A part of a payload: the user's memory, a piece of a result, or an integer. */
#define TU_PART_MEMORY 0
#define TU_PART_RESULT 1
#define TU_PART_INTEGER 2

typedef struct tu_part {
    int kind;
    uint32_t request;
    void *address;
    uint64_t offset;
    uint64_t length;           /* of an integer: its width, up to 16 */
    bool big;
    tu_terms_t value;
} tu_part_t;

/* A request, as Python describes it; tu_chain_add copies all but the user's memory. */
typedef struct tu_chain_request {
    int kind;
    int atomic;                /* TU_ATOMIC_... */
    size_t size;               /* of the result: the most that a get or a node has; the width of an atomic */
    void *into;                /* where the result of a get goes; NULL: to memory of the chain */
    int memory;                /* the kind of memory of `into`, or of the payload */
    int on_false;
    uint64_t retries;          /* how often a false condition is tried again first */
    uint64_t delay;            /* nanoseconds before each retry */
    uint64_t tag;              /* or the id of an active message */
    bool reply;
    const char *header;
    size_t header_length;
    const uint32_t *targets;   /* one of them is chosen by `choice` */
    size_t targets_count;
    const uint32_t *after;     /* the requests that it depends on: if one fails, it fails, ... */
    size_t after_count;
    const uint32_t *behind;    /* ... and those that it only waits for */
    size_t behind_count;
    const uint32_t *again;     /* the requests that a retry runs again first */
    size_t again_count;
    const tu_part_t *parts;
    size_t part_count;
    tu_terms_t condition;
    tu_terms_t choice;
    tu_terms_t offset;         /* in the target */
    tu_terms_t length;         /* how much is got, or how much of the payload is put or sent */
    tu_terms_t operand;        /* of an atomic */
    tu_terms_t swapped;        /* what a compare-and-swap stores */
    tu_terms_t next;           /* of a node: the offset of the next node ... */
    tu_terms_t until;          /* ... unless this is true */
    bool has_end;
    uint64_t end;              /* the offset that means that there is no next node */
    uint64_t limit;            /* of nodes */
} tu_chain_request_t;

typedef struct tu_chain_report {
    int state;
    int status;
    uint32_t culprit;          /* the request that failed before it, or whose result was too short */
    uint64_t length;           /* of the result */
    uint64_t offset;           /* that was read or written last */
    uint64_t steps;            /* nodes of a list that were read */
    uint64_t retries;
    uint32_t target;           /* the one that was chosen */
    const char *result;        /* NULL: none */
} tu_chain_report_t;

int tu_chain_create(tu_worker_t *worker, tu_chain_t **out);
int tu_chain_target(tu_chain_t *chain, uint64_t address, uint64_t length);
void tu_chain_bind(tu_chain_t *chain, uint32_t target, tu_endpoint_t *endpoint, ucp_rkey_h rkey,
                   const tu_access_path_t *path);
int tu_chain_add(tu_chain_t *chain, const tu_chain_request_t *request);
void tu_chain_timer(tu_worker_t *worker, int fd);
/* run.c */
int64_t tu_chain_run(tu_chain_t *chain);
void tu_chain_forget(tu_chain_t *chain, uint32_t target);
void tu_chain_cancel(tu_chain_t *chain);
void tu_chain_free(tu_chain_t *chain);
/* report.c */
bool tu_chain_busy(const tu_chain_t *chain);
void tu_chain_report(const tu_chain_t *chain, uint32_t request, tu_chain_report_t *out);
uint64_t tu_chain_reports(const tu_chain_t *chain, uint32_t count, tu_chain_report_t *out, char *results,
                          uint32_t *failed);
uint32_t tu_chain_errors(const tu_chain_t *chain);
int64_t tu_chain_values(const tu_chain_t *chain, uint32_t count, uint64_t *lengths, char *results);
void tu_chain_restart(tu_chain_t *chain, int state);
size_t tu_chain_memory(const tu_chain_t *chain);
