/* The owner's side of remote memory: answers the requests by which peers get and put it, and do atomics on it.
 *
 * Everything in a request is checked: the kind, the token of the memory, the access rights, the range. Answers in
 * flight hold the memory, so that it is not unmapped meanwhile. When a peer goes away, UCX completes the answers to it.
 *
 * If this process has opened no endpoint to a peer, UCX may free its own endpoint to the peer at any time after the
 * callback that named it.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <string.h>

#include "newer.h"
#include "rma/transfer.h"

#define EAGER_GET (96 * 1024)  /* longer gets stay with the owner until they are fetched */
#define BUCKETS 1024           /* hash buckets of memory, by token */

struct tu_served {
    tu_list_t link;            /* in its bucket */
    _Alignas(uint64_t) char token[TU_TOKEN_SIZE];
    char *shown;               /* the token for peers that read or map the memory, in this process */
    const tu_context_t *context;
    ucp_mem_h memory;
    char *address;
    uint64_t length;
    unsigned access;           /* TU_ACCESS_... */
    unsigned uses;             /* requests in flight, and keys of this process */
    unsigned notes;            /* notifications that nobody has taken */
    bool withdrawn;
};

/* An answer in flight, or a put whose data is. */
typedef struct service {
    tu_list_t link;            /* in the list of its worker */
    tu_worker_t *worker;
    tu_served_t *served;       /* the memory; NULL: none is needed */
    ucp_ep_h ep;
    uint64_t endpoint;         /* the id of this side's endpoint; 0: UCX made it by itself */
    tu_remote_answer_t answer; /* UCX sends it from here */
    tu_le64_t old;             /* an atomic's old value; the same */
    ucp_dt_iov_t *iov;         /* the ranges of a list; the same */
} service_t;

/* The memory of all contexts; workers of several threads read it. */
static tu_list_t table[BUCKETS]; /* those that have never had an item are zero */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

/* ---- the memory ---- */

/* Called with the mutex held. */
static tu_list_t *bucket_of(const char *token)
{
    tu_list_t *bucket = &table[tu_le64_load(token) % BUCKETS];

    if (bucket->next == NULL) {
        tu_list_init(bucket);
    }
    return bucket;
}

/* Lets peers that know the token (random bytes) use memory as `access` says. `shared`: behind the memory, at the next
 * multiple of TU_TOKEN_ALIGNMENT, there is room for the token, which peers map with the memory. NULL: there is no memory
 * for this. */
tu_served_t *tu_memory_serve(tu_context_t *context, ucp_mem_h memory, const char *token, uint64_t address,
                             uint64_t length, unsigned access, bool shared)
{
    uint64_t end        = (length + TU_TOKEN_ALIGNMENT - 1) / TU_TOKEN_ALIGNMENT * TU_TOKEN_ALIGNMENT;
    tu_served_t *served = tu_calloc(1, sizeof(*served));

    if (served == NULL) {
        return NULL;
    }
    memcpy(served->token, token, TU_TOKEN_SIZE);
    served->context  = context;
    served->memory   = memory;
    served->address  = (char *)(uintptr_t)address;
    served->length   = length;
    served->access   = access;
    served->shown    = shared ? served->address + end : served->token;
    memcpy(served->shown, token, TU_TOKEN_SIZE);
    pthread_mutex_lock(&mutex);
    tu_list_prepend(bucket_of(token), &served->link);
    pthread_mutex_unlock(&mutex);
    return served;
}

/* Where this process has the token of the memory, as long as peers may use it: for direct.c and mapped.c at a peer. */
uint64_t tu_memory_token_address(const tu_served_t *served)
{
    return (uint64_t)(uintptr_t)served->shown;
}

/* Refuses further requests, and further accesses to mapped memory. Returns the number of uses: of requests in flight, and
 * keys of this process. With none the entry is freed; otherwise call tu_memory_unused after TU_RECORD_UNUSED, and after
 * tu_memory_let_go. */
