/* The owner's side of memory that peers get and put by messages.
 *
 * Everything in a request is checked: the kind, the token of the memory, the access rights, the range. Answers in
 * flight hold the memory, so that it is not unmapped meanwhile, and are counted for each peer. When a peer goes away,
 * UCX completes the answers to it.
 *
 * If this process has opened no endpoint to a peer, UCX may free its own endpoint to the peer at any time after the
 * callback that named it.
 */
#include <pthread.h>
#include <string.h>

#include "rma/rma.h"

#define BUCKETS 1024           /* hash buckets of memory, by token */

struct tu_served {
    tu_served_t *next;
    char token[TU_TOKEN_SIZE];
    const tu_context_t *context;
    ucp_mem_h memory;
    char *address;
    uint64_t length;
    int readable, writable;
    unsigned uses;
    int withdrawn;
};

/* An answer in flight, or a put whose data is. */
struct tu_service {
    tu_service_t *next, **link; /* of the worker's */
    tu_worker_t *worker;
    tu_served_t *served;       /* the memory; NULL: none is needed */
    tu_load_t *load;
    ucp_ep_h ep;
    uint64_t endpoint;         /* the id of our endpoint; 0: it is UCX's own */
    tu_remote_answer_t answer;
};

/* The number of answers to one peer. */
struct tu_load {
    tu_load_t *next;
    ucp_ep_h ep;               /* only for comparison: it may have been freed */
    unsigned count;
};

/* The memory of all contexts; workers of several threads read it. */
static tu_served_t *table[BUCKETS];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

/* ---- the memory ---- */

static tu_served_t **bucket_of(const char *token)
{
    uint64_t number;

    memcpy(&number, token, sizeof(number));
    return &table[number % BUCKETS];
}

/* Lets peers that know the token (random bytes) get and put memory. NULL: out of memory. */
tu_served_t *tu_memory_serve(tu_context_t *context, tu_memory_t *memory, const char *token, uint64_t address,
                             uint64_t length, int readable, int writable)
{
    tu_served_t *served = calloc(1, sizeof(*served));
    tu_served_t **bucket;

    if (served == NULL) {
        return NULL;
    }
    memcpy(served->token, token, TU_TOKEN_SIZE);
    served->context  = context;
    served->memory   = (ucp_mem_h)memory;
    served->address  = (char *)(uintptr_t)address;
    served->length   = length;
    served->readable = readable;
    served->writable = writable;
    pthread_mutex_lock(&mutex);
    bucket       = bucket_of(token);
    served->next = *bucket;
    *bucket      = served;
    pthread_mutex_unlock(&mutex);
    return served;
}

/* Refuses further requests. Returns the number of requests in flight. With none the entry is freed; otherwise call
 * tu_memory_unused when TU_RECORD_UNUSED has come. */
unsigned tu_memory_withdraw(tu_served_t *served)
{
    tu_served_t **link;
    unsigned uses;

    pthread_mutex_lock(&mutex);
    for (link = bucket_of(served->token); *link != served; link = &(*link)->next) {
    }
    *link             = served->next;
    served->withdrawn = 1;
    uses              = served->uses;
    pthread_mutex_unlock(&mutex);
    if (uses == 0) {
        free(served);
    }
    return uses;
}

/* Whether no request uses withdrawn memory any more; then the entry is freed. */
int tu_memory_unused(tu_served_t *served)
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

/* Finds and holds the memory of a request, or returns why it is refused. */
static ucs_status_t use(const tu_remote_request_t *request, int put, uint64_t length, tu_served_t **out)
{
    ucs_status_t status = UCS_ERR_NO_ELEM;
    tu_served_t *served;

    *out = NULL;
    pthread_mutex_lock(&mutex);
    served = *bucket_of(request->token);
    while (served != NULL && memcmp(served->token, request->token, TU_TOKEN_SIZE) != 0) {
        served = served->next;
    }
    if (served != NULL && (put ? served->writable : served->readable)) {
        status = UCS_ERR_INVALID_ADDR;
        if (length > 0 && length <= served->length && request->offset <= served->length - length) {
            served->uses++;
            *out   = served;
            status = UCS_OK;
        }
    }
    pthread_mutex_unlock(&mutex);
    return status;
}

