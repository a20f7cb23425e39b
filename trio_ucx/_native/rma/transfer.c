/* Puts and gets without UCX's own: by load and store if the memory is mapped here, else by messages to its owner.
 *
 * An endpoint's transfers are in a list, in the order of their posting, until they have happened at the owner. They
 * begin in that order, up to TU_REMOTE_WINDOW at once; a transfer behind a fence begins when all before it have
 * happened. A flush is an entry in the list. It has happened when it becomes the first one, and UCX has flushed what
 * UCX itself had to do.
 *
 * Copies longer than PIECE go on with the worker's progress, one piece at a time, so that other tasks can run.
 *
 * A transfer by messages that is longer than the way's `part` is a WHOLE: it is not in the list itself, but its parts
 * are, as transfers like others.
 */
#include <string.h>
#include <sys/random.h>

#include "rma/rma.h"

#define PIECE (1024 * 1024)
#define BUCKETS 256            /* hash buckets of the transfers that wait for an answer, by id */
/* Longer puts stay with their sender until the owner fetches them. */
#define EAGER_PUT (96 * 1024)

enum { GET, PUT, FLUSH, WHOLE };
enum { WAITING, COPYING, SENT, OVER };

struct tu_transfer {
    tu_worker_t *worker;
    tu_endpoint_t *endpoint;   /* NULL: it was closed */
    tu_transfer_t *next, **link;       /* of the endpoint */
    tu_transfer_t *next_of_all, **link_of_all;
    tu_transfer_t *next_of_bucket;
    tu_transfer_t *next_copy;
    int kind;
    int state;
    int fenced;
    int late;
    int sending;               /* UCX is sending the request, or the put's data, or flushes */
    int receiving;             /* UCX is filling the buffer */
    tu_transfer_done_t done;   /* NULL: it was called */
    void *owner;
    ucs_status_t *verdict;     /* of a transfer that completes before its begin returns */
    char *buffer;
    uint64_t length;
    int memory;
    char *local;               /* the memory's address in this process */
    uint64_t copied;
    ucs_status_t status;
    uint64_t parts;            /* of a WHOLE: those that are not over */
    tu_remote_request_t request;
};

static void advance(tu_endpoint_t *endpoint);

/* ---- copies ---- */

static void copy_between(int put, char *buffer, char *local, uint64_t length)
{
    uint64_t eight;
    uint32_t four;

    if (put) {
        tu_remote_store(local, buffer, length);
    } else if (length == 8 && (uintptr_t)local % 8 == 0) { /* a write by another process must not be seen half */
        eight = __atomic_load_n((const uint64_t *)(const void *)local, __ATOMIC_ACQUIRE);
        memcpy(buffer, &eight, 8);
    } else if (length == 4 && (uintptr_t)local % 4 == 0) {
        four = __atomic_load_n((const uint32_t *)(const void *)local, __ATOMIC_ACQUIRE);
        memcpy(buffer, &four, 4);
    } else {
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        memcpy(buffer, local, length);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
    }
}

static void enqueue_copy(tu_transfer_t *transfer)
{
    tu_worker_t *worker = transfer->worker;

    transfer->next_copy    = NULL;
    *worker->copies.last   = transfer;
    worker->copies.last    = &transfer->next_copy;
}

static void dequeue_copy(tu_transfer_t *transfer)
{
    tu_worker_t *worker  = transfer->worker;
    tu_transfer_t **link = &worker->copies.first;

    while (*link != transfer) {
        link = &(*link)->next_copy;
    }
    *link = transfer->next_copy;
    if (*link == NULL) {
        worker->copies.last = link;
    }
}

/* ---- the lists ---- */

static tu_transfer_t *allocate(tu_worker_t *worker, int kind, tu_transfer_done_t done, void *owner)
{
    tu_transfer_t *transfer = calloc(1, sizeof(*transfer));

    if (transfer == NULL) {
        return NULL;
    }
    transfer->worker      = worker;
    transfer->kind        = kind;
    transfer->done        = done;
    transfer->owner       = owner;
    transfer->next_of_all = worker->transfers;
    transfer->link_of_all = &worker->transfers;
    if (transfer->next_of_all != NULL) {
        transfer->next_of_all->link_of_all = &transfer->next_of_all;
    }
    worker->transfers = transfer;
    return transfer;
}