unsigned tu_memory_withdraw(tu_served_t *served)
{
    unsigned uses;

    pthread_mutex_lock(&mutex);
    tu_list_remove(&served->link);
    /* Peers that have mapped the memory, or read it directly, see that it is closed. */
    __atomic_store_n((uint64_t *)(void *)served->shown, 0, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    explicit_bzero(served->token, TU_TOKEN_SIZE);
    served->withdrawn = true;
    uses              = served->uses;
    pthread_mutex_unlock(&mutex);
    if (uses == 0) {
        free(served);
    }
    return uses;
}

/* Whether no request uses withdrawn memory any more; then the entry is freed. */
bool tu_memory_unused(tu_served_t *served)
{
    unsigned uses;

    pthread_mutex_lock(&mutex);
    uses = served->uses;
    pthread_mutex_unlock(&mutex);
    if (uses == 0) {
        free(served);
    }
    return uses == 0;
}

static tu_served_t *find(const char *token)
{
    tu_served_t *served;

    TU_LIST_FOR_EACH(served, bucket_of(token), link) {
        if (memcmp(served->token, token, TU_TOKEN_SIZE) == 0) {
            return served;
        }
    }
    return NULL;
}

/* Finds and holds the memory of a request, or returns why it is refused. */
static ucs_status_t hold(const tu_remote_request_t *request, unsigned access, uint64_t length, tu_served_t **out)
{
    uint64_t offset     = tu_le64_to(request->offset);
    ucs_status_t status = UCS_ERR_NO_ELEM;
    tu_served_t *served;

    *out = NULL;
    pthread_mutex_lock(&mutex);
    served = find(request->token);
    if (served != NULL && (served->access & access) != 0) {
        status = UCS_ERR_INVALID_ADDR;
        if (length > 0 && length <= served->length && offset <= served->length - length) {
            served->uses++;
            *out   = served;
            status = UCS_OK;
        }
    }
    pthread_mutex_unlock(&mutex);
    return status;
}

/* Returns true if the memory was withdrawn, and is in use no more. */
static bool let_go(tu_served_t *served)
{
    bool unused;

    pthread_mutex_lock(&mutex);
    served->uses--;
    unused = served->uses == 0 && served->withdrawn;
    pthread_mutex_unlock(&mutex);
    return unused;
}

/* Keeps memory of this process mapped for a peer in this process, until tu_memory_let_go. NULL: it was closed. */
tu_served_t *tu_memory_hold(const char *token)
{
    tu_served_t *served;

    pthread_mutex_lock(&mutex);
    served = find(token);
    if (served != NULL) {
        served->uses++;
    }
    pthread_mutex_unlock(&mutex);
    return served;
}

void tu_memory_let_go(tu_served_t *served)
{
    (void)let_go(served);
}

static void release(tu_rma_t *rma, tu_served_t *served)
{
    if (let_go(served)) {
        tu_hook_add(rma->worker, &rma->unused_hook);
    }
}

/* Tells Python that withdrawn memory is no longer in use, as soon as the ring has room. */
static unsigned tell_unused(tu_hook_t *hook)
{
    tu_rma_t *rma = TU_ITEM(hook, tu_rma_t, unused_hook);

    if (tu_ring_has_slack(rma->worker)) {
        tu_hook_remove(hook);
        tu_ring_append(rma->worker, TU_RECORD_UNUSED, 0, UCS_OK, 0, 0, 0);
    }
    return 0;
}

/* ---- answers ---- */

/* Answers a request for which there is no memory. UCX copies the answer; an older one cannot, and nothing is sent. */
static void refuse(const tu_remote_request_t *request, ucp_ep_h ep)
{
    tu_remote_answer_t answer = {.kind = TU_REMOTE_ANSWER, .status = (uint8_t)-UCS_ERR_NO_MEMORY};
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
        .flags        = UCP_AM_SEND_FLAG_EAGER | TU_AM_SEND_COPY_HEADER,
    };
    ucs_status_ptr_t sent;

    if (!tu_ucx_has(1, 17)) {
        return;
    }
    answer.id = request->id;
    sent      = ucp_am_send_nbx(ep, TU_REMOTE_AM_ID, &answer, sizeof(answer), NULL, 0, &param);
    if (UCS_PTR_IS_PTR(sent)) {
        ucp_request_free(sent);
    }
}

