/* What the files of links share.
 *
 * Ownership of memory
 *
 *   memory                      allocated by            freed by                       UCX may use it
 *   --------------------------  ----------------------  -----------------------------  --------------------------------
 *   tu_links_t                  tu_links_create         tu_links_destroy, or after     no
 *                                                       that with the last link
 *   tu_link_t, its queues       tu_link_open; queues    tu_link_close, or after that   no
 *                               when they are used      with the last token; queues
 *                                                       when they are idle, too
 *   tu_item_t                   tu_link_arrived,        when it is taken or dropped;   no
 *                               tu_link_announced       by tu_links_discarded, if it
 *                                                       was HELD; by tu_link_moved or
 *                                                       _failed, if it was MOVING
 *   item->data, unless it is    tu_link_save,           with its item; of a long one   until tu_link_moved or _failed,
 *   item->here                  tu_link_fetch           that was taken, when another   if it was fetched
 *                                                       is taken (links->taken)
 *   tu_token_t                  tu_link_wait,           when its task has got its      no
 *                               tu_link_wait_send       message or its end, or leaves
 *   tu_outgoing_t               tu_link_send_frame; a   when UCX is done with it. One  until its callback
 *                               batch by tu_link_send   batch is kept (links->spare)
 */
#ifndef TRIO_UCX_LINK_H
#define TRIO_UCX_LINK_H

#include "../native.h"
#include "cdef.h"

/* Tag queues that are not used are kept while there are no more than this. */
#ifndef TU_IDLE_QUEUES
#define TU_IDLE_QUEUES 64
#endif
/* The most tag queues whose next message one side may have admitted. */
#ifndef TU_MOST_ADMISSIONS
#define TU_MOST_ADMISSIONS 65536
#endif

/* Transfers of one queue that may go on at once, and how many bytes are too many before one that begins. Each keeps a
 * buffer in use, and to write to many large ones at once takes longer. */
#define TU_TRANSFERS_AHEAD 8
#ifndef TU_BYTES_AHEAD
#define TU_BYTES_AHEAD (1 << 24)
#endif
#define TU_LONGEST_FRAME 32
/* Control frames: their first byte. */
#define TU_FRAME_GRANT 1
#define TU_FRAME_STALLED 2
#define TU_FRAME_ADMIT 3
#define TU_FRAME_DROPPED 12
/* What a message may cost that goes by itself, when the peer has read everything. */
#define TU_LINK_LONE (68 << 10)
/* What messages cost can be added without an overflow. */
#define TU_LONGEST_MESSAGE ((size_t)1 << 46)
/* A peer that takes nothing may not make this side keep more frames and batches. */
#define TU_MOST_KEPT 65536

typedef struct tu_queue tu_queue_t;

typedef enum tu_item_state {
    TU_ITEM_READY,             /* in memory of ours */
    TU_ITEM_HELD,              /* UCX has it */
    TU_ITEM_MOVING,            /* on its way to the buffer of a receive */
    TU_ITEM_ARRIVED,           /* there */
} tu_item_state_t;

/* A message that nobody has taken. */
struct tu_item {
    struct tu_item *next;
    tu_queue_t *queue;         /* NULL: it was dropped, while it was MOVING */
    tu_token_t *holder;        /* in whose buffer it is, or to which it is on its way; NULL: that one has left */
    uint64_t handle;           /* UCX's, while it is HELD */
    char *data;                /* if READY; NULL: there was no memory. If MOVING, where it goes; NULL: to `holder` */
    size_t length;
    size_t taken;              /* bytes of a piece of the byte stream that were read */
    tu_item_state_t state;
    bool whole;                /* UCX is known to have all of it */
    char here[];               /* where `data` is of a message that was READY from the beginning */
};

/* The place of a token in a tag queue. */
typedef struct tu_place {
    tu_list_t link;            /* in queue->places */
    tu_queue_t *queue;
    tu_token_t *token;
    bool has;                  /* there is a message for it: the place at index n takes message n */
} tu_place_t;

