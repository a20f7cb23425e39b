/* The key gate: who may connect to the ports of UCX's TCP transport, and to whom UCX may connect.
 *
 * UCX trusts everything that arrives at these ports, and whatever answers where it connects. A worker therefore has
 * pairs of keys, one for each peer that was let in. The connecting process sends the peer's key before UCX's first
 * byte. The listening process reads it before UCX knows of the connection, and answers with the other key of the pair;
 * it closes the connection if it has no such pair, unless it admits the host without a key (tu_gate_admit). The
 * connecting process reads the answer before UCX reads anything.
 *
 * UCX has no hooks for this. The entries of the import table (GOT) of libucs for the functions of the C library that
 * TCP needs are replaced with the functions below. They act on a socket only if UCX listens there, or connects it, for
 * one of our workers: `acting` says for which worker this thread is inside UCX. Other users of the same libucs are not
 * affected. UCX accepts in a thread of its own, so the pairs have a lock. */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "native.h"

/* Descriptors with larger numbers are refused: nobody has so many (fs.nr_open). */
#define MAX_DESCRIPTORS (1 << 20)
#define BUCKETS 1024
/* How many connections one call of accept closes before it lets UCX go on: about a third of a millisecond. */
#define STRANGERS_AT_ONCE 32
/* The kernel reports a connection only when its first bytes have come, or after so many seconds. */
#define DEFER_SECONDS 3
/* Nanoseconds between two lines in the log about strangers. */
#define LOG_INTERVAL 60000000000u

typedef unsigned char tu_key_t[TU_KEY];

/* An IP address and a port. Unused bytes are 0. */
typedef struct place {
    int family;
    unsigned port;
    unsigned char ip[16];      /* of an IPv4 address, the first 4 */
} place_t;

typedef struct network {
    place_t place;             /* port 0 */
    unsigned prefix;           /* bits */
    bool wants_keys;           /* the latest refusal by one of its hosts was of a connection without a key */
} network_t;

typedef struct port {
    int fd;                    /* -1: UCX has closed it */
    tu_address_t address;
} port_t;

struct tu_gate {
    unsigned lowest, highest;  /* TCP_PORT_RANGE; 0: any */
    bool ready;                /* UCX's worker was created */
    bool used_up;              /* no port of the range was free */
    bool lost;                 /* UCX has stopped listening at a port; its thread may write this */
    unsigned count;
    port_t ports[TU_DATA_PORTS];
    tu_list_t pairs;
    tu_pair_t *own;            /* for hosts that no pair is for; NULL: connect to no such host */
    network_t *networks;       /* hosts that need no key */
    size_t network_count;
    uint64_t strangers;        /* connections that were closed; UCX's thread writes this */
    uint64_t logged;           /* strangers when the last line was logged */
    uint64_t next_log;
};

struct tu_pair {
    tu_gate_t *gate;
    tu_list_t link;            /* in the gate's pairs: the newest first, those that were refused last */
    tu_list_t by_key;          /* in `keys` */
    tu_key_t ours;             /* opens our ports */
    tu_key_t theirs;           /* opens the peer's ports */
    place_t *places;           /* where the peer listens */
    size_t count;
    bool known;                /* the peer has it, too, as far as we know */
};

/* A socket on which UCX listens for one of our workers; or one that it connects, until the answer has come. */
typedef struct watched {
    tu_gate_t *gate;           /* of its worker */
    bool listens;
    unsigned port;             /* if it listens: its place in gate->ports */
    place_t place;             /* if it connects: where */
    bool keyless;              /* no key is shown, and what comes is UCX's */
    bool shown;                /* the key was sent */
    size_t received;           /* bytes of the answer */
    tu_key_t key;
    tu_key_t expected;
    tu_key_t answer;
} watched_t;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* for the lists, and for networks */
static tu_list_t keys[BUCKETS];
static watched_t *watched[MAX_DESCRIPTORS];
static const char *missing;    /* a function that libucs does not import: it connects in some other way */
static __thread tu_gate_t *acting;

/* ---- addresses ---- */