/* NULL: there is no memory for it; the peer is told so. */
static service_t *begin(tu_rma_t *rma, const tu_remote_request_t *request, const ucp_am_recv_param_t *param)
{
    service_t *service = tu_calloc(1, sizeof(*service));

    if (service == NULL) {
        refuse(request, param->reply_ep);
        return NULL;
    }
    service->worker      = rma->worker;
    service->ep          = param->reply_ep;
    service->answer.kind = TU_REMOTE_ANSWER;
    service->answer.id   = request->id;
    tu_list_prepend(&rma->services, &service->link);
    return service;
}

static void end(service_t *service)
{
    if (service->served != NULL) {
        release(tu_rma_of(service->worker), service->served);
    }
    tu_list_remove(&service->link);
    free(service->iov);
    free(service);
}

/* Makes UCX use the owner's registration of the memory. With a registration of UCX's own, an answer that ends with its
 * endpoint would wait until the memory is unmapped (ucp_request_memh_invalidate), and crash then if the worker has
 * gone. */
static void use_registration(const service_t *service, ucp_request_param_t *param)
{
#if UCP_API_VERSION >= UCP_VERSION(1, 14)
    if (service->served != NULL && service->served->context == service->worker->context) {
        param->op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
        param->memh          = service->served->memory;
    }
#else
    (void)service;
    (void)param;
#endif
}

static void answer_sent(void *request, ucs_status_t status, void *user_data)
{
    (void)status; /* if it failed, the peer has gone */
    ucp_request_free(request);
    end(user_data);
}

static void answer(service_t *service, ucs_status_t status, const void *data, uint64_t length, unsigned flags)
{
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS |
                        UCP_OP_ATTR_FIELD_MEMORY_TYPE,
        .flags       = flags,
        .cb.send     = answer_sent,
        .user_data   = service,
        .memory_type = UCS_MEMORY_TYPE_HOST,
    };
    ucs_status_ptr_t sent;

    service->answer.status = (uint8_t)-status;
    if (service->iov != NULL) {
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_DATATYPE;
        param.datatype      = ucp_dt_make_iov();
    } else if (length > 0) {
        use_registration(service, &param);
    }
    sent = ucp_am_send_nbx(service->ep, TU_REMOTE_AM_ID, &service->answer, sizeof(service->answer), data, length,
                           &param);
    if (!UCS_PTR_IS_PTR(sent)) {
        end(service);
    }
}

/* UCX's endpoint for the answer; NULL if this side has closed its endpoint. */
static ucp_ep_h endpoint_of(const service_t *service)
{
    tu_endpoint_t *endpoint;

    if (service->endpoint == 0) {
        return service->ep; /* valid, because UCX has just received by it */
    }
    TU_LIST_FOR_EACH(endpoint, &service->worker->endpoints, link) {
        if (endpoint->id == service->endpoint) {
            return endpoint->ep;
        }
    }
    return NULL;
}

static void put_received(void *request, ucs_status_t status, size_t length, void *user_data)
{
    service_t *service = user_data;

    (void)length;
    if (request != NULL) {
        ucp_request_free(request);
    }
    if (status != UCS_OK || endpoint_of(service) == NULL) {
        end(service);
    } else {
        answer(service, UCS_OK, NULL, 0, UCP_AM_SEND_FLAG_EAGER);
    }
}

/* ---- requests ---- */

static void get(service_t *service, const tu_remote_request_t *request)
{
    uint64_t length     = tu_le64_to(request->length);
    ucs_status_t status = hold(request, TU_ACCESS_READ, length, &service->served);
    unsigned flags      = length > EAGER_GET || (request->flags & TU_REMOTE_RENDEZVOUS) != 0 ?
                                  UCP_AM_SEND_FLAG_RNDV :
                                  UCP_AM_SEND_FLAG_EAGER;

    if (status != UCS_OK) {
        answer(service, status, NULL, 0, UCP_AM_SEND_FLAG_EAGER);
    } else {
        answer(service, UCS_OK, service->served->address + tu_le64_to(request->offset), length, flags);
    }
}