static tu_transfer_t *make(tu_endpoint_t *endpoint, int kind, tu_transfer_done_t done, void *owner)
{
    tu_transfers_t *transfers = &endpoint->transfers;
    tu_transfer_t *transfer   = allocate(endpoint->worker, kind, done, owner);

    if (transfer == NULL) {
        return NULL;
    }
    transfer->endpoint = endpoint;
    if (kind != FLUSH) { /* a flush waits for all before it anyway */
        transfer->fenced = transfers->fence && transfers->first != NULL;
        transfers->fence = 0;
    }
    if (transfers->first == NULL) {
        transfers->last = &transfers->first;
    }
    transfer->link   = transfers->last;
    *transfers->last = transfer;
    transfers->last  = &transfer->next;
    if (transfers->waiting == NULL) {
        transfers->waiting = transfer;
    }
    return transfer;
}

/* Takes it out of its endpoint's list. */
static void leave(tu_transfer_t *transfer)
{
    tu_endpoint_t *endpoint = transfer->endpoint;

    if (endpoint == NULL) {
        return;
    }
    if (endpoint->transfers.waiting == transfer) {
        endpoint->transfers.waiting = transfer->next;
    }
    if (transfer->state == SENT) {
        endpoint->transfers.begun--;
    }
    *transfer->link = transfer->next;
    if (transfer->next != NULL) {
        transfer->next->link = transfer->link;
    } else {
        endpoint->transfers.last = transfer->link;
    }
    transfer->endpoint = NULL;
}

static void dispose(tu_transfer_t *transfer)
{
    *transfer->link_of_all = transfer->next_of_all;
    if (transfer->next_of_all != NULL) {
        transfer->next_of_all->link_of_all = transfer->link_of_all;
    }
    free(transfer);
}

static tu_transfer_t **bucket_of(tu_worker_t *worker, uint64_t id)
{
    return &worker->awaiting[id % BUCKETS];
}

static void expect_answer(tu_transfer_t *transfer)
{
    tu_transfer_t **bucket = bucket_of(transfer->worker, transfer->request.id);

    transfer->next_of_bucket = *bucket;
    *bucket                  = transfer;
}

static tu_transfer_t *find(tu_worker_t *worker, uint64_t id)
{
    tu_transfer_t *transfer = worker->awaiting != NULL ? *bucket_of(worker, id) : NULL;

    while (transfer != NULL && transfer->request.id != id) {
        transfer = transfer->next_of_bucket;
    }
    return transfer;
}

static void expect_nothing(tu_transfer_t *transfer)
{
    tu_transfer_t **link;

    if (transfer->state != SENT) {
        return;
    }
    for (link = bucket_of(transfer->worker, transfer->request.id); *link != NULL; link = &(*link)->next_of_bucket) {
        if (*link == transfer) {
            *link = transfer->next_of_bucket;
            return;
        }
    }
}

/* ---- the end of a transfer ---- */

static void tell(tu_transfer_t *transfer, ucs_status_t status)
{
    tu_transfer_done_t done = transfer->done;

    transfer->done = NULL;
    if (transfer->verdict != NULL) {
        *transfer->verdict = status;
    } else if (done != NULL) {
        done(transfer->owner, status);
    }
    transfer->verdict = NULL;
}

/* The owner has finished with it. Its `done` is called when UCX has finished with it, too. */
static void conclude(tu_transfer_t *transfer, ucs_status_t status)
{
    tu_endpoint_t *endpoint = transfer->endpoint;

    if (transfer->state != OVER) {
        expect_nothing(transfer);
        if (transfer->state == COPYING) {
            dequeue_copy(transfer);
        }
        if (status != UCS_OK && transfer->kind == PUT && transfer->done == NULL && endpoint != NULL) {
            endpoint->transfers.put_status = status; /* the next flush of the memory reports it */
        }
        leave(transfer);
        transfer->state  = OVER;
        transfer->status = status;
    }
    if (!transfer->sending && !transfer->receiving) {
        if (transfer->done != NULL) {
            tell(transfer, transfer->status);
        }
        dispose(transfer);
    }
    if (endpoint != NULL) {
        advance(endpoint);
    }
}