static bool place_of(const struct sockaddr *address, place_t *place)
{
    memset(place, 0, sizeof(*place));
    place->family = address->sa_family;
    if (address->sa_family == AF_INET) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)(const void *)address;

        memcpy(place->ip, &v4->sin_addr, 4);
        place->port = ntohs(v4->sin_port);
        return true;
    }
    if (address->sa_family == AF_INET6) {
        const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)(const void *)address;

        memcpy(place->ip, &v6->sin6_addr, 16);
        place->port = ntohs(v6->sin6_port);
        return true;
    }
    return false;
}

static bool place_parse(const tu_address_t *address, place_t *place)
{
    struct sockaddr_storage storage;
    socklen_t length;

    return tu_sockaddr_make(&storage, &length, address->family, address->ip, address->port, 0) &&
           place_of((const struct sockaddr *)&storage, place);
}

static bool contains(const network_t *network, const place_t *place)
{
    unsigned whole = network->prefix / 8;
    unsigned bits  = network->prefix % 8;

    return network->place.family == place->family && memcmp(network->place.ip, place->ip, whole) == 0 &&
           (bits == 0 || (network->place.ip[whole] ^ place->ip[whole]) >> (8 - bits) == 0);
}

/* The network of a host that needs no key; NULL if it needs one. */
static network_t *admitted_network(const tu_gate_t *gate, const place_t *place)
{
    for (size_t i = 0; i < gate->network_count; i++) {
        if (contains(&gate->networks[i], place)) {
            return &gate->networks[i];
        }
    }
    return NULL;
}

/* ---- pairs ---- */

static tu_list_t *bucket_of_key(const tu_key_t key)
{
    return &keys[(key[0] | key[1] << 8) % BUCKETS];
}

/* Compares all bytes, so that the time says nothing about the key. */
static bool same_key(const tu_key_t one, const tu_key_t other)
{
    unsigned char difference = 0;

    for (size_t i = 0; i < TU_KEY; i++) {
        difference |= one[i] ^ other[i];
    }
    return difference == 0;
}

static tu_pair_t *pair_with_key(const tu_gate_t *gate, const tu_key_t shown)
{
    tu_pair_t *pair, *found = NULL;

    TU_LIST_FOR_EACH(pair, bucket_of_key(shown), by_key) {
        if (pair->gate == gate && same_key(pair->ours, shown)) {
            found = pair;
        }
    }
    return found;
}

/* The first pair for a place that the peer has, too; else the first; or NULL. Of many exchanges at once most pairs are
 * not at the peer yet, or never will be, and UCX gives up after 25 attempts. */
static tu_pair_t *pair_for_place(const tu_gate_t *gate, const place_t *place)
{
    tu_pair_t *pair, *found = NULL;

    TU_LIST_FOR_EACH(pair, &gate->pairs, link) {
        for (size_t i = 0; i < pair->count; i++) {
            if (memcmp(&pair->places[i], place, sizeof(*place)) != 0) {
                continue;
            }
            if (pair->known) {
                return pair;
            }
            if (found == NULL) {
                found = pair;
            }
        }
    }
    return found;
}

/* Adds a pair. The gate lets in whoever shows `ours`, and answers with `theirs`. Where UCX connects to one of the
 * addresses, the gate shows `theirs`. Returns NULL if there is no memory. */
tu_pair_t *tu_gate_add(tu_worker_t *worker, const char *ours, const char *theirs, const tu_address_t *addresses,
                       size_t count)
{
    tu_pair_t *pair = tu_calloc(1, sizeof(*pair));
    place_t *places = tu_calloc(count + 1, sizeof(*places));

    if (pair == NULL || places == NULL) {
        free(pair);
        free(places);
        return NULL;
    }
    for (size_t i = 0; i < count; i++) {
        pair->count += place_parse(&addresses[i], &places[pair->count]);
    }
    pair->places = places;
    pair->gate   = worker->gate;
    memcpy(pair->ours, ours, TU_KEY);
    memcpy(pair->theirs, theirs, TU_KEY);
    pthread_mutex_lock(&mutex);
    tu_list_prepend(&pair->gate->pairs, &pair->link);
    tu_list_append(bucket_of_key(pair->ours), &pair->by_key);
    pthread_mutex_unlock(&mutex);
    return pair;
}