/* A task that waits. */
struct tu_token {
    tu_list_t due;             /* in links->due from when it is due until Python has heard of it */
    bool is_due;
    tu_link_t *link;
    tu_queue_t *queue;         /* of a send; NULL: it receives */
    tu_list_t in_queue;        /* in queue->sends */
    int64_t cost;
    bool reserved;             /* its cost was taken from the credit */
    tu_item_t *held;           /* the message in its buffer, or on its way there */
    size_t count;
    tu_place_t places[];
};

struct tu_queue {
    tu_queue_t *next;          /* in its bucket */
    uint32_t number;           /* which this side reads */
    bool receives_end, sends_end, newest;
    bool at_end;               /* the end of the byte stream was read */
    bool drops;                /* messages that arrive are dropped: one is missing, or this side has left */
    bool open;                 /* a conversation that has begun and is not over */
    bool admitted_by_peer;     /* the next message may be sent whatever the credit */
    bool admitted_by_us;
    size_t count;
    size_t large;              /* those of them that are not READY */
    tu_item_t *first, **last;
    size_t waiting;
    tu_list_t places;          /* tu_place_t, in order */
    tu_place_t *lacks;         /* the first one that has no message; NULL: none */
    tu_list_t awaited;         /* in link->awaited while `lacks` is set */
    tu_list_t sends;           /* tu_token_t, in order. Only the first may be reserved */
    tu_list_t in_line;         /* in link->line while the first one is not */
    uint64_t last_sent;        /* the number of its last message */
};

/* A control frame, or a batch: memory of ours that UCX sends. */
typedef struct tu_outgoing {
    tu_list_t link;            /* in link->kept or links->detached while UCX has it */
    tu_link_t *of;             /* NULL: the link has gone */
    tu_links_t *links;
    bool batch;                /* it has room for TU_LONGEST_BATCH bytes */
    size_t size;
    char data[];
} tu_outgoing_t;

struct tu_links {
    tu_list_t due;             /* tu_token_t */
    tu_list_t broken;          /* tu_link_t.news */
    tu_list_t batches;         /* tu_link_t.in_batches */
    tu_list_t detached;        /* tu_outgoing_t of links that have gone */
    tu_item_t *discarded;      /* that were HELD, and nobody wants */
    tu_outgoing_t *spare;      /* a batch that is not used */
    char *taken;               /* the message that was taken last, if it was too long for `out` */
    const char *at;            /* where the message is that was taken, or looked at */
    bool posted;               /* since the last tu_links_news */
    bool has_news;             /* since the last tu_links_news */
    tu_worker_t *worker;       /* NULL: none, or it is gone */
    tu_link_t **by_id;         /* a hash table */
    size_t id_count;           /* of its buckets: a power of two; 0: none were needed yet */
    uint32_t key;              /* of the tables of queues: a peer does not know which queues share a bucket */
    uint64_t progressed;       /* without a worker */
    uint64_t batches_sent;
    size_t kept;               /* frames and batches that UCX has, of all links */
    size_t count;              /* links that have memory */
    bool destroyed;
    size_t length;             /* what tu_links_length and _handle return */
    uint64_t handle;
    char out[TU_LINK_OUT];
};