/* ---- messages ---- */

static void request_left(tu_transfer_t *transfer, ucs_status_t status)
{
    transfer->sending = 0;
    if (transfer->state == OVER) {
        conclude(transfer, transfer->status);
    } else if (status != UCS_OK) {
        conclude(transfer, status);
    } else if (transfer->kind == PUT && !transfer->late) {
        tell(transfer, UCS_OK);
    }
}

static void request_sent(void *request, ucs_status_t status, void *user_data)
{
    ucp_request_free(request);
    request_left(user_data, status);
}

static void send_request(tu_transfer_t *transfer)
{
    tu_endpoint_t *endpoint   = transfer->endpoint;
    int put                   = transfer->kind == PUT;
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS,
        .flags        = UCP_AM_SEND_FLAG_REPLY,
        .cb.send      = request_sent,
        .user_data    = transfer,
    };
    ucs_status_ptr_t answer;

    if (put && transfer->memory != TU_MEMORY_UNKNOWN) {
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMORY_TYPE;
        param.memory_type   = (ucs_memory_type_t)(transfer->memory - 1);
    }
    if (put) {
        param.flags |= transfer->length > EAGER_PUT ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER;
    }
    transfer->state      = SENT;
    transfer->request.id = ++endpoint->worker->transfer_ids;
    endpoint->transfers.begun++;
    expect_answer(transfer);
    transfer->sending = 1;
    answer = ucp_am_send_nbx(endpoint->ep, TU_REMOTE_AM_ID, &transfer->request, sizeof(transfer->request),
                             put ? transfer->buffer : NULL, put ? transfer->length : 0, &param);
    if (!UCS_PTR_IS_PTR(answer)) {
        request_left(transfer, UCS_PTR_RAW_STATUS(answer));
    }
}

static void received(void *request, ucs_status_t status, size_t length, void *user_data)
{
    tu_transfer_t *transfer = user_data;

    if (request != NULL) {
        ucp_request_free(request);
    }
    transfer->receiving = 0;
    if (status == UCS_OK && length != transfer->length) {
        status = UCS_ERR_IO_ERROR;
    }
    conclude(transfer, status);
}

static void receive(tu_transfer_t *transfer, void *data)
{
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.recv_am   = received,
        .user_data    = transfer,
    };
    ucs_status_ptr_t answer;

    if (transfer->memory != TU_MEMORY_UNKNOWN) {
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMORY_TYPE;
        param.memory_type   = (ucs_memory_type_t)(transfer->memory - 1);
    }
    transfer->receiving = 1;
    answer = ucp_am_recv_data_nbx(transfer->worker->worker, data, transfer->buffer, transfer->length, &param);
    if (!UCS_PTR_IS_PTR(answer)) {
        received(NULL, UCS_PTR_RAW_STATUS(answer), transfer->length, transfer);
    }
}

/* The status for an owner's refusal. */
static ucs_status_t refusal(uint8_t status)
{
    switch (-(int)status) {
    case UCS_ERR_INVALID_ADDR:
        return UCS_ERR_INVALID_ADDR;
    case UCS_ERR_NO_MEMORY:
        return UCS_ERR_NO_MEMORY;
    default:
        return UCS_ERR_NO_ELEM;
    }
}

/* Checks and takes an answer. It may come from a peer that only claims to be the owner. */
ucs_status_t tu_transfer_answered(tu_worker_t *worker, const tu_remote_answer_t *answer, void *data, size_t length,
                                  int rendezvous)
{
    tu_transfer_t *transfer = find(worker, answer->id);

    if (transfer == NULL || transfer->request.nonce != answer->nonce) {
        return UCS_OK; /* the transfer was given up meanwhile */
    }
    if (answer->status != 0) {
        conclude(transfer, refusal(answer->status));
    } else if (transfer->kind == PUT) {
        conclude(transfer, UCS_OK);
    } else if (length != transfer->length || (!rendezvous && transfer->memory > TU_MEMORY_HOST)) {
        conclude(transfer, UCS_ERR_IO_ERROR);
    } else if (!rendezvous) {
        memcpy(transfer->buffer, data, length);
        conclude(transfer, UCS_OK);
    } else {
        expect_nothing(transfer); /* a second answer is not taken */
        receive(transfer, data);
    }
    return UCS_OK;
}

