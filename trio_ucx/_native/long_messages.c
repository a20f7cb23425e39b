/* Long messages of Connections: they go in pieces, each a tag message of its own. So no call to UCX moves much at once,
 * and other messages get between.
 *
 * The sender announces the message, and posts its first pieces. The data of a piece stays with the sender until the
 * receiver asks for it, because pieces are long enough for UCX's rendezvous. So when the first piece is done, the
 * receiver is receiving the message, and the sender posts more pieces as earlier ones end: see pacing.c.
 *
 * To the receiver's Python the announcement is the message: it gets the usual record, and receives or drops what the
 * record names. Until then C keeps UCX's handles of the pieces that have arrived. After that it receives each piece when
 * it arrives. It throws away pieces of messages that were dropped or given up, so the sender is rid of them.
 *
 * Either side gives a message up between two pieces when its Connection or its endpoint ends. */
#include <limits.h>
#include <string.h>

#include "little_endian.h"
#include "native.h"

/* No piece is shorter: UCX would send it at once. */
#define LEAST_PIECE TU_LONGEST_THRESHOLD
/* Pieces that are sent with the announcement; more follow when the first has been received. */
#define FIRST_PIECES 2

/* How an endpoint's long messages share it. */
struct tu_pace {
    tu_endpoint_t *endpoint;
    tu_list_t ready;           /* messages of which another piece may be posted, in turn */
    tu_list_t rest;            /* those of which UCX has all that it may have now */
    tu_hook_t hook;            /* in the worker's list while pieces may be posted */
    unsigned under_way;        /* pieces that UCX works on, without the first ones of each message */
    tu_pacing_t pacing;        /* how many of them there may be, and how long the next ones are */
};

/* A piece that can be received. */
typedef struct arrived {
    ucp_tag_message_h handle;
    size_t length;
} arrived_t;

struct tu_long {
    tu_list_t link;            /* in one of its pace's lists; or, of a worker, in long_received or long_cut */
    tu_worker_t *worker;
    tu_pace_t *pace;           /* of the endpoint that it goes to; NULL once that is closed */
    uint64_t tag;              /* of its pieces */
    size_t length;
    size_t reached;            /* up to here pieces were posted, or have arrived */
    unsigned begun;            /* pieces that UCX works on; the announcement counts as one */
    bool busy;                 /* pieces are being given to UCX: those that end meanwhile change nothing else */
    ucs_status_t status;       /* of the first piece that failed, or why it was given up */
    tu_post_t post;            /* its operation and its whole buffer, once it is sent or received */
    void **described;          /* what UCX reads of the pieces of a list or a strided array; else NULL */
    size_t parts;              /* how many of those there are */
    /* Of a message on its way out: */
    char head[TU_LONG_HEAD];   /* the announcement */
    unsigned posted, sent;     /* pieces that were posted; with which UCX is done */
    uint64_t times[TU_MOST_PIECES + FIRST_PIECES]; /* when piece n was posted: at n modulo the size */
    /* Of a message that nobody receives yet: */
    unsigned held;
    arrived_t arrived[FIRST_PIECES]; /* the first `held` are pieces that have arrived */
};

static tu_long_t *new_message(tu_worker_t *worker)
{
    tu_long_t *message = tu_calloc(1, sizeof(*message));

    if (message != NULL) {
        tu_list_init(&message->link);
        message->worker = worker;
    }
    return message;
}

static void thrown_away(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *user_data)
{
    (void)status;
    (void)info;
    (void)user_data;
    ucp_request_free(request);
}

/* Receives nothing of a message, so that the sender is rid of it. */
void tu_message_throw_away(tu_worker_t *worker, ucp_tag_message_h handle)
{
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_MEMORY_TYPE,
        .cb.recv      = thrown_away,
        .memory_type  = UCS_MEMORY_TYPE_HOST,
    };

    ucp_tag_msg_recv_nbx(worker->worker, NULL, 0, handle, &param);
}