struct tu_link {
    tu_links_t *links;
    tu_link_t *next;           /* in its bucket of links->by_id */
    tu_endpoint_t *endpoint;
    bool detached, closed;
    bool refers;               /* Python hears of each message */
    tu_outlet_t outlet;        /* instead of UCX; NULL: UCX */
    void *outlet_context;
    tu_link_terms_t terms;
    ucs_status_t status;       /* why it has broken */
    tu_list_t news;
    bool receives_end, drains, sends_end;
    size_t tokens;
    /* what may be sent */
    int64_t credit;            /* the peer's window, less what was charged, less what is reserved */
    int64_t charged;           /* what was sent costs, less what was granted */
    uint64_t sent, bytes_sent;
    uint64_t arrived_there;    /* how many messages the peer is known to have received */
    uint64_t grants, reported; /* grants that have come, plus 1; and at the last STALLED */
    size_t admissions_of_peer;
    tu_list_t line;            /* tu_queue_t.in_line */
    size_t line_count;
    /* what arrives */
    int64_t outstanding;       /* what has arrived costs, less what was granted */
    int64_t admitted;          /* what came by an admission costs, less all that was granted since */
    int64_t unread;
    uint64_t received, bytes_received, grants_sent;
    size_t admissions;
    bool stalled;              /* the peer has something to send, and no credit */
    bool drops;                /* a message is missing: what arrives is dropped */
    tu_list_t awaited;         /* tu_queue_t.awaited */
    /* the batch */
    tu_outgoing_t *batch;
    tu_list_t in_batches;
    size_t head;               /* of its last group: where its head is, queue, length, number */
    uint32_t group, group_length, group_count;
    uint64_t sent_at;
    uint64_t sent_progressed;  /* how often the worker had progressed then */
    char unreported[TU_LONGEST_FRAME]; /* DROPPED, for which there was no memory; it goes before the next frame */
    size_t unreported_length;  /* 0: there is none */
    tu_list_t kept;            /* tu_outgoing_t */
    size_t kept_count;
    /* the queues */
    tu_queue_t **buckets;
    size_t bucket_count;       /* a power of two; 0: none were needed yet */
    size_t queues;
    uint64_t swept_at;
};

/* Each of these files calls those before it. */

/* ---- queues.c ---- */

tu_queue_t *tu_queue_find(const tu_link_t *link, uint32_t number);
/* Makes a missing one. NULL: there is no memory. */
tu_queue_t *tu_queue_make(tu_link_t *link, uint32_t number);
/* True if a peer may use it. */
bool tu_queue_is_valid(uint32_t number);
/* The other direction of a tag queue: the same, unless it is a conversation's. */
uint32_t tu_queue_other(uint32_t number);
void tu_queue_forget_if_idle(tu_link_t *link, tu_queue_t *queue);
/* Forgets it, which has neither messages nor tokens, and its admissions. */
void tu_queue_forget(tu_link_t *link, tu_queue_t *queue);
/* The peer is known to have received more: forgets those that have become idle. */
void tu_queues_sweep(tu_link_t *link);
void tu_queues_free(tu_link_t *link);
/* Calls `function` for each, which may forget it. */
void tu_queues_each(tu_link_t *link, void (*function)(tu_link_t *link, tu_queue_t *queue));
/* The next one after `queue`, NULL before the first; NULL: that was the last. */
tu_queue_t *tu_queue_next(const tu_link_t *link, const tu_queue_t *queue);

/* ---- worker.c ---- */

/* Registers a link by its id. False: there is no memory. */
bool tu_links_add(tu_links_t *links, tu_link_t *link);
void tu_links_remove(tu_links_t *links, tu_link_t *link);
tu_link_t *tu_links_find(const tu_links_t *links, uint64_t id);
uint64_t tu_links_count_progress(const tu_links_t *links);
/* A token is not due any more, and perhaps nothing else is new. */
void tu_links_forget_news(tu_links_t *links);
void tu_link_broke(tu_link_t *link, ucs_status_t status);
tu_token_t *tu_token_new(tu_link_t *link, size_t places);
/* Adds it to the tokens that are due, unless its task was woken already. */
void tu_token_wake(tu_token_t *token);
/* Frees the link, too, if it is closed and that was the last one. */
void tu_token_free(tu_token_t *token);
/* Frees a link that is closed, when no token is left. */
void tu_link_free_if_over(tu_link_t *link);

/* ---- sending.c ---- */