static void let_go(tu_worker_t *worker, tu_served_t *served)
{
    pthread_mutex_lock(&mutex);
    served->uses--;
    worker->unused |= served->uses == 0 && served->withdrawn;
    pthread_mutex_unlock(&mutex);
}

/* ---- answers ---- */

static tu_load_t **load_of(tu_worker_t *worker, ucp_ep_h ep)
{
    tu_load_t **link = &worker->loads[(uintptr_t)ep / 64 % TU_LOADS];

    while (*link != NULL && (*link)->ep != ep) {
        link = &(*link)->next;
    }
    return link;
}

/* Counts one more answer to a peer. NULL: the peer has its limit in flight, or out of memory. */
static tu_load_t *begin_load(tu_worker_t *worker, ucp_ep_h ep)
{
    tu_load_t **link = load_of(worker, ep);

    if (*link == NULL) {
        *link = calloc(1, sizeof(**link));
        if (*link == NULL) {
            return NULL;
        }
        (*link)->ep = ep;
    }
    if ((*link)->count >= TU_REMOTE_LIMIT) {
        return NULL;
    }
    (*link)->count++;
    return *link;
}

static void end_load(tu_worker_t *worker, tu_load_t *load)
{
    tu_load_t **link;

    if (--load->count == 0) {
        link  = load_of(worker, load->ep);
        *link = load->next;
        free(load);
    }
}

static tu_service_t *begin(tu_worker_t *worker, const tu_remote_request_t *request, const ucp_am_recv_param_t *param)
{
    tu_service_t *service = calloc(1, sizeof(*service));

    if (service == NULL) {
        return NULL;
    }
    service->load = begin_load(worker, param->reply_ep);
    if (service->load == NULL) {
        free(service);
        return NULL;
    }
    service->worker       = worker;
    service->ep           = param->reply_ep;
    service->answer.kind  = TU_REMOTE_ANSWER;
    service->answer.id    = request->id;
    service->answer.nonce = request->nonce;
    service->next         = worker->services;
    service->link         = &worker->services;
    if (service->next != NULL) {
        service->next->link = &service->next;
    }
    worker->services = service;
    return service;
}

static void end(tu_service_t *service)
{
    if (service->served != NULL) {
        let_go(service->worker, service->served);
    }
    end_load(service->worker, service->load);
    *service->link = service->next;
    if (service->next != NULL) {
        service->next->link = service->link;
    }
    free(service);
}

/* Makes UCX use the owner's registration. With a registration of its own, a request that ends with its endpoint would
 * wait until ours ends (ucp_request_memh_invalidate), and would crash then if the worker is gone. */
static void use_registration(const tu_service_t *service, ucp_request_param_t *param)
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
    (void)status; /* on failure the peer is gone */
    ucp_request_free(request);
    end(user_data);
}

static void answer(tu_service_t *service, ucs_status_t status, const void *data, uint64_t length, unsigned flags)
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
    if (length > 0) {
        use_registration(service, &param);
    }
    sent = ucp_am_send_nbx(service->ep, TU_REMOTE_AM_ID, &service->answer, sizeof(service->answer), data, length, &param);
    if (!UCS_PTR_IS_PTR(sent)) {
        end(service);
    }
}

/* UCX's endpoint for the answer; NULL if ours was closed. */
static ucp_ep_h endpoint_of(const tu_service_t *service)
{
    tu_endpoint_t *endpoint;

    if (service->endpoint == 0) {
        return service->ep; /* valid, because UCX has just received by it */
    }
    for (endpoint = service->worker->endpoints; endpoint != NULL; endpoint = endpoint->next) {
        if (endpoint->id == service->endpoint) {
            return endpoint->ep;
        }
    }
    return NULL;
}