static ucs_status_t put(service_t *service, const tu_remote_request_t *request, void *data, size_t length,
                        const ucp_am_recv_param_t *param)
{
    bool rendezvous           = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
    ucs_status_t status       = hold(request, TU_ACCESS_WRITE, length, &service->served);
    ucp_request_param_t taken = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE,
        .cb.recv_am   = put_received,
        .user_data    = service,
        .memory_type  = UCS_MEMORY_TYPE_HOST,
    };
    tu_worker_t *worker = service->worker;
    ucs_status_ptr_t received;
    char *to;

    if (status != UCS_OK) {
        answer(service, status, NULL, 0, UCP_AM_SEND_FLAG_EAGER);
        return rendezvous ? status : UCS_OK;
    }
    to = service->served->address + tu_le64_to(request->offset);
    if (!rendezvous) {
        tu_mapped_copy(true, data, to, length);
        answer(service, UCS_OK, NULL, 0, UCP_AM_SEND_FLAG_EAGER);
        return UCS_OK;
    }
    service->endpoint = tu_am_sender(worker, param);
    use_registration(service, &taken);
    received          = ucp_am_recv_data_nbx(worker->worker, data, to, length, &taken);
    if (!UCS_PTR_IS_PTR(received)) {
        put_received(NULL, UCS_PTR_RAW_STATUS(received), length, service);
    }
    return UCS_OK;
}

/* Validates a request for an atomic, and does it. */
static ucs_status_t do_atomic(service_t *service, const tu_remote_request_t *request, const void *data, size_t length)
{
    uint64_t size            = tu_le64_to(request->length);
    tu_atomic_terms_t atomic = {.operation = request->flags};
    tu_remote_operands_t operands;
    ucs_status_t status;
    char *at;

    if (length != sizeof(operands) || (size != 4 && size != 8) || atomic.operation > TU_ATOMIC_XOR) {
        return UCS_ERR_INVALID_PARAM;
    }
    status = hold(request, TU_ACCESS_ATOMIC, size, &service->served);
    if (status != UCS_OK) {
        return status;
    }
    at = service->served->address + tu_le64_to(request->offset);
    if ((uintptr_t)at % size == 0) {
        memcpy(&operands, data, sizeof(operands));
        atomic.operand = tu_le64_to(operands.operand);
        atomic.swapped = tu_le64_to(operands.swapped);
        service->old   = tu_le64_from(tu_mapped_atomic(&atomic, at, size));
    } else {
        status = UCS_ERR_INVALID_ADDR;
    }
    release(tu_rma_of(service->worker), service->served);
    service->served = NULL; /* the answer does not use it */
    return status;
}

static ucs_status_t atomic(service_t *service, const tu_remote_request_t *request, const void *data, size_t length,
                           bool rendezvous)
{
    ucs_status_t status = rendezvous ? UCS_ERR_INVALID_PARAM : do_atomic(service, request, data, length);

    answer(service, status, &service->old, status == UCS_OK ? sizeof(service->old) : 0, UCP_AM_SEND_FLAG_EAGER);
    return rendezvous ? status : UCS_OK; /* an error refuses the data */
}

/* ---- lists of ranges ---- */

