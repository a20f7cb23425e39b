/* What Python may call of the links: the messages of Connections.
 *
 * A message stays in its tag queue until a task takes it. A task that has to wait gets a token, and is woken when its
 * token is due; then it takes the message. A task that is cancelled instead loses nothing: its message is in the queue.
 * tests/link_model.py specifies this; native_link.py compares the two.
 *
 * What is returned is a length, a verdict (see the core's cdef.h), a ucs_status_t, or one of these: */
#define TU_LINK_BATCHED 1      /* sent, with the batch: tu_links_flush before the thread sleeps */
#define TU_LINK_WAITS -1001    /* there is no credit: tu_link_wait_send */
#define TU_LINK_EMPTY -1002    /* no message is there: tu_link_wait */
#define TU_LINK_ENDED -1003    /* and none will come, or nothing can be sent any more: Python knows why */
#define TU_LINK_TOO_LONG -1004 /* the message was dropped, and that was reported to its sender: tu_links_length */
#define TU_LINK_BEGIN -1005    /* UCX holds the message: tu_link_begin or tu_link_drop; tu_links_length, _handle */
#define TU_LINK_SAVE -1006     /* the message in the buffer is another receive's: tu_link_save, then try again */

#define TU_LINK_OUT 65536      /* bytes of tu_links_out, the most that one call takes */
/* What tu_links_news tells. */
#define TU_NEWS_DUE 1          /* tu_links_due */
#define TU_NEWS_BROKEN 2       /* tu_links_broken */
#define TU_NEWS_BATCHES 4      /* tu_links_flush before the thread sleeps */
#define TU_NEWS_POSTED 8       /* UCX has something of the links that it has not sent: told once */
#define TU_NEWS_DISCARDED 16   /* tu_links_discarded */
#define TU_STREAM_QUEUE 0x80000001 /* the tag queue of the byte stream; an empty message is its end */

typedef struct tu_links tu_links_t;
typedef struct tu_link tu_link_t;
typedef struct tu_token tu_token_t;
typedef struct tu_item tu_item_t;

/* All links of a worker, whose small messages they take from now on; NULL: of none. NULL: there is no memory. */
tu_links_t *tu_links_create(tu_worker_t *worker);
/* UCX's worker has gone. Every link was detached before. Freed with the last link. */
void tu_links_destroy(tu_links_t *links);
/* The bytes of the message that was taken last, until the next call. */
char *tu_links_out(tu_links_t *links);
/* The same; only here are those of a message that was looked at, or has more than TU_LINK_OUT bytes. What a receive has
 * in its own buffer is in neither. */
const char *tu_links_taken(const tu_links_t *links);
/* What is to be done after calls that may wake somebody, or send. */
int tu_links_news(tu_links_t *links);
/* Where it says whether there is something new to be done since the last tu_links_news. */
const bool *tu_links_has_news(const tu_links_t *links);
/* The length of the message to which TU_LINK_TOO_LONG or _BEGIN was the answer, and UCX's handle of the latter. */
size_t tu_links_length(const tu_links_t *links);
uint64_t tu_links_handle(const tu_links_t *links);
/* UCX's handle of a message that was dropped, which the caller releases; 0: there is none. */
uint64_t tu_links_discarded(tu_links_t *links);
/* Without a worker: it has progressed. (A message that follows is no part of a burst.) */
void tu_links_progressed(tu_links_t *links);
/* True while UCX has frames or batches that it has not sent. */
bool tu_links_sending(const tu_links_t *links);
/* How many batches were sent. */
uint64_t tu_links_batches(const tu_links_t *links);
/* Sends the batches that have begun. */
void tu_links_flush(tu_links_t *links);
/* Takes the tokens that have become due, and returns their number. */
size_t tu_links_due(tu_links_t *links, tu_token_t **out, size_t max);
/* Takes a link that has broken: returns its id and status, or 0. What has arrived can be taken. */
uint64_t tu_links_broken(tu_links_t *links, int *status);

typedef struct tu_link_terms {
    uint64_t id;               /* the tags that this side receives; not 0 */
    uint64_t peer_id;
    uint64_t window;           /* bytes of unread messages that this side holds */
    uint64_t peer_window;
    uint64_t threshold;        /* longer messages stay with their sender; 0: none do */
    uint64_t peer_threshold;
    bool defers;               /* messages may be sent in batches */
} tu_link_terms_t;