/* Frees a message that UCX does not work on. */
static void dispose(tu_long_t *message)
{
    size_t i;

    for (i = 0; i < message->held; i++) {
        tu_message_throw_away(message->worker, message->arrived[i].handle);
    }
    for (i = 0; message->described != NULL && i < message->parts; i++) {
        free(message->described[i]);
    }
    free(message->described);
    tu_list_remove(&message->link);
    free(message);
}

static void note(tu_long_t *message, ucs_status_t status)
{
    if (message->status == UCS_OK) {
        message->status = status;
    }
}

/* Whether there are more pieces to be posted or received. */
static bool has_more(const tu_long_t *message)
{
    return message->status == UCS_OK && message->reached < message->length;
}

/* Ends the operation if nothing is left to be done. */
static void end_if_over(tu_long_t *message)
{
    if (message->busy || message->begun > 0 || has_more(message)) {
        return;
    }
    if (message->post.operation != NULL) {
        tu_operation_done(message->post.operation, NULL, message->status, message->length, 0);
    }
    dispose(message);
}

/* UCX is done with a piece, or with the announcement. */
static void ended(tu_long_t *message, ucs_status_t status)
{
    message->begun--;
    note(message, status);
}

static void give_up(void *message)
{
    note(message, UCS_ERR_CANCELED);
    end_if_over(message);
}

static void move_to(tu_list_t *list, tu_long_t *message)
{
    tu_list_remove(&message->link);
    tu_list_append(list, &message->link);
}

/* ---- the buffer of a piece ---- */

/* The buffers of a list between two positions. */
static ucp_dt_iov_t *list_part(const tu_post_t *whole, size_t offset, size_t length, size_t *count)
{
    const ucp_dt_iov_t *all = whole->address;
    size_t first            = 0;
    size_t end, last;
    ucp_dt_iov_t *part;

    while (offset >= all[first].length) {
        offset -= all[first++].length;
    }
    end = offset + length;
    for (last = first; end > all[last].length; last++) {
        end -= all[last].length;
    }
    *count = last - first + 1;
    part   = tu_malloc(*count * sizeof(*part));
    if (part == NULL) {
        return NULL;
    }
    memcpy(part, all + first, *count * sizeof(*part));
    part[last - first].length  = end;
    part[0].buffer             = (char *)part[0].buffer + offset;
    part[0].length            -= offset;
    return part;
}

/* Describes the next piece to UCX. */
static ucs_status_t next_part(tu_long_t *message, size_t length, void **address, size_t *count)
{
    const tu_post_t *whole = &message->post;
    void *part;

    if (whole->operation->described == NULL) {
        *address = (char *)whole->address + message->reached;
        *count   = length;
        return UCS_OK;
    }
    if (message->described == NULL) {
        message->described = tu_calloc(message->length / LEAST_PIECE, sizeof(void *));
        if (message->described == NULL) {
            return UCS_ERR_NO_MEMORY;
        }
    }
    if (whole->param.datatype == ucp_dt_make_iov()) {
        part = list_part(whole, message->reached, length, count);
    } else {
        part   = tu_strided_part(whole->address, message->reached, length);
        *count = 1;
    }
    message->described[message->parts++] = part;
    *address                             = part;
    return part == NULL ? UCS_ERR_NO_MEMORY : UCS_OK;
}

/* What UCX answered when it was given a piece. */
static void answered(tu_long_t *message, ucs_status_ptr_t answer)
{
    if (!UCS_PTR_IS_PTR(answer)) { /* else its callback comes, or has come already */
        ended(message, UCS_PTR_RAW_STATUS(answer));
    }
}

/* ---- sending ---- */

static uint64_t *time_of(tu_long_t *message, unsigned piece)
{
    return &message->times[piece % (TU_MOST_PIECES + FIRST_PIECES)];
}