/* ---- beginning ---- */

static void begin_copy(tu_transfer_t *transfer)
{
    transfer->state = COPYING;
    enqueue_copy(transfer);
}

/* Copies one piece of the next transfer. Returns whether there was one. */
unsigned tu_transfers_copy(tu_worker_t *worker)
{
    tu_transfer_t *transfer = worker->copies.first;
    uint64_t length;

    if (transfer == NULL) {
        return 0;
    }
    length = transfer->length - transfer->copied;
    length = length < PIECE ? length : PIECE;
    copy_between(transfer->kind == PUT, transfer->buffer + transfer->copied, transfer->local + transfer->copied, length);
    transfer->copied += length;
    if (transfer->copied == transfer->length) {
        conclude(transfer, UCS_OK);
    } else {
        dequeue_copy(transfer);
        enqueue_copy(transfer);
    }
    return 1;
}

/* Begins the transfers that may begin. Completions inside this call do not begin further ones by themselves. */
static void advance(tu_endpoint_t *endpoint)
{
    tu_transfers_t *transfers = &endpoint->transfers;
    tu_transfer_t *transfer;

    if (transfers->advancing || endpoint->ep == NULL) {
        return;
    }
    transfers->advancing = 1;
    for (;;) {
        if (transfers->first != NULL && transfers->first->kind == FLUSH) {
            conclude(transfers->first, UCS_OK);
            continue;
        }
        transfer = transfers->waiting;
        if (transfer == NULL || transfers->begun >= TU_REMOTE_WINDOW || (transfer->fenced && transfer != transfers->first)) {
            break;
        }
        transfers->waiting = transfer->next;
        if (transfer->kind != FLUSH && transfer->local != NULL) {
            begin_copy(transfer);
        } else if (transfer->kind != FLUSH) {
            send_request(transfer);
        }
    }
    transfers->advancing = 0;
}

/* Only the peer of this endpoint learns it. */
static ucs_status_t make_nonce(tu_endpoint_t *endpoint)
{
    uint64_t *nonce = &endpoint->transfers.nonce;

    while (*nonce == 0) {
        if (getrandom(nonce, sizeof(*nonce), 0) != sizeof(*nonce)) {
            *nonce = 0;
            return UCS_ERR_IO_ERROR;
        }
    }
    return UCS_OK;
}

static ucs_status_t make_request(tu_transfer_t *transfer, const tu_way_t *way, uint64_t offset)
{
    tu_remote_request_t *request = &transfer->request;
    tu_worker_t *worker          = transfer->worker;
    ucs_status_t status          = make_nonce(transfer->endpoint);

    if (worker->awaiting == NULL) {
        worker->awaiting = calloc(BUCKETS, sizeof(*worker->awaiting));
    }
    if (status != UCS_OK || worker->awaiting == NULL) {
        return status != UCS_OK ? status : UCS_ERR_NO_MEMORY;
    }
    request->kind   = transfer->kind == PUT ? TU_REMOTE_PUT : TU_REMOTE_GET;
    request->flags  = transfer->kind == GET && transfer->memory > TU_MEMORY_HOST ? TU_REMOTE_RENDEZVOUS : 0;
    request->nonce  = transfer->endpoint->transfers.nonce;
    request->offset = offset;
    request->length = transfer->length;
    memcpy(request->token, way->token, sizeof(request->token));
    return UCS_OK;
}