/* From now on UCX shows `theirs` to hosts that no other pair is for: they have the worker's address. */
void tu_gate_show_by_default(tu_pair_t *pair)
{
    pair->gate->own = pair;
}

/* The peer has this pair, too: it is shown before others. */
void tu_gate_know(tu_pair_t *pair)
{
    pthread_mutex_lock(&mutex);
    pair->known = true;
    pthread_mutex_unlock(&mutex);
}

void tu_gate_remove(tu_pair_t *pair)
{
    pthread_mutex_lock(&mutex);
    tu_list_remove(&pair->by_key);
    tu_list_remove(&pair->link);
    pthread_mutex_unlock(&mutex);
    free(pair->places);
    explicit_bzero(pair, sizeof(*pair));
    free(pair);
}

/* Admits hosts without a key. Returns false if there is no memory. */
bool tu_gate_admit(tu_worker_t *worker, const tu_address_t *ip, unsigned prefix)
{
    tu_gate_t *gate = worker->gate;
    network_t *larger;

    pthread_mutex_lock(&mutex);
    larger = tu_realloc(gate->networks, (gate->network_count + 1) * sizeof(*larger));
    if (larger != NULL) {
        gate->networks = larger;
        larger[gate->network_count] = (network_t){.prefix = prefix};
        gate->network_count += place_parse(ip, &larger[gate->network_count].place);
    }
    pthread_mutex_unlock(&mutex);
    return larger != NULL;
}

/* ---- watched sockets ---- */

static watched_t *watched_at(int fd)
{
    return fd >= 0 && fd < MAX_DESCRIPTORS ? __atomic_load_n(&watched[fd], __ATOMIC_ACQUIRE) : NULL;
}

/* A descriptor was closed, or is used anew. */
static void forget(int fd)
{
    watched_t *old = watched_at(fd);

    if (old == NULL) {
        return;
    }
    __atomic_store_n(&watched[fd], NULL, __ATOMIC_RELEASE);
    if (old->listens) {
        old->gate->ports[old->port].fd = -1;
        if (old->gate->ready) {
            __atomic_store_n(&old->gate->lost, true, __ATOMIC_RELAXED);
        }
    }
    explicit_bzero(old, sizeof(*old));
    free(old);
}

/* Returns NULL, and sets errno, if the descriptor cannot be watched. */
static watched_t *watch(tu_gate_t *gate, int fd)
{
    watched_t *new = fd >= 0 && fd < MAX_DESCRIPTORS ? calloc(1, sizeof(*new)) : NULL;

    if (new == NULL) {
        errno = fd < MAX_DESCRIPTORS ? ENOMEM : EMFILE;
    } else {
        new->gate = gate;
    }
    return new;
}

/* ---- what libucs calls in place of functions of the C library ---- */

/* UCX tries random ports of its range (TCP_PORT_RANGE) until one is free. If none is, it tries for ever. And without
 * SO_REUSEADDR a port is not free for a minute after its last connection (TIME_WAIT). */
static int gate_bind(int fd, const struct sockaddr *address, socklen_t length)
{
    tu_gate_t *gate = acting;
    union {
        struct sockaddr_storage any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } copy;

    if (bind(fd, address, length) == 0) {
        return 0;
    }
    if (gate == NULL || gate->ready || errno != EADDRINUSE || length > sizeof(copy)) {
        return -1;
    }
    memcpy(&copy, address, length);
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
    for (unsigned port = gate->lowest; port <= gate->highest && port != 0; port++) {
        *(copy.any.ss_family == AF_INET6 ? &copy.v6.sin6_port : &copy.v4.sin_port) = htons((uint16_t)port);
        if (bind(fd, (const struct sockaddr *)&copy, length) == 0) {
            return 0;
        }
    }
    gate->used_up = true;
    errno         = EADDRNOTAVAIL; /* with EADDRINUSE UCX would try again */
    return -1;
}