/* UCX is done with a piece. The first ones may have waited for a receive: they say nothing about the path. */
static void piece_over(tu_long_t *message, ucs_status_t status)
{
    tu_pace_t *pace = message->pace;
    unsigned piece  = message->sent++;

    ended(message, status);
    if (pace == NULL) {
        return;
    }
    if (piece >= FIRST_PIECES) {
        pace->under_way--;
        if (status == UCS_OK && message->reached < message->length) {
            tu_pacing_piece_ended(&pace->pacing, tu_now(), *time_of(message, piece), message->worker->others);
        }
    } else if (piece == 0 && message->reached < message->length) {
        move_to(&pace->ready, message);
    }
    tu_hook_add(message->worker, &pace->hook);
}

static void piece_sent(void *request, ucs_status_t status, void *user_data)
{
    tu_long_t *message = user_data;

    ucp_request_free(request);
    piece_over(message, status);
    end_if_over(message);
}

static void post_piece(tu_long_t *message)
{
    ucp_request_param_t param = message->post.param;
    size_t rest               = message->length - message->reached;
    size_t length             = rest < message->pace->pacing.piece + LEAST_PIECE ? rest : message->pace->pacing.piece;
    size_t count;
    void *address;
    ucs_status_ptr_t answer;
    ucs_status_t status = next_part(message, length, &address, &count);

    if (status != UCS_OK) {
        note(message, status);
        return;
    }
    param.cb.send     = piece_sent;
    param.user_data   = message;
    message->reached += length;
    message->begun++;
    if (message->posted >= FIRST_PIECES) {
        message->pace->under_way++;
    }
    *time_of(message, message->posted++) = tu_now();
    answer = ucp_tag_send_nbx(message->pace->endpoint->ep, address, count, message->tag, &param);
    if (!UCS_PTR_IS_PTR(answer)) { /* else its callback comes, or has come already */
        piece_over(message, UCS_PTR_RAW_STATUS(answer));
    }
}

/* Posts the pieces that are next, of each message in turn, after a progress. Not in a callback: there UCX may send a
 * message before others that were posted earlier and wait for room (uct_mm_ep_process_pending updates cached_tail, by
 * which a new message is sent at once). The receiver relies on the order. */
static unsigned post_next(tu_hook_t *hook)
{
    tu_pace_t *pace = TU_ITEM(hook, tu_pace_t, hook);
    unsigned moved  = 0;
    tu_long_t *message;

    tu_hook_remove(hook);
    while (pace->under_way < pace->pacing.window && (message = TU_LIST_FIRST(&pace->ready, tu_long_t, link)) != NULL) {
        move_to(&pace->rest, message);
        if (has_more(message)) {
            message->busy = true;
            post_piece(message);
            message->busy = false;
            moved++;
        }
        if (has_more(message)) {
            move_to(&pace->ready, message);
        }
        end_if_over(message);
    }
    return moved;
}

/* The pace of an endpoint. NULL: there is no memory. */
static tu_pace_t *pace_of(tu_endpoint_t *endpoint)
{
    tu_pace_t *pace = endpoint->pace;

    if (pace == NULL) {
        pace = tu_calloc(1, sizeof(*pace));
        if (pace == NULL) {
            return NULL;
        }
        pace->endpoint = endpoint;
        tu_pacing_open(&pace->pacing);
        tu_list_init(&pace->ready);
        tu_list_init(&pace->rest);
        tu_hook_init(&pace->hook, post_next);
        endpoint->pace = pace;
    }
    return pace;
}

static void announcement_sent(void *request, ucs_status_t status, void *user_data)
{
    tu_long_t *message = user_data;

    ucp_request_free(request);
    ended(message, status);
    end_if_over(message);
}

static void announce(tu_long_t *message, uint64_t tag)
{
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE,
        .cb.send      = announcement_sent,
        .memory_type  = UCS_MEMORY_TYPE_HOST,
        .user_data    = message,
    };

    tu_le32_store(message->head, (uint32_t)tag);
    tu_le32_store(message->head + 4, (uint32_t)message->tag);
    tu_le64_store(message->head + 8, message->length);
    message->begun++;
    answered(message, ucp_tag_send_nbx(message->pace->endpoint->ep, message->head, sizeof(message->head),
                                       (tag & ~(uint64_t)UINT32_MAX) | TU_LONG_QUEUE, &param));
}