static void put_received(void *request, ucs_status_t status, size_t length, void *user_data)
{
    tu_service_t *service = user_data;

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

/* Writes an aligned word by one store. memcpy may write it twice, and overwrite what another peer has stored in
 * between, into a lock that was just released. */
void tu_remote_store(char *to, const void *data, uint64_t length)
{
    uint64_t eight;
    uint32_t four;
    uint16_t two;

    if (length == 8 && (uintptr_t)to % 8 == 0) {
        memcpy(&eight, data, 8);
        __atomic_store_n((uint64_t *)(void *)to, eight, __ATOMIC_RELEASE);
    } else if (length == 4 && (uintptr_t)to % 4 == 0) {
        memcpy(&four, data, 4);
        __atomic_store_n((uint32_t *)(void *)to, four, __ATOMIC_RELEASE);
    } else if (length == 2 && (uintptr_t)to % 2 == 0) {
        memcpy(&two, data, 2);
        __atomic_store_n((uint16_t *)(void *)to, two, __ATOMIC_RELEASE);
    } else if (length == 1) {
        __atomic_store_n(to, *(const char *)data, __ATOMIC_RELEASE);
    } else {
        __atomic_thread_fence(__ATOMIC_RELEASE);
        memcpy(to, data, length);
        __atomic_thread_fence(__ATOMIC_RELEASE);
    }
}

static void get(tu_service_t *service, const tu_remote_request_t *request)
{
    ucs_status_t status = use(request, 0, request->length, &service->served);
    unsigned flags      = request->length > TU_EAGER_GET || (request->flags & TU_REMOTE_RENDEZVOUS) != 0 ?
                                  UCP_AM_SEND_FLAG_RNDV :
                                  UCP_AM_SEND_FLAG_EAGER;

    if (status != UCS_OK) {
        answer(service, status, NULL, 0, UCP_AM_SEND_FLAG_EAGER);
    } else {
        answer(service, UCS_OK, service->served->address + request->offset, request->length, flags);
    }
}

static ucs_status_t put(tu_service_t *service, const tu_remote_request_t *request, void *data, size_t length,
                        const ucp_am_recv_param_t *param)
{
    int rendezvous            = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
    ucs_status_t status       = use(request, 1, length, &service->served);
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
    to = service->served->address + request->offset;
    if (!rendezvous) {
        tu_remote_store(to, data, length);
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

/* A message from any peer: a request, or an answer to one of ours. */
static ucs_status_t arrived(void *arg, const void *header, size_t header_length, void *data, size_t length,
                            const ucp_am_recv_param_t *param)
{
    int rendezvous = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
    tu_remote_request_t request;
    tu_remote_answer_t answer;
    tu_service_t *service;

    if (header_length == sizeof(answer)) {
        memcpy(&answer, header, sizeof(answer));
        if (answer.kind == TU_REMOTE_ANSWER) {
            return tu_transfer_answered(arg, &answer, data, length, rendezvous);
        }
    } else if (header_length == sizeof(request) && (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP)) {
        memcpy(&request, header, sizeof(request));
        if (request.kind == TU_REMOTE_GET || request.kind == TU_REMOTE_PUT) {
            service = begin(arg, &request, param);
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

ucs_status_t tu_remote_handle(tu_worker_t *worker)
{
    return tu_am_handle(worker, TU_REMOTE_AM_ID, arrived, worker);
}

/* The worker will not be progressed any more: its answers do not use memory from now on. */
void tu_worker_abandon(tu_worker_t *worker)
{
    tu_service_t *service;

    for (service = worker->services; service != NULL; service = service->next) {
        if (service->served != NULL) {
            let_go(worker, service->served);
            service->served = NULL;
        }
    }
}

void tu_services_free(tu_worker_t *worker)
{
    while (worker->services != NULL) {
        end(worker->services);
    }
}