static int gate_listen(int fd, int backlog)
{
    tu_gate_t *gate = acting;
    struct sockaddr_storage name;
    socklen_t length = sizeof(name);
    watched_t *new;
    port_t *port;

    forget(fd);
    if (gate == NULL || gate->ready) { /* UCX's listeners for raw clients are not ours to watch: sockcm */
        return listen(fd, backlog);
    }
    if (gate->count == TU_DATA_PORTS) {
        errno = EMFILE;
        return -1;
    }
    port = &gate->ports[gate->count];
    new  = getsockname(fd, (struct sockaddr *)&name, &length) == 0 ? watch(gate, fd) : NULL;
    if (new == NULL) {
        return -1;
    }
    if (tu_sockaddr_text(&name, port->address.ip, sizeof(port->address.ip), &port->address.port) != UCS_OK) {
        free(new);
        errno = EAFNOSUPPORT;
        return -1;
    }
    port->fd             = fd;
    port->address.family = name.ss_family;
    new->listens         = true;
    new->port            = gate->count++;
    __atomic_store_n(&watched[fd], new, __ATOMIC_RELEASE);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_DEFER_ACCEPT, &(int){DEFER_SECONDS}, sizeof(int));
    return listen(fd, backlog);
}

/* Decides on a new connection. The first bytes are there: TCP_DEFER_ACCEPT, and a key travels in one segment. */
static bool let_in(const tu_gate_t *gate, int fd, const struct sockaddr *from)
{
    tu_key_t shown, answer;
    tu_pair_t *pair = NULL;
    bool admitted   = false;
    place_t place;
    bool complete = recv(fd, shown, TU_KEY, MSG_PEEK | MSG_DONTWAIT) == TU_KEY;

    pthread_mutex_lock(&mutex);
    if (complete && (pair = pair_with_key(gate, shown)) != NULL) {
        memcpy(answer, pair->theirs, TU_KEY);
    } else {
        admitted = place_of(from, &place) && admitted_network(gate, &place) != NULL;
    }
    pthread_mutex_unlock(&mutex);
    return pair == NULL ? admitted
                        : recv(fd, shown, TU_KEY, MSG_DONTWAIT) == TU_KEY &&
                              send(fd, answer, TU_KEY, MSG_NOSIGNAL | MSG_DONTWAIT) == TU_KEY;
}

static void log_stranger(tu_gate_t *gate, const struct sockaddr_storage *from)
{
    uint64_t now       = tu_now();
    uint64_t others    = gate->strangers - gate->logged;
    char host[64]      = "somebody";
    char unlogged[64]  = "";
    char text[256];
    unsigned port;

    __atomic_store_n(&gate->strangers, gate->strangers + 1, __ATOMIC_RELAXED);
    if (now < gate->next_log) {
        return;
    }
    (void)tu_sockaddr_text(from, host, sizeof(host), &port);
    if (others > 0) {
        snprintf(unlogged, sizeof(unlogged), " (and %llu others since the last such line)", (unsigned long long)others);
    }
    snprintf(text, sizeof(text), "turned away %s: it showed no key at a data port%s", host, unlogged);
    gate->next_log = now + LOG_INTERVAL;
    gate->logged   = gate->strangers;
    tu_log_info(text);
}

static int gate_accept(int fd, struct sockaddr *address, socklen_t *length)
{
    watched_t *listening = watched_at(fd);
    struct sockaddr_storage from;
    socklen_t from_length;
    int accepted;

    if (listening == NULL || !listening->listens) {
        accepted = accept(fd, address, length);
        forget(accepted);
        return accepted;
    }
    for (int i = 0; i < STRANGERS_AT_ONCE; i++) {
        memset(&from, 0, sizeof(from));
        from_length = sizeof(from);
        accepted    = accept(fd, NULL, NULL); /* asked for the address, the kernel refuses a peer with port 0 */
        if (accepted < 0 && (errno == ECONNABORTED || errno == EPROTO || errno == EPERM)) {
            continue; /* this connection has failed; UCX would stop listening */
        }
        if (accepted < 0) {
            return -1;
        }
        forget(accepted);
        if (getpeername(accepted, (struct sockaddr *)&from, &from_length) == 0 &&
            let_in(listening->gate, accepted, (const struct sockaddr *)&from)) {
            if (address != NULL) {
                memcpy(address, &from, *length < from_length ? *length : from_length);
                *length = from_length;
            }
            return accepted;
        }
        close(accepted);
        log_stranger(listening->gate, &from);
    }
    errno = EAGAIN; /* the descriptor stays readable */
    return -1;
}