/* Describes the ranges of a get as the iov of its answer. */
static ucs_status_t describe(service_t *service, const tu_remote_range_t *ranges, size_t count)
{
    size_t i;

    service->iov = tu_calloc(count, sizeof(*service->iov));
    if (service->iov == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    for (i = 0; i < count; i++) {
        service->iov[i] = (ucp_dt_iov_t){
            .buffer = service->served->address + tu_le64_to(ranges[i].offset),
            .length = tu_le64_to(ranges[i].length),
        };
    }
    return UCS_OK;
}

/* Validates a request with a list, and does it as a whole: stores the data of a put, describes those of a get. *count
 * becomes the number of ranges. */
static ucs_status_t do_list(service_t *service, const tu_remote_request_t *request, const char *data, size_t length,
                            size_t *count)
{
    bool put                  = request->kind == TU_REMOTE_PUT_LIST;
    uint64_t total            = tu_le64_to(request->length);
    tu_remote_request_t first = *request;
    tu_remote_range_t ranges[TU_MOST_RANGES];
    ucs_status_t status;
    size_t i;

    *count = (size_t)tu_le64_to(request->offset);
    if (*count == 0 || *count > TU_MOST_RANGES || length < *count * sizeof(*ranges) ||
        (put && length - *count * sizeof(*ranges) != total)) {
        return UCS_ERR_INVALID_PARAM;
    }
    memcpy(ranges, data, *count * sizeof(*ranges)); /* the data are not aligned */
    data += *count * sizeof(*ranges);
    first.offset = ranges[0].offset; /* hold() checks the first range, the next call all of them */
    status       = hold(&first, put ? TU_ACCESS_WRITE : TU_ACCESS_READ, tu_le64_to(ranges[0].length),
                        &service->served);
    if (status != UCS_OK) {
        return status;
    }
    if (!tu_gathered_check(ranges, *count, service->served->length, total)) {
        return UCS_ERR_INVALID_ADDR;
    }
    if (!put) {
        return describe(service, ranges, *count);
    }
    for (i = 0; i < *count; i++) {
        tu_mapped_copy(true, (char *)data, service->served->address + tu_le64_to(ranges[i].offset),
                       tu_le64_to(ranges[i].length));
        data += tu_le64_to(ranges[i].length);
    }
    return UCS_OK;
}

/* Answers a request with a list, which is eager. */
static ucs_status_t list(service_t *service, const tu_remote_request_t *request, const void *data, size_t length,
                         bool rendezvous)
{
    size_t count        = 0;
    ucs_status_t status = rendezvous ? UCS_ERR_INVALID_PARAM : do_list(service, request, data, length, &count);

    answer(service, status, service->iov, service->iov != NULL ? count : 0, UCP_AM_SEND_FLAG_EAGER);
    return rendezvous ? status : UCS_OK; /* an error refuses the data */
}

/* ---- notifications ---- */

typedef struct note {
    tu_list_t link;            /* in the list of its worker */
    char token[TU_TOKEN_SIZE];
    size_t length;
    char data[];
} note_t;

/* Counts a notification, if its memory may be written to and has room for it. */
static ucs_status_t count_note(const tu_remote_request_t *request)
{
    ucs_status_t status = UCS_ERR_NO_ELEM;
    tu_served_t *served;

    pthread_mutex_lock(&mutex);
    served = find(request->token);
    if (served != NULL && (served->access & TU_ACCESS_WRITE) != 0) {
        status         = served->notes < TU_MOST_NOTES ? UCS_OK : UCS_ERR_NO_RESOURCE;
        served->notes += status == UCS_OK;
    }
    pthread_mutex_unlock(&mutex);
    return status;
}

/* Keeps a notification until Python takes it. With UCS_ERR_NO_RESOURCE the peer tries again later. */
static ucs_status_t keep_note(service_t *service, const tu_remote_request_t *request, const void *data, size_t length,
                              uint64_t sender)
{
    tu_rma_t *rma = tu_rma_of(service->worker);
    ucs_status_t status;
    note_t *note;

    if (length > TU_LONGEST_NOTE || length != tu_le64_to(request->length)) {
        return UCS_ERR_INVALID_PARAM;
    }
    if (!tu_ring_has_slack(service->worker)) {
        return UCS_ERR_NO_RESOURCE;
    }
    note = tu_malloc(sizeof(*note) + length);
    if (note == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    status = count_note(request);
    if (status != UCS_OK) {
        free(note);
        return status;
    }
    memcpy(note->token, request->token, TU_TOKEN_SIZE);
    memcpy(note->data, data, length);
    note->length = length;
    tu_list_append(&rma->notes, &note->link);
    tu_ring_append(service->worker, TU_RECORD_NOTE, sender, UCS_OK, length, 0, (uint64_t)(uintptr_t)note);
    return UCS_OK;
}

/* Answers a notification, which is eager. */
static ucs_status_t note(service_t *service, const tu_remote_request_t *request, const void *data, size_t length,
                         const ucp_am_recv_param_t *param)
{
    bool rendezvous     = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
    uint64_t sender     = tu_am_sender(service->worker, param);
    ucs_status_t status = rendezvous ? UCS_ERR_INVALID_PARAM : keep_note(service, request, data, length, sender);

    answer(service, status, NULL, 0, UCP_AM_SEND_FLAG_EAGER);
    return rendezvous ? status : UCS_OK; /* an error refuses the data */
}

/* Copies what is in a notification, and frees it. */
void tu_note_take(uint64_t pointer, char *token, char *data)
{
    note_t *note = (note_t *)(uintptr_t)pointer;

    memcpy(token, note->token, TU_TOKEN_SIZE);
    memcpy(data, note->data, note->length);
    tu_list_remove(&note->link);
    free(note);
}

/* The program has one notification about this memory less to take. */
void tu_memory_note_taken(tu_served_t *served)
{
    pthread_mutex_lock(&mutex);
    served->notes--;
    pthread_mutex_unlock(&mutex);
}

/* A message from any peer: a request, or an answer to a request of this worker. */
static ucs_status_t message_arrived(void *arg, const void *header, size_t header_length, void *data, size_t length,
                                    const ucp_am_recv_param_t *param)
{
    tu_rma_t *rma   = arg;
    bool rendezvous = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
    tu_remote_request_t request;
    tu_remote_answer_t answer;
    service_t *service;

    if (header_length == sizeof(answer)) {
        memcpy(&answer, header, sizeof(answer));
        if (answer.kind == TU_REMOTE_ANSWER) {
            tu_requester_answered(rma, &answer, data, length, rendezvous);
            return UCS_OK;
        }
    } else if (header_length == sizeof(request) && (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP)) {
        memcpy(&request, header, sizeof(request));
        if (request.kind != TU_REMOTE_ANSWER && request.kind >= TU_REMOTE_GET && request.kind <= TU_REMOTE_NOTE) {
            service = begin(rma, &request, param);
            if (service != NULL && request.kind == TU_REMOTE_NOTE) {
                return note(service, &request, data, length, param);
            }
            if (service != NULL && request.kind >= TU_REMOTE_GET_LIST) {
                return list(service, &request, data, length, rendezvous);
            }
            if (service != NULL && request.kind == TU_REMOTE_ATOMIC) {
                return atomic(service, &request, data, length, rendezvous);
            }
            if (service != NULL && request.kind == TU_REMOTE_PUT) {
                return put(service, &request, data, length, param);
            }
            if (service != NULL) {
                get(service, &request);
                return rendezvous ? UCS_ERR_INVALID_PARAM : UCS_OK; /* a get has no data */
            }
        }
    }
    return rendezvous ? UCS_ERR_NO_ELEM : UCS_OK;
}

ucs_status_t tu_owner_open(tu_rma_t *rma)
{
    tu_list_init(&rma->services);
    tu_list_init(&rma->notes);
    tu_hook_init(&rma->unused_hook, tell_unused);
    if ((rma->worker->context->features & UCP_FEATURE_AM) == 0) {
        return UCS_OK;
    }
    return tu_am_handle(rma->worker, TU_REMOTE_AM_ID, message_arrived, rma);
}

/* For a worker that will not progress any more: its answers do not use memory from now on. */
void tu_worker_stop_serving(tu_worker_t *worker)
{
    service_t *service;

    TU_LIST_FOR_EACH(service, &tu_rma_of(worker)->services, link) {
        if (service->served != NULL) {
            release(tu_rma_of(worker), service->served);
            service->served = NULL;
        }
    }
}

void tu_owner_close(tu_rma_t *rma)
{
    while (!tu_list_is_empty(&rma->services)) {
        end(TU_LIST_FIRST(&rma->services, service_t, link));
    }
    while (!tu_list_is_empty(&rma->notes)) {
        note_t *note = TU_LIST_FIRST(&rma->notes, note_t, link);

        tu_list_remove(&note->link);
        free(note);
    }
    tu_hook_remove(&rma->unused_hook); /* which that may have added */
}