int64_t tu_link_cost(size_t length, uint64_t threshold);
/* Sends what waits for credit, as far as it goes. */
void tu_sends_wake(tu_link_t *link);
/* The peer has admitted the next message of a tag queue. */
void tu_sends_admitted(tu_link_t *link, tu_queue_t *queue);
void tu_sends_end(tu_link_t *link, tu_queue_t *queue);

/* ---- grants.c ---- */

/* True if a receive ends when no message is there; `queue` may be NULL. */
bool tu_queue_has_ended(const tu_link_t *link, uint32_t number, const tu_queue_t *queue);
/* What was read is granted, if it is enough. */
void tu_grant_if_due(tu_link_t *link);
/* A receive has found a queue empty: if its peer lacks credit, it gets some, and may send the next message. */
void tu_found_empty(tu_link_t *link, tu_queue_t *queue);
/* Tells the sender of a message that was too long. */
void tu_report_dropped(tu_link_t *link, const tu_queue_t *queue, size_t length);
/* Returns 1 if it is Python's. */
int tu_frame_arrived(tu_link_t *link, const char *data, size_t length);

/* ---- messages.c ---- */

tu_place_t *tu_place_after(tu_queue_t *queue, tu_place_t *place);
/* Where its queue has its message; NULL: it has none. */
tu_item_t **tu_place_message(tu_place_t *place);
void tu_place_add(tu_place_t *place);
/* Its message, if it has one, is for the next place. */
void tu_place_remove(tu_place_t *place);
/* Wakes those who may go on. */
void tu_places_serve(tu_queue_t *queue);
/* Messages were dropped: finds out anew which places have one. */
void tu_places_recount(tu_link_t *link, tu_queue_t *queue);

/* Where the queue has, or would have, the first message that no place has. */
tu_item_t **tu_message_behind(tu_queue_t *queue);
/* True if the messages before this one, which is of a place or the first behind them, are at hand. */
bool tu_is_next(tu_queue_t *queue, const tu_item_t *message);
/* UCX is to receive a message to memory of ours, item->data. False: there is none. */
bool tu_item_fetch(tu_item_t *item);
/* True if few enough transfers go on, or may begin, before that of this message. */
bool tu_may_begin(const tu_queue_t *queue, const tu_item_t *item);
/* Takes a message out of its queue, and frees it, unless UCX or a transfer still has it. */
void tu_item_drop(tu_link_t *link, tu_queue_t *queue, tu_item_t **from);
/* Drops a message, and grants what was read if that is due. */
void tu_item_remove(tu_link_t *link, tu_queue_t *queue, tu_item_t **from);

/* Adds a message, with its bytes or with UCX's handle. False: there is no memory, and the link has broken. */
bool tu_message_add(tu_link_t *link, tu_queue_t *queue, const char *data, uint64_t handle, bool whole, size_t length);
/* So many messages have arrived: charges, and returns what one costs. */
int64_t tu_messages_charged(tu_link_t *link, tu_queue_t *queue, size_t length, size_t count);
/* The last message has arrived. */
void tu_message_arrived(tu_link_t *link, tu_queue_t *queue, size_t length);
/* If only the newest is kept, drops the messages but the last that no place has, and grants what was read if due. */
void tu_messages_keep_newest(tu_link_t *link, tu_queue_t *queue);
/* Drops a message that will not arrive, and everything behind it: nothing is delivered behind what is missing. */
void tu_messages_cut(tu_link_t *link, tu_queue_t *queue, const tu_item_t *missing);
void tu_messages_drop(tu_link_t *link, tu_queue_t *queue);
/* Wakes those that will get no message, if that is so. */
void tu_receives_end(tu_link_t *link, tu_queue_t *queue);

/* ---- receiving.c ---- */

tu_place_t *tu_place_in(tu_token_t *token, const tu_queue_t *queue);
/* Its message was taken out of the queue: the token is over. */
void tu_place_used(tu_token_t *token, tu_place_t *place);

#endif