/* An admitted host is shown no key at first. It may have none of the keys for its place: a key works only while both
 * sides have the pair. To refuse one would be fatal to a raw endpoint, which UCX does not connect again. */
static int gate_connect(int fd, const struct sockaddr *address, socklen_t length)
{
    tu_gate_t *gate = acting;
    const network_t *network;
    const tu_pair_t *pair;
    watched_t *new;
    place_t place;

    forget(fd);
    if (gate == NULL || !place_of(address, &place)) {
        return connect(fd, address, length);
    }
    new = watch(gate, fd);
    if (new == NULL) {
        return -1;
    }
    pthread_mutex_lock(&mutex);
    network = admitted_network(gate, &place);
    pair    = network == NULL || network->wants_keys ? pair_for_place(gate, &place) : NULL;
    pair    = pair == NULL && network == NULL ? gate->own : pair;
    if (pair != NULL) {
        memcpy(new->key, pair->theirs, TU_KEY);
        memcpy(new->expected, pair->ours, TU_KEY);
    }
    pthread_mutex_unlock(&mutex);
    if (pair == NULL && network == NULL) {
        free(new);
        errno = EACCES; /* it has not been let in */
        return -1;
    }
    new->place   = place;
    new->keyless = pair == NULL;
    __atomic_store_n(&watched[fd], new, __ATOMIC_RELEASE);
    return connect(fd, address, length);
}

static ssize_t gate_send(int fd, const void *data, size_t length, int flags)
{
    watched_t *socket = watched_at(fd);
    struct iovec parts[2];
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    ssize_t sent;

    if (socket == NULL || socket->listens || socket->keyless || socket->shown) {
        return send(fd, data, length, flags);
    }
    parts[0] = (struct iovec){.iov_base = socket->key, .iov_len = TU_KEY};
    parts[1] = (struct iovec){.iov_base = (void *)(uintptr_t)data, .iov_len = length};
    sent     = sendmsg(fd, &message, flags);
    if (sent < 0) {
        return -1;
    }
    if (sent < TU_KEY) {
        errno = ECONNRESET; /* a new socket has room for it */
        return -1;
    }
    socket->shown = true;
    if (sent == TU_KEY && length > 0) {
        errno = EAGAIN;
        return -1;
    }
    return sent - TU_KEY;
}

/* The peer has refused this connection. Prepares UCX's next attempt: with a key instead of without one, or the reverse
 * (an admitted host); and with another pair for this place, if there is one. */
static void after_refusal(const watched_t *socket)
{
    network_t *network;
    tu_pair_t *pair;

    pthread_mutex_lock(&mutex);
    network = admitted_network(socket->gate, &socket->place);
    if (network != NULL) {
        network->wants_keys = socket->keyless;
    }
    TU_LIST_FOR_EACH(pair, bucket_of_key(socket->expected), by_key) {
        if (same_key(pair->ours, socket->expected) && same_key(pair->theirs, socket->key)) {
            tu_list_remove(&pair->link);
            tu_list_append(&pair->gate->pairs, &pair->link);
            pair->known = false;
        }
    }
    pthread_mutex_unlock(&mutex);
}

/* Receives. If the peer has closed the connection, that was a refusal. */
static ssize_t receive_first(const watched_t *socket, int fd, void *data, size_t length, int flags)
{
    ssize_t received = recv(fd, data, length, flags);
    int error        = errno;

    if (length > 0 && (received == 0 || (received < 0 && error != EAGAIN && error != EINTR))) {
        after_refusal(socket);
        errno = error;
    }
    return received;
}

