/* What the files of request chains share: build.c makes them, run.c runs them, post.c posts, expressions.c
 * evaluates, report.c says what became of them. */
#ifndef TRIO_UCX_CHAIN_H
#define TRIO_UCX_CHAIN_H

#include "rma/rma.h"

__extension__ typedef __int128 tu_integer_t;
__extension__ typedef unsigned __int128 tu_natural_t;

/* Who waits for a request. */
typedef struct tu_edge {
    uint32_t request;
    bool strict;               /* its failure is theirs */
} tu_edge_t;

/* A request, and where it stands. */
typedef struct tu_node {
    tu_chain_t *chain;
    uint32_t index;
    uint32_t waits_for;        /* as it is described: how many requests */
    char *result;              /* of `request.size` bytes, or the user's */
    tu_edge_t *edges;
    size_t edge_count;

    /* this run; here, so that a step of it looks at little memory */
    int state;                 /* TU_CHAIN_... */
    int status;
    uint32_t culprit;
    uint32_t waiting;          /* requests that are not over */
    bool dependency_failed;    /* the culprit */
    bool has_result;
    bool happened;             /* it was done before it was to run again */
    uint64_t length;           /* of the result */
    uint64_t place;
    tu_integer_t next_place;
    uint64_t steps;
    uint64_t retries;          /* made */
    uint32_t then;             /* 1 + who is run again behind it; 0: nobody */
    uint64_t not_before;       /* when a delayed one may begin; 0: at once */
    uint32_t target;
    bool continuing;           /* a node of a list was read, and the next one is to be */
    bool arrived;              /* one was, and what is to be done with it depends on what runs again */
    bool stored;               /* a put that has happened at the owner when it completes */
    bool flushing;             /* a put that was written */
    bool flushed;              /* one that is known to have happened */
    tu_list_t completed_link;  /* UCX is done with it, and what follows has not happened yet */
    bool lost;                 /* UCX will not say what became of it before the worker ends */
    uint64_t operand[1];       /* of an atomic */

    tu_chain_request_t request; /* its arrays are the chain's copies */
    char *payload;             /* assembled of parts, when it is not just one of the user's memory */
    size_t payload_size;
    size_t edge_room;
} tu_node_t;

/* Whether chains wait for a place among the atomics of an endpoint. */
typedef enum tu_places {
    TU_PLACES_NOBODY_WAITS,
    TU_PLACES_AWAITED,
    TU_PLACES_FREE,            /* one has become free since, for which somebody may wait */
} tu_places_t;

/* Where requests go: an endpoint, or memory that it reaches. */
typedef struct tu_target {
    tu_chain_t *chain;
    tu_endpoint_t *endpoint;   /* NULL once that was closed */
    ucp_rkey_h rkey;
    uint64_t address;
    uint64_t length;
    tu_way_t way;              /* to the memory, unless UCX's puts and gets are used */
    unsigned atomics;          /* so many of its endpoint's may be under way */
    bool written;              /* by puts that no flush has followed */
    bool flushing;
    bool lost;
    ucs_status_t status;       /* of the flush at the end */
} tu_target_t;

struct tu_chain {
    tu_worker_t *worker;
    tu_list_t link;            /* in the worker's lists: of all chains, ... */
    tu_list_t running_link;    /* ... of those that run, ... */
    tu_list_t queue_link;      /* ... and of those that may go on */
    bool freed;                /* to be destroyed as soon as UCX is done with it */

    tu_node_t **nodes;
    uint64_t *atomics;         /* bits: which of them are */
    uint32_t count, room;
    tu_target_t **targets;
    uint32_t target_count;
    size_t memory;

    /* this run */
    bool running;
    bool advancing;
    tu_operation_t *operation; /* Python's; NULL in the call that begins the run */
    tu_list_t completed;       /* nodes that UCX is done with */
    uint64_t *ready;           /* bits: what may begin */
    uint32_t cursor;           /* behind the request that was begun last: the search goes on there */
    uint32_t unfinished;
    uint32_t errors;           /* requests that failed, or were cancelled */
    uint32_t in_flight;        /* requests and flushes that UCX has */
    uint32_t lost;             /* more, of which UCX may never say anything */
    uint64_t wake_at;          /* when a delayed request may begin; 0: none waits */
    bool blocked;              /* one waits for a place among an endpoint's atomics */
    bool cancelled;
};

/* A worker's request chains. */
struct tu_chains {
    tu_extension_t extension;
    tu_hook_t hook;            /* lets chains go on; added while one runs */
    tu_worker_t *worker;
    tu_list_t all;
    tu_list_t running;
    tu_list_t queue;           /* those that may go on, first come, first served */
    uint64_t now;              /* lately */
    unsigned calls;
    uint64_t wake;             /* when a delayed request may begin; 0: none waits */
    int timer;                 /* fires then */
    tu_places_t places;        /* among the atomics of an endpoint */
};

/* Why something could not be evaluated. */
typedef struct tu_reason {
    int state;
    uint32_t culprit;
} tu_reason_t;

static inline bool tu_state_is_error(int state)
{
    return state > TU_CHAIN_SKIPPED;
}

/* Sets the state of a request, and counts failed ones. */
static inline void tu_node_set_state(tu_node_t *node, int state)
{
    node->chain->errors += (uint32_t)tu_state_is_error(state) - (uint32_t)tu_state_is_error(node->state);
    node->state = state;
}

/* run.c: what becomes of a request. Completed: UCX is done with it; ready: it may begin; false: its condition was;
 * conclude: it is over, with a state. */
void tu_node_completed(tu_node_t *node, ucs_status_t status);
void tu_node_ready(tu_node_t *node);
uint32_t tu_node_wait(tu_node_t *node);
void tu_node_false(tu_node_t *node);
void tu_node_conclude(tu_node_t *node, int state);
void tu_node_conclude_for(tu_node_t *node, const tu_reason_t *reason);
void tu_node_fail(tu_node_t *node, ucs_status_t status);
void tu_chain_lost_less(tu_chain_t *chain);
void tu_chain_destroy(tu_chain_t *chain);
/* Prepares a worker for request chains. */
ucs_status_t tu_chains_open(tu_worker_t *worker);

/* post.c: begins what is ready, goes on with what has completed. */
void tu_node_begin(tu_node_t *node);
void tu_node_go_on(tu_node_t *node);
bool tu_node_has_no_place(const tu_node_t *node);
bool tu_chain_has_no_place(const tu_chain_t *chain);
bool tu_node_is_written(const tu_node_t *node);
bool tu_node_has_data(const tu_node_t *node);

/* expressions.c */
const char *tu_chain_result(const tu_chain_t *chain, uint32_t request, uint64_t offset, uint64_t length,
                            tu_reason_t *reason);
bool tu_terms_evaluate(const tu_chain_t *chain, const tu_terms_t *terms, tu_integer_t *out, tu_reason_t *reason);
bool tu_terms_valid(const tu_terms_t *terms, uint32_t requests);
void tu_integer_store(void *to, tu_integer_t value, size_t width, bool big);
uint32_t tu_crc32c(const void *data, size_t length);

#endif