/* Sends a message of `length` bytes, more than TU_LONG. */
int64_t tu_long_send(tu_endpoint_t *endpoint, const tu_buffers_t *buffers, size_t length, uint64_t tag)
{
    tu_worker_t *worker = endpoint->worker;
    tu_pace_t *pace     = pace_of(endpoint);
    tu_long_t *message  = pace == NULL ? NULL : new_message(worker);
    int64_t verdict;

    if (message == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    verdict = tu_post_begin(&message->post, worker, buffers);
    if (verdict != 0) {
        free(message);
        return verdict;
    }
    message->length = length;
    message->pace   = pace;
    message->tag    = (tag & ~(uint64_t)UINT32_MAX) | TU_PIECE_QUEUES | (worker->long_count++ & ~TU_PIECE_QUEUES);
    message->busy   = true;
    tu_list_append(&pace->rest, &message->link);
    announce(message, tag);
    if (message->status != UCS_OK && message->begun == 0) {
        verdict = tu_post_end(&message->post, UCS_STATUS_PTR(message->status));
        dispose(message);
        return verdict;
    }
    message->post.operation->cancel = give_up;
    message->post.operation->owner  = message;
    verdict                         = (int64_t)message->post.id;
    while (has_more(message) && message->posted < FIRST_PIECES) {
        post_piece(message);
    }
    message->busy = false;
    end_if_over(message);
    return verdict;
}

/* ---- receiving ---- */

/* Makes sure that the next announcement can be kept. */
bool tu_long_reserve(tu_worker_t *worker)
{
    if (worker->long_spare == NULL) {
        worker->long_spare = new_message(worker);
    }
    return worker->long_spare != NULL;
}

/* An announcement arrived, and tu_long_reserve has been called. */
ucs_status_t tu_long_announced(tu_worker_t *worker, uint64_t tag, const char *head)
{
    tu_long_t *message = worker->long_spare;
    uint64_t prefix    = tag & ~(uint64_t)UINT32_MAX;
    uint64_t length    = tu_le64_load(head + 8);

    if (length < LEAST_PIECE || length > SSIZE_MAX) {
        return UCS_ERR_INVALID_PARAM;
    }
    worker->long_spare = NULL;
    message->tag       = prefix | tu_le32_load(head + 4);
    message->length    = length;
    tu_list_prepend(&worker->long_received, &message->link); /* its first pieces are next */
    tu_ring_append(worker, TU_RECORD_MESSAGE, 0, UCS_OK, message->length, prefix | tu_le32_load(head),
                   (uint64_t)(uintptr_t)message | TU_IS_LONG);
    return UCS_OK;
}

static void piece_received(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *user_data)
{
    tu_long_t *message = user_data;

    (void)info;
    ucp_request_free(request);
    ended(message, status);
    end_if_over(message);
}

/* Receives the next piece. It ends the message if that fails. */
static void receive_piece(tu_long_t *message, const arrived_t *arrived)
{
    ucp_request_param_t param = message->post.param;
    size_t length             = arrived->length;
    size_t count;
    void *address;

    if (length < LEAST_PIECE || length > message->length - message->reached) {
        note(message, UCS_ERR_INVALID_PARAM);
    }
    if (message->status == UCS_OK) {
        note(message, next_part(message, length, &address, &count));
    }
    if (message->status != UCS_OK) {
        tu_message_throw_away(message->worker, arrived->handle);
        return;
    }
    param.cb.recv     = piece_received;
    param.user_data   = message;
    message->reached += length;
    message->begun++;
    message->busy     = true;
    answered(message, ucp_tag_msg_recv_nbx(message->worker->worker, address, count, arrived->handle, &param));
    message->busy     = false;
}

/* A piece arrived. */
void tu_long_piece_arrived(tu_worker_t *worker, ucp_tag_message_h handle, uint64_t tag, size_t length)
{
    arrived_t arrived = {.handle = handle, .length = length};
    tu_long_t *message;

    TU_LIST_FOR_EACH(message, &worker->long_received, link) {
        if (message->tag == tag) {
            break;
        }
    }
    if (&message->link == &worker->long_received) {
        tu_message_throw_away(worker, handle);
    } else if (message->post.operation != NULL) {
        receive_piece(message, &arrived);
        end_if_over(message);
    } else if (message->held < FIRST_PIECES) {
        message->arrived[message->held++] = arrived;
    } else {
        note(message, UCS_ERR_INVALID_PARAM);
        tu_message_throw_away(worker, handle);
    }
}

/* Receives a message that was announced. An empty buffer means that nobody wants it: then it is dropped. */
int64_t tu_long_receive(tu_worker_t *worker, uint64_t pointer, const tu_buffers_t *buffers)
{
    tu_long_t *message = (tu_long_t *)(uintptr_t)(pointer & ~TU_IS_LONG);
    int64_t verdict;
    unsigned i;

    if (buffers->count == 1 && buffers->lengths[0] == 0) {
        dispose(message);
        return UCS_OK;
    }
    verdict = tu_post_begin(&message->post, worker, buffers);
    if (verdict != 0) {
        message->post.operation = NULL;
        if (verdict != UCS_ERR_NO_MEMORY) { /* else it can be received later */
            dispose(message);
        }
        return verdict;
    }
    message->post.operation->cancel = give_up;
    message->post.operation->owner  = message;
    tu_list_remove(&message->link);
    tu_list_prepend(&worker->long_received, &message->link); /* before all that nobody receives yet */
    verdict = (int64_t)message->post.id;
    for (i = 0; i < message->held; i++) {
        receive_piece(message, &message->arrived[i]);
    }
    message->held = 0;
    end_if_over(message);
    return verdict;
}

/* ---- of a worker, and the end ---- */

void tu_long_open(tu_worker_t *worker)
{
    tu_list_init(&worker->long_received);
    tu_list_init(&worker->long_cut);
}

/* Gives up the messages on their way out. UCX may be done with their pieces later than with the endpoint; if it copies
 * them, that is when the peer has read our last messages, or when the worker is destroyed. But then it reads nothing
 * any more from a buffer once the endpoint is closed. */
static void cut_all(tu_list_t *list, bool copies)
{
    tu_long_t *message;

    while ((message = TU_LIST_FIRST(list, tu_long_t, link)) != NULL) {
        move_to(&message->worker->long_cut, message);
        message->pace = NULL;
        note(message, UCS_ERR_CANCELED);
        if (copies && message->begun > 0) {
            tu_operation_done(message->post.operation, NULL, message->status, 0, 0);
            message->post.operation = NULL;
        }
        end_if_over(message);
    }
}

/* forced: UCX is about to close the endpoint by force. */
void tu_long_endpoint_closing(tu_endpoint_t *endpoint, bool forced)
{
    tu_pace_t *pace = endpoint->pace;
    bool copies;

    if (pace != NULL) {
        copies = forced && tu_endpoint_copies(endpoint);
        cut_all(&pace->ready, copies);
        cut_all(&pace->rest, copies);
        tu_hook_remove(&pace->hook);
        endpoint->pace = NULL;
        free(pace);
    }
}

/* Whether UCX still has pieces of messages that were given up. */
bool tu_long_lingers(const tu_worker_t *worker)
{
    return !tu_list_is_empty(&worker->long_cut);
}

static void free_all(tu_list_t *list)
{
    tu_long_t *message;

    while ((message = TU_LIST_FIRST(list, tu_long_t, link)) != NULL) {
        message->held = 0; /* UCX's worker has gone, and its handles with it */
        dispose(message);
    }
}

void tu_long_worker_destroyed(tu_worker_t *worker)
{
    tu_endpoint_t *endpoint;

    TU_LIST_FOR_EACH(endpoint, &worker->endpoints, link) {
        tu_long_endpoint_closing(endpoint, false);
    }
    free_all(&worker->long_cut);
    free_all(&worker->long_received);
    free(worker->long_spare);
}