static ssize_t gate_recv(int fd, void *data, size_t length, int flags)
{
    watched_t *socket = watched_at(fd);
    ssize_t received;

    if (socket == NULL || socket->listens) {
        return recv(fd, data, length, flags);
    }
    if (socket->keyless) {
        received = receive_first(socket, fd, data, length, flags);
        if (received > 0) {
            forget(fd);
        }
        return received;
    }
    while (socket->received < TU_KEY) {
        received = receive_first(socket, fd, socket->answer + socket->received, TU_KEY - socket->received,
                                 MSG_DONTWAIT);
        if (received <= 0) {
            return received;
        }
        socket->received += (size_t)received;
    }
    if (!same_key(socket->answer, socket->expected)) {
        errno = ECONNREFUSED;
        return -1;
    }
    forget(fd);
    return recv(fd, data, length, flags);
}

static int gate_close(int fd)
{
    forget(fd);
    return close(fd);
}

static void replace_once(void)
{
    static const struct {
        const char *name;
        const void *function;
    } imports[] = {
        {"bind", (const void *)(uintptr_t)gate_bind},       {"listen", (const void *)(uintptr_t)gate_listen},
        {"accept", (const void *)(uintptr_t)gate_accept},   {"connect", (const void *)(uintptr_t)gate_connect},
        {"send", (const void *)(uintptr_t)gate_send},       {"recv", (const void *)(uintptr_t)gate_recv},
        {"close", (const void *)(uintptr_t)gate_close},
    };
    const void *libucs = (const void *)(uintptr_t)ucs_status_string;

    for (size_t i = 0; i < BUCKETS; i++) {
        tu_list_init(&keys[i]);
    }
    for (size_t i = 0; i < sizeof(imports) / sizeof(*imports); i++) {
        if (!tu_replace_import(libucs, imports[i].name, imports[i].function)) {
            missing = imports[i].name;
        }
    }
}

/* ---- the life of a gate ---- */

tu_gate_t *tu_gate_create(const tu_port_range_t *range)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    tu_gate_t *gate            = tu_calloc(1, sizeof(*gate));

    pthread_once(&once, replace_once);
    if (gate != NULL) {
        gate->lowest  = range->lowest;
        gate->highest = range->highest;
        tu_list_init(&gate->pairs);
    }
    return gate;
}

/* UCX's worker was created: what it listens on is known. Returns true if no port was free. */
bool tu_gate_ready(tu_gate_t *gate)
{
    gate->ready = true;
    return gate->used_up;
}

/* UCX's worker has gone. */
void tu_gate_destroy(tu_gate_t *gate)
{
    tu_pair_t *pair;

    if (gate == NULL) {
        return;
    }
    for (unsigned i = 0; i < gate->count; i++) {
        forget(gate->ports[i].fd);
    }
    while ((pair = TU_LIST_FIRST(&gate->pairs, tu_pair_t, link)) != NULL) {
        tu_gate_remove(pair);
    }
    free(gate->networks);
    free(gate);
}

/* This thread is inside UCX for this gate's worker, until tu_gate_leave gets the result. */
tu_gate_t *tu_gate_enter(tu_gate_t *gate)
{
    tu_gate_t *before = acting;

    acting = gate;
    return before;
}

void tu_gate_leave(tu_gate_t *before)
{
    acting = before;
}

/* ---- what Python asks ---- */

/* The name of a function that could not be replaced; NULL if all were. */
const char *tu_gate_missing(void)
{
    return missing;
}

/* Where UCX listens for the worker: returns false if there are fewer such ports. One that UCX has closed has port 0. */
bool tu_gate_port(tu_worker_t *worker, unsigned number, tu_address_t *out)
{
    const tu_gate_t *gate = worker->gate;

    if (number >= gate->count) {
        return false;
    }
    *out = gate->ports[number].address;
    if (gate->ports[number].fd < 0) {
        out->port = 0;
    }
    return true;
}

/* True if UCX has stopped listening at a port: it does so for good when accept fails for lack of descriptors. */
bool tu_gate_lost(tu_worker_t *worker)
{
    return __atomic_load_n(&worker->gate->lost, __ATOMIC_RELAXED);
}

uint64_t tu_gate_strangers(const tu_gate_t *gate)
{
    return __atomic_load_n(&gate->strangers, __ATOMIC_RELAXED);
}