/* NULL: there is no memory. */
tu_link_t *tu_link_open(tu_links_t *links, tu_endpoint_t *endpoint, const tu_link_terms_t *terms);
/* Its endpoint goes, or has gone: nothing can be sent any more, and a batch is dropped. */
void tu_link_detach(tu_link_t *link);
/* All waits end. UCX may keep frames and batches that it has not sent. */
void tu_link_close(tu_link_t *link);
/* What would go to UCX goes to this function instead: it copies the data, and returns a verdict. It must call nothing
 * of the links. NULL: no longer. */
typedef int64_t (*tu_outlet_t)(void *context, uint32_t number, const void *data, size_t length);
/* A link that is diverted does not look at the clock. */
void tu_link_divert(tu_link_t *link, tu_outlet_t outlet, void *context);
/* What ends, and stays so: receives where no message is; with `drains` those outside conversations; sends. */
void tu_link_answers(tu_link_t *link, bool receives_end, bool drains, bool sends_end);
/* What ends in one tag queue, and stays so. Returns a ucs_status_t. */
int tu_link_end_queue(tu_link_t *link, uint32_t number, bool receives_end, bool sends_end);
/* A conversation begins: its queue is kept until it is forgotten. Returns a ucs_status_t. */
int tu_link_open_queue(tu_link_t *link, uint32_t number);
/* This side has left a queue: drops what is there, and what will arrive. */
void tu_link_leave_queue(tu_link_t *link, uint32_t number);
/* A conversation is over on both sides. No token waits there. */
void tu_link_forget_queue(tu_link_t *link, uint32_t number);

/* ---- sending ---- */

/* Sends a message. UCX needs its memory only if the verdict says so. */
int64_t tu_link_send(tu_link_t *link, uint32_t number, const void *data, size_t length);
/* A send waits. NULL: there is no memory. When the token is due, tu_link_send_reserved, after which it is over unless
 * the answer is TU_LINK_WAITS; tu_link_leave_send at any time. */
tu_token_t *tu_link_wait_send(tu_link_t *link, uint32_t number, size_t length);
int64_t tu_link_send_reserved(tu_token_t *token, const void *data, size_t length);
void tu_link_leave_send(tu_token_t *token);
/* The same for messages that the caller hands to UCX. 0: it may do so now, before it calls anything else of the link;
 * then the second function, if UCX has taken it. Only that one, or tu_link_leave_send, ends the token. */
int64_t tu_link_may_send(tu_link_t *link, uint32_t number, size_t length);
void tu_link_was_sent(tu_link_t *link, uint32_t number, size_t length);
int64_t tu_token_may_send(tu_token_t *token);
void tu_token_was_sent(tu_token_t *token, size_t length);
/* Sends a control frame, which costs no credit; `later`: with the batch. */
void tu_link_send_frame(tu_link_t *link, const void *frame, size_t length, bool later);
/* Defers no message from now on. */
void tu_link_send_each(tu_link_t *link);
/* The next small message is deferred: something closely follows it. */
void tu_link_expect_more(tu_link_t *link);
int64_t tu_link_flush(tu_link_t *link);

/* ---- receiving ---- */

/* Small messages of one length have arrived, for the link whose id is in their tag. Returns false if Python is to have them,
 * and then to call tu_link_arrived if they are a link's: control frames of Python's, what breaks the protocol, the end of
 * the byte stream, the first messages of a conversation, and all messages of a link that refers them to Python. */
bool tu_links_take(tu_links_t *links, uint64_t tag, size_t length, size_t count, const char *data);
/* Python wants to hear of each message that arrives, or no longer. */
void tu_link_refer(tu_link_t *link, bool refers);
/* Small messages of one length have arrived. Returns 0; 1 if they are a control frame that is Python's; or a status:
 * UCS_ERR_INVALID_PARAM, they break the protocol; _NO_MEMORY, the link has broken; _CANCELED, they were dropped. */
int tu_link_arrived(tu_link_t *link, uint32_t number, size_t length, size_t count, const char *data);
/* Takes the first message that no token is to have, or what is there of the byte stream, and returns the length. Its
 * bytes are in tu_links_taken. `look`: it stays. */
int64_t tu_link_receive(tu_link_t *link, uint32_t number, size_t limit, bool look);
/* A receive waits in some tag queues, and takes from the first of them that has a message for it. Only one may wait in
 * the byte stream. NULL: there is no memory. */
