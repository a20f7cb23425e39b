/* Long messages of Connections: they go in pieces, each a tag message of its own. So no call to UCX moves much at once,
 * and other messages get between.
 *
 * The sender announces the message, and posts the first pieces; whenever UCX is done with one, it posts the next. The
 * data of a piece stays with the sender until the receiver asks for it, because pieces are long enough for UCX's
 * rendezvous.
 *
 * To the receiver's Python the announcement is the message: it gets the usual record, and receives or drops what the
 * record names. Until then C keeps UCX's handles of the pieces that have arrived. After that it receives each piece when
 * it arrives. It throws away pieces of messages that were dropped or given up, so the sender is rid of them.
 *
 * Either side gives a message up between two pieces when its Connection or its endpoint ends. */
#include <string.h>

#include "little_endian.h"
#include "native.h"

/* So many pieces are posted at once while other messages come and go, because these wait behind them; and this goes on
 * for so many pieces after the last such message. */
#define FEW_AHEAD 2
#define FEW_FOR 64

struct tu_long {
    tu_list_t link;            /* in the worker's lists: on their way out; announced; being received */
    tu_worker_t *worker;
    tu_endpoint_t *endpoint;   /* NULL unless it is on its way out */
    uint64_t tag;              /* of its pieces */
    size_t length;
    size_t piece;              /* length of each piece but the last */
    size_t reached;            /* up to here pieces were posted, or have arrived */
    unsigned begun;            /* pieces that UCX works on; the announcement counts as one */
    uint64_t others;           /* the worker's count of other messages when the last piece was posted */
    unsigned few;              /* pieces that are still to go a few at once */
    bool busy;                 /* pieces are being given to UCX: those that end meanwhile change nothing else */
    ucs_status_t status;       /* of the first piece that failed, or why it was given up */
    tu_post_t post;            /* its operation and its whole buffer, once it is sent or received */
    void **described;          /* what UCX reads of the pieces of a list or a strided array; else NULL */
    char head[TU_LONG_HEAD];   /* the announcement on its way out */
    unsigned held;
    ucp_tag_message_h handles[TU_PIECES_AHEAD]; /* the first `held` are of pieces that wait for a receive */
};

static size_t pieces_of(size_t length)
{
    return (length + TU_PIECE - 1) / TU_PIECE;
}

static tu_long_t *new_message(tu_worker_t *worker)
{
    tu_long_t *message = tu_calloc(1, sizeof(*message));

    if (message != NULL) {
        tu_list_init(&message->link);
        message->worker = worker;
    }
    return message;
}

static void set_length(tu_long_t *message, size_t length)
{
    size_t count = pieces_of(length);

    message->length = length;
    message->piece  = count == 0 ? 0 : (length + count - 1) / count;
}

static void thrown_away(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *user_data)
{
    (void)status;
    (void)info;
    (void)user_data;
    ucp_request_free(request);
}