/* Adds a transfer to the endpoint's list; by messages if `local` is NULL. */
static ucs_status_t add(tu_endpoint_t *endpoint, const tu_way_t *way, char *local, int put, char *buffer, uint64_t length,
                        int memory, uint64_t offset, int late, tu_transfer_done_t done, void *owner, tu_transfer_t **out)
{
    tu_transfer_t *transfer = make(endpoint, put ? PUT : GET, done, owner);
    ucs_status_t status;

    if (transfer == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    transfer->late   = late;
    transfer->buffer = buffer;
    transfer->length = length;
    transfer->memory = memory;
    transfer->local  = local;
    status           = local != NULL ? UCS_OK : make_request(transfer, way, offset);
    if (status != UCS_OK) {
        leave(transfer);
        dispose(transfer);
        return status;
    }
    *out = transfer;
    return UCS_OK;
}

/* A part is over, or whoever else held the WHOLE. */
static void part_done(void *owner, ucs_status_t status)
{
    tu_transfer_t *whole = owner;

    if (whole->status == UCS_OK) {
        whole->status = status;
    }
    if (--whole->parts == 0) {
        tell(whole, whole->status);
        dispose(whole);
    }
}

/* Adds the parts of a transfer. If there is no memory for one of them, those before it are given up. */
static ucs_status_t add_parts(tu_transfer_t *whole, tu_endpoint_t *endpoint, const tu_way_t *way, int put, char *buffer,
                              uint64_t length, int memory, uint64_t offset, int late)
{
    ucs_status_t status = UCS_OK;
    uint64_t done, part;
    tu_transfer_t *transfer;

    for (done = 0; done < length && status == UCS_OK; done += part) {
        part   = length - done < way->part ? length - done : way->part;
        status = add(endpoint, way, NULL, put, buffer + done, part, memory, offset + done, late, part_done, whole,
                     &transfer);
        whole->parts += status == UCS_OK;
    }
    if (status != UCS_OK) {
        whole->parts++; /* it must not end in this call */
        tu_transfer_cancel(whole);
        dispose(whole);
    }
    return status;
}

ucs_status_t tu_transfer_begin(tu_endpoint_t *endpoint, const tu_way_t *way, int put, void *buffer, uint64_t length,
                               int memory, uint64_t offset, int late, tu_transfer_done_t done, void *owner,
                               tu_transfer_t **out)
{
    tu_transfers_t *transfers = &endpoint->transfers;
    char *local               = way->local != NULL && memory <= TU_MEMORY_HOST ? way->local + offset : NULL;
    ucs_status_t verdict      = UCS_INPROGRESS;
    ucs_status_t status       = UCS_OK;
    tu_transfer_t *transfer;

    *out = NULL;
    if (local == NULL && !way->messages) {
        return UCS_ERR_UNSUPPORTED;
    }
    if (local != NULL && length <= PIECE && transfers->waiting == NULL && !(transfers->fence && transfers->first != NULL)) {
        copy_between(put, buffer, local, length);
        return UCS_OK;
    }
    if (local == NULL && way->part > 0 && length > way->part && memory <= TU_MEMORY_HOST) {
        transfer = allocate(endpoint->worker, WHOLE, done, owner);
        if (transfer == NULL) {
            return UCS_ERR_NO_MEMORY;
        }
        status = add_parts(transfer, endpoint, way, put, buffer, length, memory, offset, late);
    } else {
        status = add(endpoint, way, local, put, buffer, length, memory, offset, late, done, owner, &transfer);
    }
    if (status != UCS_OK) {
        return status;
    }
    transfer->verdict = &verdict;
    advance(endpoint);
    if (verdict == UCS_INPROGRESS) {
        transfer->verdict = NULL;
        *out              = transfer;
    }
    return verdict;
}

static void operation_done(void *owner, ucs_status_t status)
{
    tu_operation_done(owner, NULL, status, 0, 0);
}

/* Gets or puts one buffer; returns a verdict. Python has checked that the range is in the memory. */
int64_t tu_transfer(tu_endpoint_t *endpoint, const tu_way_t *way, int put, const tu_buffers_t *buffers, uint64_t offset)
{
    tu_worker_t *worker = endpoint->worker;
    tu_transfer_t *transfer;
    ucs_status_t status;
    tu_post_t post;
    int64_t verdict;

    if (buffers->count != 1 || buffers->strided != NULL || offset > way->length ||
        buffers->lengths[0] > way->length - offset) {
        return UCS_ERR_INVALID_PARAM;
    }
    if (buffers->memory > TU_MEMORY_HOST && !(worker->memory_types >> (buffers->memory - 1) & 1)) {
        return UCS_ERR_UNSUPPORTED;
    }
    verdict = tu_post_begin(&post, worker, NULL);
    if (verdict != 0) {
        return verdict;
    }
    status = tu_transfer_begin(endpoint, way, put, buffers->addresses[0], buffers->lengths[0], buffers->memory, offset, 0,
                               operation_done, post.operation, &transfer);
    if (status != UCS_INPROGRESS) {
        return tu_post_end(&post, UCS_STATUS_PTR(status));
    }
    post.operation->transfer = transfer;
    return (int64_t)post.id;
}

static void flushed(void *request, ucs_status_t status, void *user_data)
{
    tu_transfer_t *transfer = user_data;

    ucp_request_free(request);
    transfer->sending = 0;
    if (transfer->state == OVER || status != UCS_OK) {
        conclude(transfer, transfer->state == OVER ? transfer->status : status);
    }
}

int64_t tu_transfers_flush(tu_endpoint_t *endpoint)
{
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.send      = flushed,
    };
    ucs_status_ptr_t answer;
    tu_transfer_t *transfer;
    tu_post_t post;
    int64_t verdict = tu_post_begin(&post, endpoint->worker, NULL);

    if (verdict != 0) {
        return verdict;
    }
    if (endpoint->transfers.first == NULL) {
        return tu_post_end(&post, ucp_ep_flush_nbx(endpoint->ep, &post.param));
    }
    transfer = make(endpoint, FLUSH, operation_done, post.operation);
    if (transfer == NULL) {
        return tu_post_end(&post, UCS_STATUS_PTR(UCS_ERR_NO_MEMORY));
    }
    param.user_data = transfer;
    answer          = ucp_ep_flush_nbx(endpoint->ep, &param); /* meanwhile the answers come: not one after the other */
    if (UCS_PTR_IS_ERR(answer)) {
        leave(transfer);
        dispose(transfer);
        return tu_post_end(&post, answer);
    }
    transfer->sending        = answer != NULL;
    post.operation->transfer = transfer;
    advance(endpoint);
    return (int64_t)post.id;
}

