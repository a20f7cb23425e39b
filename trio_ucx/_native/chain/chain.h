/* What the files of request chains share.
 *
 *   build.c        creates chains, adds requests, frees both
 *   node.c         the state of a request, and what its end means for others
 *   run.c          a run: which request begins, and when the run is over
 *   post.c         begins one request: evaluates its arguments, and posts it to UCX
 *   expressions.c  evaluates expressions over results
 *   report.c       tells Python what became of the requests
 *   crc32c.c       the checksum that expressions offer
 *
 * Ownership of memory:
 *
 *   memory                      allocated by            freed by                       UCX may use it
 *   --------------------------  ----------------------  -----------------------------  --------------------------------
 *   tu_chains_t                 tu_worker_create        tu_worker_destroy              as the argument of callbacks
 *   tu_chain_t, its nodes and   tu_chain_create, _add,  tu_chain_free, or later: when  nodes and targets as the
 *   targets, copies of what     _target                 UCX is done with it; the rest  argument of callbacks; results,
 *   their requests describe                             by tu_worker_destroy           payloads and operands while one
 *                                                                                      is posted
 */
#ifndef TRIO_UCX_CHAIN_H
#define TRIO_UCX_CHAIN_H

#include "rma/rma.h"
#include "chain/cdef.h"

__extension__ typedef __int128 tu_integer_t;
__extension__ typedef unsigned __int128 tu_natural_t;

/* A request that waits for another one. */
typedef struct tu_edge {
    uint32_t request;
    bool strict;               /* it depends on the other one, and fails with it */
} tu_edge_t;

/* A request, and its state. */
typedef struct tu_node {
    tu_chain_t *chain;
    uint32_t index;
    uint32_t waits_for;        /* the number of requests that it waits for in a run */
    char *result;              /* of `request.size` bytes, or the user's */
    tu_edge_t *edges;
    size_t edge_count;

    /* this run; next to the above, so that a step reads little memory */
    int state;                 /* TU_CHAIN_... */
    int status;
    uint32_t culprit;
    uint32_t waiting;          /* the number of requests that it still waits for */
    bool dependency_failed;    /* `culprit` is the one that failed */
    bool has_result;
    bool happened;             /* it succeeded before it was made to run again */
    uint64_t length;           /* of the result */
    uint64_t offset;           /* in the target, that is read or written */
    tu_integer_t next_offset;
    uint64_t steps;
    uint64_t retries;          /* made */
    uint32_t then;             /* 1 + the request that a retry runs after it; 0: none */
    uint64_t not_before;       /* when a delayed one may begin; 0: at once */
    uint32_t target;
    bool continuing;           /* a node of a list was read, and the next one is to be read */
    bool arrived;              /* a node was read, and evaluating it waits for requests that run again */
    bool stored;               /* a put that completes when it has happened at the owner */
    bool flushing;             /* the flush after a put has been posted */
    bool flushed;              /* a put that is known to have happened */
    tu_list_t completed_link;  /* in `completed` of the chain: UCX is done with it, and run.c has not seen it yet */
    bool lost;                 /* its endpoint has gone: nothing waits for UCX to complete it */

    tu_chain_request_t request; /* its arrays are the chain's copies */
    char *payload;             /* assembled from parts; NULL if it is one piece of the user's memory */
    size_t payload_size;
    size_t edge_room;
} tu_node_t;

/* A target of requests: an endpoint, or memory that is reached by it. */
typedef struct tu_target {
    tu_chain_t *chain;
    tu_endpoint_t *endpoint;   /* NULL once that was closed */
    ucp_rkey_h rkey;
    uint64_t address;
    uint64_t length;
    tu_access_path_t path;              /* how to reach the memory without UCX's puts and gets, if that is possible */
    bool written;              /* by puts of UCX's that no flush has followed yet */
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
    uint32_t count, room;
    tu_target_t **targets;
    uint32_t target_count;
    size_t memory;

    /* this run */
    bool running;
    bool advancing;
    tu_operation_t *operation; /* the run, for Python; NULL inside the call that begins it */
    tu_list_t completed;       /* nodes that UCX is done with */
    uint64_t *ready;           /* bits: the nodes that may begin */
    uint32_t cursor;           /* the search for the next node to begin goes on here */
    uint32_t unfinished;
    uint32_t errors;           /* requests that failed, or were cancelled */
    uint32_t in_flight;        /* requests and flushes that UCX has */
    uint32_t lost;             /* requests that UCX still has, whose endpoints have gone: the run does not wait for them */
    bool lost_for_good;        /* UCX may not complete some of these before the worker is destroyed */
    uint64_t wake_at;          /* when a delayed request may begin; 0: none waits */
    bool cancelled;
};

/* A worker's request chains. */
typedef struct tu_chains {
    tu_hook_t hook;            /* lets chains go on; added while one runs */
    tu_worker_t *worker;
    tu_list_t all;
    tu_list_t running;
    tu_list_t queue;           /* those that may go on, first come, first served */
    uint64_t now;              /* lately */
    unsigned calls;
    uint64_t wake;             /* when a delayed request may begin; 0: none waits */
    int timer;                 /* fires then */
} tu_chains_t;

static inline tu_chains_t *tu_chains_of(tu_worker_t *worker)
{
    return worker->extensions[TU_INDEX_chain];
}

/* Why something could not be evaluated. */
typedef struct tu_reason {
    int state;
    uint32_t culprit;
} tu_reason_t;

static inline bool tu_state_is_error(int state)
{
    return state > TU_CHAIN_SKIPPED;
}

/* Sets the state of a request, and counts those that failed. */
static inline void tu_node_set_state(tu_node_t *node, int state)
{
    node->chain->errors += (uint32_t)tu_state_is_error(state) - (uint32_t)tu_state_is_error(node->state);
    node->state = state;
}

/* node.c. Completed: UCX is done with a request. Ready: it may begin. False: its condition was false. Conclude: it is
 * over, with a state. */
void tu_node_completed(tu_node_t *node, ucs_status_t status);
void tu_node_ready(tu_node_t *node);
uint32_t tu_node_wait(tu_node_t *node);
void tu_node_false(tu_node_t *node);
void tu_node_conclude(tu_node_t *node, int state);
void tu_node_conclude_for(tu_node_t *node, const tu_reason_t *reason);
void tu_node_fail(tu_node_t *node, ucs_status_t status);
bool tu_node_is_written(const tu_node_t *node);
bool tu_node_has_data(const tu_node_t *node);
void tu_node_not_ready(tu_node_t *node);
void tu_node_reset(tu_node_t *node);
void tu_chain_enqueue(tu_chain_t *chain);
void tu_chain_dequeue(tu_chain_t *chain);
uint32_t tu_chain_next_ready(const tu_chain_t *chain, uint32_t index);
void tu_chain_lost_less(tu_chain_t *chain);

/* build.c */
void tu_chain_destroy(tu_chain_t *chain);

/* post.c. Begin: the node is ready. Go on: UCX is done with its request, or with the flush after it. */
void tu_node_begin(tu_node_t *node);
void tu_node_go_on(tu_node_t *node);

/* expressions.c */
const char *tu_chain_result(const tu_chain_t *chain, uint32_t request, uint64_t offset, uint64_t length,
                            tu_reason_t *reason);
bool tu_terms_evaluate(const tu_chain_t *chain, const tu_terms_t *terms, tu_integer_t *out, tu_reason_t *reason);
bool tu_terms_valid(const tu_terms_t *terms, uint32_t requests);
void tu_integer_store(void *to, tu_integer_t value, size_t width, bool big);
uint32_t tu_crc32c(const void *data, size_t length);

#endif