/* Receives nothing of a piece, so that the sender is rid of it. */
static void throw_away(tu_worker_t *worker, ucp_tag_message_h handle)
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
        throw_away(message->worker, message->handles[i]);
    }
    for (i = 0; message->described != NULL && i < pieces_of(message->length); i++) {
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

/* Ends the operation if nothing is left to be done. */
static void end_if_over(tu_long_t *message)
{
    if (message->busy || message->begun > 0 || (message->status == UCS_OK && message->reached < message->length)) {
        return;
    }
    tu_operation_done(message->post.operation, NULL, message->status, message->length, 0);
    dispose(message);
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
        message->described = tu_calloc(pieces_of(message->length), sizeof(void *));
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
    message->described[message->reached / message->piece] = part;
    *address                                               = part;
    return part == NULL ? UCS_ERR_NO_MEMORY : UCS_OK;
}

static size_t next_length(const tu_long_t *message)
{
    size_t rest = message->length - message->reached;

    return rest < message->piece ? rest : message->piece;
}

/* What UCX answered when it was given a piece. */
static void answered(tu_long_t *message, ucs_status_ptr_t answer)
{
    if (!UCS_PTR_IS_PTR(answer)) { /* else its callback comes, or has come already */
        message->begun--;
        note(message, UCS_PTR_RAW_STATUS(answer));
    }
}

/* ---- sending ---- */

static bool lacks_pieces(const tu_long_t *message)
{
    return message->reached < message->length && message->begun < (message->few > 0 ? FEW_AHEAD : TU_PIECES_AHEAD);
}

/* Notes whether other messages have come or gone since the last piece. */
static void look_at_others(tu_long_t *message)
{
    if (message->others != message->worker->others) {
        message->others = message->worker->others;
        message->few    = FEW_FOR;
    } else if (message->few > 0) {
        message->few--;
    }
}

static void piece_sent(void *request, ucs_status_t status, void *user_data);

static void post_piece(tu_long_t *message)
{
    ucp_request_param_t param = message->post.param;
    size_t length             = next_length(message);
    size_t count;
    void *address;
    ucs_status_t status = next_part(message, length, &address, &count);

    if (status != UCS_OK) {
        note(message, status);
        return;
    }
    look_at_others(message);
    param.cb.send     = piece_sent;
    param.user_data   = message;
    message->reached += length;
    message->begun++;
    answered(message, ucp_tag_send_nbx(message->endpoint->ep, address, count, message->tag, &param));
}

static void post_pieces(tu_long_t *message)
{
    tu_list_remove(&message->link);
    tu_list_append(&message->worker->long_sent, &message->link);
    message->busy = true;
    while (message->status == UCS_OK && lacks_pieces(message)) {
        post_piece(message);
    }
    message->busy = false;
    end_if_over(message);
}

/* Posts the pieces that are next, after a progress. Not in a callback: there UCX may send a message before others that
 * were posted earlier and wait for room (uct_mm_ep_process_pending updates cached_tail, by which a new message is sent
 * at once). The receiver relies on the order. */
static unsigned post_all(tu_hook_t *hook)
{
    tu_worker_t *worker = TU_ITEM(hook, tu_worker_t, long_hook);
    unsigned moved      = 0;
    tu_list_t ready;
    tu_long_t *message;

    tu_hook_remove(hook);
    tu_list_move_all(&worker->long_ready, &ready);
    while ((message = TU_LIST_FIRST(&ready, tu_long_t, link)) != NULL) {
        post_pieces(message);
        moved++;
    }
    return moved;
}

static void piece_sent(void *request, ucs_status_t status, void *user_data)
{
    tu_long_t *message = user_data;

    ucp_request_free(request);
    note(message, status);
    message->begun--;
    if (message->busy) {
        return; /* who made it so posts the next ones */
    }
    if (message->status == UCS_OK && lacks_pieces(message)) {
        tu_list_remove(&message->link);
        tu_list_append(&message->worker->long_ready, &message->link);
        tu_hook_add(message->worker, &message->worker->long_hook);
    } else {
        end_if_over(message);
    }
}

static void give_up_sending(void *owner)
{
    note(owner, UCS_ERR_CANCELED);
    end_if_over(owner);
}

static void announce(tu_long_t *message, uint64_t tag)
{
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE,
        .cb.send      = piece_sent,
        .memory_type  = UCS_MEMORY_TYPE_HOST,
        .user_data    = message,
    };

    tu_le32_store(message->head, (uint32_t)tag);
    tu_le32_store(message->head + 4, (uint32_t)message->tag);
    tu_le64_store(message->head + 8, message->length);
    message->begun++;
    answered(message, ucp_tag_send_nbx(message->endpoint->ep, message->head, sizeof(message->head),
                                       (tag & ~(uint64_t)UINT32_MAX) | TU_LONG_QUEUE, &param));
}