tu_token_t *tu_link_wait(tu_link_t *link, const uint32_t *numbers, size_t count);
/* Takes the message of a token, as tu_link_receive does. The token is over then, unless the message stays or the answer
 * is TU_LINK_EMPTY, _BEGIN or _SAVE. If the message has arrived in the receive's buffer, it is there. */
int64_t tu_link_take(tu_token_t *token, size_t limit, bool look, uint32_t *number);
/* What has arrived in its buffer must have been saved. */
void tu_link_leave(tu_token_t *token);
/* Where it says whether the token is due, as long as there is the token: it has become so since the last tu_link_take. */
const bool *tu_token_is_due(const tu_token_t *token);
/* From now on a message takes the place of those before it that no token is to have. */
int tu_link_newest(tu_link_t *link, uint32_t number);

/* ---- large messages: UCX holds them until their receive begins a transfer to its own buffer ---- */

/* One has arrived. Returns 0, or a status: the handle is the caller's then. `whole`: UCX is known to have all of it. */
int tu_link_announced(tu_link_t *link, uint32_t number, uint64_t handle, size_t length, bool whole);
/* The same, and it is to be received to memory of ours at once, so that no receive has to wait for that: `data`. `item`
 * NULL: there is no memory, and it has only been announced. */
int tu_link_fetch(tu_link_t *link, uint32_t number, uint64_t handle, size_t length, bool whole, tu_item_t **item,
                  char **data);
/* UCX has not begun that, for lack of memory: it holds the message still. */
void tu_link_leave_there(tu_item_t *item);
/* After TU_LINK_BEGIN: the transfer has begun. */
tu_item_t *tu_link_begin(tu_token_t *token, uint32_t number);
/* After TU_LINK_BEGIN: the message does not suit the receive, and is dropped. The token is over. */
void tu_link_drop(tu_token_t *token, uint32_t number);
/* A transfer has ended well. Returns true if the message is to be saved, because its receive has left. Until this or
 * tu_link_failed the buffer is UCX's, even if the queue has ended meanwhile: its receive gets TU_LINK_EMPTY. One of
 * them is called for each transfer, even if the link was closed before. */
bool tu_link_moved(tu_link_t *link, tu_item_t *item);
/* Nobody will get a message whose transfer goes on: the rest of it need not arrive. */
bool tu_item_is_dropped(const tu_item_t *item);
/* A transfer has failed: its tag queue ends at this message. */
void tu_link_failed(tu_link_t *link, tu_item_t *item);
/* The peer is lost: each tag queue ends at the first message that has not arrived whole. */
void tu_link_lose(tu_link_t *link);
/* The peer closes: drops the messages that are still with it, because their sends were cancelled. */
void tu_link_forget_with_sender(tu_link_t *link);
/* A message that has arrived in a receive's buffer is copied to memory of ours. NULL: it cannot be read there. */
void tu_link_save(tu_link_t *link, tu_item_t *item, const void *data);
/* The message in a receive's buffer; NULL: there is none, or it has not arrived. */
tu_item_t *tu_token_holds(tu_token_t *token);

/* ---- what is there ---- */

typedef struct tu_link_counts {
    int64_t credit;
    int64_t unread;
    int64_t outstanding;       /* what has arrived costs, less what was granted */
    uint64_t sent, bytes_sent, received, bytes_received;
    uint64_t grants, grants_sent;
    size_t queues, tokens;
    size_t kept;               /* frames and batches that UCX has */
    size_t line;               /* tag queues that wait for credit */
    bool stalled;              /* the peer has something to send, and no credit */
} tu_link_counts_t;

typedef struct tu_queue_counts {
    uint32_t number;
    size_t messages, bytes;    /* that nobody has taken */
    size_t with_sender;        /* messages of these that may be with their sender */
    size_t waiting;            /* receives */
} tu_queue_counts_t;

void tu_link_count(const tu_link_t *link, tu_link_counts_t *out);
/* Writes what is known of `max` tag queues at most, in no order, and returns the number of all. */
size_t tu_link_list(const tu_link_t *link, tu_queue_counts_t *out, size_t max);
/* False: there is no such tag queue. */
bool tu_link_count_queue(const tu_link_t *link, uint32_t number, tu_queue_counts_t *out);
/* The first tag queue of a user's after `after`, or else the first of all, with a message that no token is to have.
 * TU_LINK_EMPTY: there is none. */
int64_t tu_link_next_filled(const tu_link_t *link, int64_t after);