/* The status of a put that the owner refused after it had returned; reported once. */
int tu_transfers_status(tu_endpoint_t *endpoint)
{
    ucs_status_t status = endpoint->transfers.put_status;

    endpoint->transfers.put_status = UCS_OK;
    return status;
}

/* ---- fences, and the end ---- */

void tu_transfers_fence(tu_worker_t *worker)
{
    tu_endpoint_t *endpoint;

    for (endpoint = worker->endpoints; endpoint != NULL; endpoint = endpoint->next) {
        endpoint->transfers.fence = endpoint->transfers.first != NULL;
    }
}

/* Gives up the parts that need nothing from the peer now. Returns whether those were all. */
static int cancel_parts(tu_transfer_t *whole)
{
    tu_endpoint_t *endpoint = NULL;
    int under_way           = 0;
    tu_transfer_t *transfer, *next;

    whole->parts++; /* it must not end inside the loop */
    for (transfer = whole->worker->transfers; transfer != NULL; transfer = next) {
        next = transfer->next_of_all;
        if (transfer->owner != whole || transfer->done != part_done) {
            continue;
        }
        if (transfer->endpoint != NULL && endpoint == NULL) {
            endpoint                      = transfer->endpoint;
            endpoint->transfers.advancing = 1; /* which could end `next` */
        }
        under_way |= !tu_transfer_cancel(transfer);
    }
    if (endpoint != NULL) {
        endpoint->transfers.advancing = 0;
        advance(endpoint);
    }
    part_done(whole, UCS_OK);
    return !under_way;
}

/* Gives up a transfer that needs nothing from the peer now. Returns whether it could. */
int tu_transfer_cancel(tu_transfer_t *transfer)
{
    if (transfer->kind == WHOLE) {
        return cancel_parts(transfer);
    }
    if (transfer->kind == FLUSH || transfer->state == SENT || transfer->state == OVER) {
        return 0;
    }
    conclude(transfer, UCS_ERR_CANCELED);
    return 1;
}

/* The endpoint is being closed: no answer will come. UCX completes its parts of the transfers. */
void tu_transfers_forget(tu_endpoint_t *endpoint)
{
    endpoint->transfers.advancing = 1;
    while (endpoint->transfers.first != NULL) {
        conclude(endpoint->transfers.first, UCS_ERR_CANCELED);
    }
    endpoint->transfers.advancing = 0;
}

void tu_transfers_free(tu_worker_t *worker)
{
    while (worker->transfers != NULL) {
        dispose(worker->transfers);
    }
    free(worker->awaiting);
}