/* Sends a message of `length` bytes, more than TU_LONG. */
int64_t tu_long_send(tu_endpoint_t *endpoint, const tu_buffers_t *buffers, size_t length, uint64_t tag)
{
    tu_worker_t *worker = endpoint->worker;
    tu_long_t *message  = new_message(worker);
    int64_t verdict;

    if (message == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    verdict = tu_post_begin(&message->post, worker, buffers);
    if (verdict != 0) {
        free(message);
        return verdict;
    }
    set_length(message, length);
    message->endpoint = endpoint;
    message->tag      = (tag & ~(uint64_t)UINT32_MAX) | TU_PIECE_QUEUES | (worker->long_count++ & ~TU_PIECE_QUEUES);
    message->busy     = true;
    announce(message, tag);
    message->busy = false;
    if (message->status != UCS_OK && message->begun == 0) {
        verdict = tu_post_end(&message->post, UCS_STATUS_PTR(message->status));
        dispose(message);
        return verdict;
    }
    message->post.operation->cancel = give_up_sending;
    message->post.operation->owner  = message;
    verdict                         = (int64_t)message->post.id;
    post_pieces(message);
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
void tu_long_announced(tu_worker_t *worker, uint64_t tag, const char *head)
{
    tu_long_t *message = worker->long_spare;
    uint64_t prefix    = tag & ~(uint64_t)UINT32_MAX;

    worker->long_spare = NULL;
    message->tag       = prefix | tu_le32_load(head + 4);
    set_length(message, tu_le64_load(head + 8));
    tu_list_prepend(&worker->long_received, &message->link); /* its first pieces are next */
    tu_ring_append(worker, TU_RECORD_MESSAGE, 0, UCS_OK, message->length, prefix | tu_le32_load(head),
                   (uint64_t)(uintptr_t)message | TU_IS_LONG);
}

static void piece_received(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *user_data)
{
    tu_long_t *message = user_data;

    (void)info;
    ucp_request_free(request);
    note(message, status);
    message->begun--;
    end_if_over(message);
}

/* Receives the next piece. It ends the message if that fails. */
static void receive_piece(tu_long_t *message, ucp_tag_message_h handle)
{
    ucp_request_param_t param = message->post.param;
    size_t length             = next_length(message);
    size_t count;
    void *address;

    if (message->status == UCS_OK) {
        note(message, next_part(message, length, &address, &count));
    }
    if (message->status != UCS_OK) {
        throw_away(message->worker, handle);
        return;
    }
    param.cb.recv     = piece_received;
    param.user_data   = message;
    message->reached += length;
    message->begun++;
    message->busy     = true;
    answered(message, ucp_tag_msg_recv_nbx(message->worker->worker, address, count, handle, &param));
    message->busy     = false;
}

/* A piece arrived. */
void tu_long_piece_arrived(tu_worker_t *worker, ucp_tag_message_h handle, uint64_t tag, size_t length)
{
    tu_long_t *message;

    TU_LIST_FOR_EACH(message, &worker->long_received, link) {
        if (message->tag == tag) {
            break;
        }
    }
    if (&message->link == &worker->long_received) {
        throw_away(worker, handle);
    } else if (message->post.operation != NULL) {
        if (length != next_length(message)) {
            note(message, UCS_ERR_INVALID_PARAM);
        }
        receive_piece(message, handle);
        end_if_over(message);
    } else if (message->held < TU_PIECES_AHEAD) {
        message->handles[message->held++] = handle;
    } else {
        note(message, UCS_ERR_INVALID_PARAM);
        throw_away(worker, handle);
    }
}

static void give_up_receiving(void *owner)
{
    note(owner, UCS_ERR_CANCELED);
    end_if_over(owner);
}

/* Receives a message that was announced. An empty buffer means that nobody wants it: then it is dropped. */
int64_t tu_long_receive(tu_worker_t *worker, uint64_t pointer, const tu_buffers_t *buffers)
{
    tu_long_t *message = (tu_long_t *)(uintptr_t)(pointer & ~(uint64_t)TU_IS_LONG);
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
    message->post.operation->cancel = give_up_receiving;
    message->post.operation->owner  = message;
    tu_list_remove(&message->link);
    tu_list_prepend(&worker->long_received, &message->link); /* before all that nobody receives yet */
    verdict = (int64_t)message->post.id;
    for (i = 0; i < message->held; i++) {
        receive_piece(message, message->handles[i]);
    }
    message->held = 0;
    end_if_over(message);
    return verdict;
}

/* ---- of a worker, and the end ---- */

void tu_long_open(tu_worker_t *worker)
{
    tu_list_init(&worker->long_sent);
    tu_list_init(&worker->long_ready);
    tu_list_init(&worker->long_received);
    tu_hook_init(&worker->long_hook, post_all);
}

static void give_up_all(tu_list_t *list, const tu_endpoint_t *endpoint)
{
    tu_long_t *message, *after;

    TU_LIST_FOR_EACH_SAFE(message, after, list, link) {
        if (message->endpoint == endpoint) {
            give_up_sending(message);
        }
    }
}

void tu_long_endpoint_closing(tu_endpoint_t *endpoint)
{
    give_up_all(&endpoint->worker->long_sent, endpoint);
    give_up_all(&endpoint->worker->long_ready, endpoint);
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
    free_all(&worker->long_sent);
    free_all(&worker->long_ready);
    free_all(&worker->long_received);
    free(worker->long_spare);
}
