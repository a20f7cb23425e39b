/* The key gate: who may connect to the ports of UCX's TCP transport, and to whom UCX may connect.
 *
 * UCX trusts everything that arrives at these ports, and whatever answers where it connects. A worker therefore has
 * pairs of keys, one for each peer that was let in. Before UCX's first byte the connecting process sends a proof: it
 * names the pair, and shows by a code (blake2s.c) that it knows the key of the port. The code covers the port's address
 * and a nonce, so it is worth nothing at another place or a second time. The listening process checks the proof before
 * UCX knows of the connection, and answers with a code of its own; it closes the connection if the proof is wrong,
 * unless it admits the host without a key (tu_gate_admit). The connecting process checks the answer before UCX reads
 * anything.
 *
 * A pair remembers the nonces of its current epoch. When they are too many, the next epoch begins, and they are
 * forgotten. A right proof of another epoch is answered with the current one, and refused; UCX connects again at once,
 * now with a proof of that epoch. wire.md, "Keys", has the bytes.
 *
 * When a pair ends, the connections that it has let in pass on to another pair of the same peer. If there is none, they
 * are shut some time later, when UCX has written what it had to write.
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
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "little_endian.h"
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
/* Nanoseconds after the end of a pair in which its connections stay: UCX may still write to them (WRITING_TIME). */
#define LINGER_NANOSECONDS 2000000000u
/* The most nonces that a pair remembers. */
#define MOST_NONCES 1024

#define NAME 16                /* bytes of the name of a key */
#define NONCE 16
#define ROLE 8

typedef char tu_key_t[TU_KEY];
typedef char code_t[TU_KEY];

/* What the connecting process sends first, and what it gets in answer: wire.md, "Keys". */
typedef struct proof {
    char name[NAME];
    tu_le64_t epoch;
    char nonce[NONCE];
    code_t code;
} proof_t;

typedef struct answer {
    tu_le64_t epoch;           /* another one than the proof's: the proof is refused */
    code_t code;
} answer_t;

/* What a code is made of. */
typedef struct __attribute__((packed)) statement {
    char role[ROLE];
    char ip[16];
    char port[2];
    tu_le64_t epoch;
    char nonce[NONCE];
} statement_t;

_Static_assert(sizeof(proof_t) == 72 && sizeof(answer_t) == 40 && sizeof(statement_t) == 50, "wire.md states the sizes");

/* An IP address and a port. */
typedef struct place {
    int family;
    unsigned port;
    char ip[16];               /* an IPv6 address, or an IPv4 address in one */
} place_t;

typedef struct network {
    place_t place;             /* port 0 */
    unsigned prefix;           /* bits of `ip` */
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
    tu_list_t ended;           /* pairs: the oldest first */
    tu_pair_t *own;            /* for hosts that no pair is for; NULL: connect to no such host */
    network_t *networks;       /* hosts that need no key */
    size_t network_count;
    uint64_t strangers;        /* connections that were closed; UCX's thread writes this */
    uint64_t logged;           /* strangers when the last line was logged */
    uint64_t next_log;
};

struct tu_pair {
    tu_gate_t *gate;
    tu_list_t link;            /* in the gate's pairs: the newest first, those that were refused last; or in its ended */
    tu_list_t by_name;         /* in `names` */
    tu_key_t ours;             /* opens our ports */
    tu_key_t theirs;           /* opens the peer's ports */
    char our_name[NAME];
    char their_name[NAME];
    uint64_t our_epoch;        /* of the nonces that our ports have seen */
    uint64_t their_epoch;      /* what the peer's ports have said last */
    char (*nonces)[NONCE];
    size_t nonce_count;
    uint64_t uid;              /* of the peer's worker; 0: not known */
    place_t *places;           /* where the peer listens */
    size_t count;
    bool is_here;              /* the peer is on this host, in this network namespace */
    bool known;                /* the peer has it, too, as far as we know */
    bool lasting;              /* the keys are in the address of the peer's worker: they last as long as that */
    tu_list_t let_in;          /* accepted sockets */
    uint64_t shut_at;          /* if it has ended */
};

/* A socket on which UCX listens for one of our workers; one that it connects, until the answer has come; or one that it
 * has accepted because of a pair. */
typedef struct watched {
    enum { LISTENS, CONNECTS, LET_IN } kind;
    tu_gate_t *gate;           /* of its worker */
    unsigned port;             /* if it listens: its place in gate->ports */
    place_t place;             /* where it listens, or connects */
    /* If it connects: */
    bool keyless;              /* no proof is sent, and what comes is UCX's */
    bool shown;                /* the proof was sent */
    size_t received;           /* bytes of the answer */
    tu_key_t key;
    proof_t proof;
    answer_t answer;
    /* If it was let in: */
    tu_list_t link;            /* in the pair's `let_in` */
    int fd;
    ino_t inode;               /* UCX may have closed the descriptor by other means, and somebody else may have it */
} watched_t;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* for the lists, what they hold, and networks */
static tu_list_t names[BUCKETS];
static watched_t *watched[MAX_DESCRIPTORS];
static const char *missing;    /* a function of the C library whose import could not be replaced */
static size_t most_nonces = MOST_NONCES;
static __thread tu_gate_t *acting;

/* ---- addresses ---- */

static bool place_of(const struct sockaddr *address, place_t *place)
{
    memset(place, 0, sizeof(*place));
    place->family = address->sa_family;
    if (address->sa_family == AF_INET) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)(const void *)address;

        memset(place->ip + 10, 0xff, 2);
        memcpy(place->ip + 12, &v4->sin_addr, 4);
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
           (bits == 0 || (unsigned char)(network->place.ip[whole] ^ place->ip[whole]) >> (8 - bits) == 0);
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

/* ---- proofs ---- */

static void make_code(const tu_key_t key, const char *role, const place_t *place, tu_le64_t epoch, const char *nonce,
                      code_t out)
{
    statement_t statement = {.epoch = epoch};
    uint16_t port         = htole16((uint16_t)place->port);

    memcpy(statement.role, role, strlen(role));
    memcpy(statement.ip, place->ip, sizeof(statement.ip));
    memcpy(statement.port, &port, sizeof(port));
    memcpy(statement.nonce, nonce, NONCE);
    tu_blake2s(key, (const char *)&statement, sizeof(statement), out);
}

static void make_name(const tu_key_t key, char *name)
{
    static const place_t nowhere;
    static const char zeros[NONCE];
    code_t code;

    make_code(key, "name", &nowhere, tu_le64_from(0), zeros, code);
    memcpy(name, code, NAME);
}

/* Compares all bytes, so that the time says nothing about them. */
static bool same_bytes(const char *one, const char *other, size_t size)
{
    char difference = 0;

    for (size_t i = 0; i < size; i++) {
        difference |= one[i] ^ other[i];
    }
    return difference == 0;
}

static bool has_code(const code_t code, const tu_key_t key, const char *role, const place_t *place, tu_le64_t epoch,
                     const char *nonce)
{
    code_t right;

    make_code(key, role, place, epoch, nonce, right);
    return same_bytes(code, right, sizeof(right));
}

/* Remembers the nonce of a right proof. When there are too many, the next epoch begins. Returns false if it was used
 * before in this epoch, or if there is no memory. */
static bool remember(tu_pair_t *pair, const char *nonce)
{
    for (size_t i = 0; i < pair->nonce_count; i++) {
        if (memcmp(pair->nonces[i], nonce, NONCE) == 0) {
            return false;
        }
    }
    if (pair->nonce_count >= most_nonces) {
        pair->our_epoch++;
        pair->nonce_count = 0;
        return true;
    }
    if ((pair->nonce_count & (pair->nonce_count - 1)) == 0) { /* 0 or a power of two: it is full */
        void *larger = realloc(pair->nonces, (pair->nonce_count > 0 ? 2 * pair->nonce_count : 1) * NONCE);

        if (larger == NULL) {
            return false;
        }
        pair->nonces = larger;
    }
    memcpy(pair->nonces[pair->nonce_count++], nonce, NONCE);
    return true;
}

/* Checks a proof, and makes the answer. Returns false if there is none: the proof is wrong, or was used before. A host
 * that needs no key may show an old one: UCX does not always connect again. */
static bool answer_proof(tu_pair_t *pair, const place_t *place, const proof_t *proof, bool admitted, answer_t *answer)
{
    uint64_t epoch = tu_le64_to(proof->epoch);
    bool current;

    if (!has_code(proof->code, pair->ours, "connect", place, proof->epoch, proof->nonce) ||
        (!admitted && epoch == pair->our_epoch && !remember(pair, proof->nonce))) {
        return false;
    }
    current       = admitted || epoch == pair->our_epoch;
    answer->epoch = current ? proof->epoch : tu_le64_from(pair->our_epoch);
    make_code(pair->ours, current ? "accept" : "epoch", place, answer->epoch, proof->nonce, answer->code);
    return true;
}

/* ---- pairs ---- */

static tu_list_t *bucket_of_name(const char *name)
{
    return &names[((unsigned char)name[0] | (unsigned char)name[1] << 8) % BUCKETS];
}

static tu_pair_t *pair_with_name(const tu_gate_t *gate, const char *name)
{
    tu_pair_t *pair;

    TU_LIST_FOR_EACH(pair, bucket_of_name(name), by_name) {
        if (pair->gate == gate && memcmp(pair->our_name, name, NAME) == 0) {
            return pair;
        }
    }
    return NULL;
}

/* The first pair for a place that the peer has, too; else the first; or NULL. Of many exchanges at once most pairs are
 * not at the peer yet, or never will be, and UCX gives up after 25 attempts. A lasting pair comes before others: what a
 * raw endpoint connects must not end with some Connection's keys.
 *
 * If the place is an address of this host, the peers of other hosts that have the same address are not meant;
 * `elsewhere` says if there are any. */
static tu_pair_t *pair_for_place(const tu_gate_t *gate, const place_t *place, bool is_own, bool *elsewhere)
{
    tu_pair_t *pair, *found = NULL;

    TU_LIST_FOR_EACH(pair, &gate->pairs, link) {
        for (size_t i = 0; i < pair->count; i++) {
            if (memcmp(&pair->places[i], place, sizeof(*place)) != 0) {
                continue;
            }
            if (is_own && !pair->is_here) {
                *elsewhere = true;
                continue;
            }
            if (pair->known && pair->lasting) {
                return pair;
            }
            if (found == NULL || (pair->known && !found->known)) {
                found = pair;
            }
        }
    }
    return found;
}

/* True if a pair that has ended a moment ago was for a place: UCX has not given up its endpoint yet. */
static bool ended_at(const tu_gate_t *gate, const place_t *place)
{
    const tu_pair_t *pair;

    TU_LIST_FOR_EACH(pair, &gate->ended, link) {
        for (size_t i = 0; i < pair->count; i++) {
            if (memcmp(&pair->places[i], place, sizeof(*place)) == 0) {
                return true;
            }
        }
    }
    return false;
}

/* Another pair of the same peer, to which the connections of one that has ended pass on; NULL if there is none. */
static tu_pair_t *heir_of(const tu_pair_t *ended)
{
    tu_pair_t *pair;

    TU_LIST_FOR_EACH(pair, &ended->gate->pairs, link) {
        if (pair->uid == ended->uid && pair->uid != 0) {
            return pair;
        }
    }
    return NULL;
}

static void pass_on(tu_pair_t *from, tu_pair_t *to)
{
    watched_t *connection;

    while ((connection = TU_LIST_FIRST(&from->let_in, watched_t, link)) != NULL) {
        tu_list_remove(&connection->link);
        tu_list_append(&to->let_in, &connection->link);
    }
}

static void pair_free(tu_pair_t *pair)
{
    watched_t *connection;

    while ((connection = TU_LIST_FIRST(&pair->let_in, watched_t, link)) != NULL) {
        tu_list_remove(&connection->link);
    }
    tu_list_remove(&pair->link);
    free(pair->places);
    free(pair->nonces);
    explicit_bzero(pair, sizeof(*pair));
    free(pair);
}

/* Shuts the connections of pairs that have ended some time ago, so that UCX sees their end. Returns false if there are
 * none for which it is too early. */
bool tu_gate_shut_ended(tu_worker_t *worker)
{
    tu_gate_t *gate = worker->gate;
    uint64_t now    = tu_now();
    watched_t *connection;
    tu_pair_t *pair;

    pthread_mutex_lock(&mutex);
    while ((pair = TU_LIST_FIRST(&gate->ended, tu_pair_t, link)) != NULL && pair->shut_at <= now) {
        TU_LIST_FOR_EACH(connection, &pair->let_in, link) {
            struct stat found;

            if (fstat(connection->fd, &found) == 0 && S_ISSOCK(found.st_mode) && found.st_ino == connection->inode) {
                (void)shutdown(connection->fd, SHUT_RDWR);
            }
        }
        pair_free(pair);
    }
    pthread_mutex_unlock(&mutex);
    return pair != NULL;
}

/* Adds a pair. The gate lets in whoever proves that it knows `ours`. Where UCX connects to one of the peer's addresses,
 * the gate proves that it knows `theirs`. The nonces begin at `epoch`. Returns NULL if there is no memory. */
tu_pair_t *tu_gate_add(tu_worker_t *worker, const char *ours, const char *theirs, uint64_t epoch, const tu_peer_t *peer)
{
    tu_pair_t *pair = tu_calloc(1, sizeof(*pair)), *ended, *after;
    place_t *places = tu_calloc(peer->count + 1, sizeof(*places));

    if (pair == NULL || places == NULL) {
        free(pair);
        free(places);
        return NULL;
    }
    for (size_t i = 0; i < peer->count; i++) {
        pair->count += place_parse(&peer->addresses[i], &places[pair->count]);
    }
    pair->places    = places;
    pair->gate      = worker->gate;
    pair->our_epoch = epoch;
    pair->lasting   = peer->lasting;
    pair->known     = peer->lasting;
    pair->uid       = peer->uid;
    pair->is_here   = peer->is_here;
    memcpy(pair->ours, ours, TU_KEY);
    memcpy(pair->theirs, theirs, TU_KEY);
    make_name(pair->ours, pair->our_name);
    make_name(pair->theirs, pair->their_name);
    tu_list_init(&pair->let_in);
    pthread_mutex_lock(&mutex);
    TU_LIST_FOR_EACH_SAFE(ended, after, &pair->gate->ended, link) {
        if (ended->uid == pair->uid && pair->uid != 0) {
            pass_on(ended, pair);
            pair_free(ended);
        }
    }
    tu_list_prepend(&pair->gate->pairs, &pair->link);
    tu_list_prepend(bucket_of_name(pair->our_name), &pair->by_name);
    pthread_mutex_unlock(&mutex);
    return pair;
}

/* From now on the gate proves `theirs` to hosts that no other pair is for: they have the worker's address. */
void tu_gate_use_by_default(tu_pair_t *pair)
{
    pair->gate->own = pair;
}

/* The peer has this pair, too: it is used before others. */
void tu_gate_know(tu_pair_t *pair)
{
    pthread_mutex_lock(&mutex);
    pair->known = true;
    pthread_mutex_unlock(&mutex);
}

/* Takes the keys away. The connections that they have let in pass on to another pair of this peer. Returns true if there
 * is no such pair, and tu_gate_shut_ended has something to shut, or to forget, later. */
bool tu_gate_remove(tu_pair_t *pair)
{
    tu_gate_t *gate = pair->gate;
    tu_pair_t *heir;
    bool linger;

    pthread_mutex_lock(&mutex);
    tu_list_remove(&pair->by_name);
    tu_list_remove(&pair->link);
    heir = heir_of(pair);
    if (heir != NULL) {
        pass_on(pair, heir);
    }
    linger = heir == NULL && (pair->count > 0 || !tu_list_is_empty(&pair->let_in));
    if (!linger) {
        pair_free(pair);
    } else {
        explicit_bzero(pair->ours, sizeof(pair->ours));
        explicit_bzero(pair->theirs, sizeof(pair->theirs));
        pair->shut_at = tu_now() + LINGER_NANOSECONDS;
        tu_list_append(&gate->ended, &pair->link);
    }
    pthread_mutex_unlock(&mutex);
    return linger;
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
        larger[gate->network_count] = (network_t){.prefix = ip->family == AF_INET ? 96 + prefix : prefix};
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
    if (old->kind == LET_IN) {
        pthread_mutex_lock(&mutex);
        tu_list_remove(&old->link);
        pthread_mutex_unlock(&mutex);
    } else if (old->kind == LISTENS) {
        __atomic_store_n(&old->gate->ports[old->port].fd, -1, __ATOMIC_RELAXED);
        if (__atomic_load_n(&old->gate->ready, __ATOMIC_RELAXED)) {
            __atomic_store_n(&old->gate->lost, true, __ATOMIC_RELAXED);
        }
    }
    explicit_bzero(old, sizeof(*old));
    free(old);
}

/* Returns NULL, and sets errno, if the descriptor cannot be watched. */
static watched_t *watch(tu_gate_t *gate, int fd, int kind)
{
    watched_t *new = fd >= 0 && fd < MAX_DESCRIPTORS ? calloc(1, sizeof(*new)) : NULL;

    if (new == NULL) {
        errno = fd < MAX_DESCRIPTORS ? ENOMEM : EMFILE;
    } else {
        new->gate = gate;
        new->kind = kind;
        tu_list_init(&new->link);
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
    new  = getsockname(fd, (struct sockaddr *)&name, &length) == 0 ? watch(gate, fd, LISTENS) : NULL;
    if (new == NULL) {
        return -1;
    }
    if (!place_of((const struct sockaddr *)&name, &new->place) ||
        tu_sockaddr_text(&name, port->address.ip, sizeof(port->address.ip), &port->address.port) != UCS_OK) {
        free(new);
        errno = EAFNOSUPPORT;
        return -1;
    }
    port->fd             = fd;
    port->address.family = name.ss_family;
    new->port            = gate->count++;
    __atomic_store_n(&watched[fd], new, __ATOMIC_RELEASE);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_DEFER_ACCEPT, &(int){DEFER_SECONDS}, sizeof(int));
    return listen(fd, backlog);
}

/* Records that a pair has let in a connection. Returns false if there is no memory. */
static bool record(tu_pair_t *pair, int fd)
{
    watched_t *new = watch(pair->gate, fd, LET_IN);
    struct stat about;

    if (new == NULL || fstat(fd, &about) < 0) {
        free(new);
        return false;
    }
    new->fd    = fd;
    new->inode = about.st_ino;
    tu_list_append(&pair->let_in, &new->link);
    __atomic_store_n(&watched[fd], new, __ATOMIC_RELEASE);
    return true;
}

/* Decides on a new connection. The first bytes are there: TCP_DEFER_ACCEPT, and a proof travels in one segment. Returns
 * false if it is a stranger's. `shut` is set if it is a peer's, and to be closed: it connects again. */
static bool let_in(const watched_t *listening, int fd, const struct sockaddr *from, bool *shut)
{
    tu_gate_t *gate = listening->gate;
    bool answered   = false;
    tu_pair_t *pair;
    proof_t proof;
    answer_t answer;
    place_t place;
    bool complete, admitted;

    *shut    = false;
    complete = recv(fd, &proof, sizeof(proof), MSG_PEEK | MSG_DONTWAIT) == sizeof(proof);
    pthread_mutex_lock(&mutex);
    admitted = place_of(from, &place) && admitted_network(gate, &place) != NULL;
    pair     = complete ? pair_with_name(gate, proof.name) : NULL;
    if (pair != NULL && answer_proof(pair, &listening->place, &proof, admitted, &answer)) {
        *shut    = tu_le64_to(answer.epoch) != tu_le64_to(proof.epoch);
        answered = *shut || admitted || record(pair, fd); /* a host that needs no key stays without one */
    }
    pthread_mutex_unlock(&mutex);
    if (pair == NULL) {
        return admitted;
    }
    return answered && recv(fd, &proof, sizeof(proof), MSG_DONTWAIT) == sizeof(proof) &&
           send(fd, &answer, sizeof(answer), MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof(answer);
}

/* Closes a connection that UCX does not get. What has arrived is read first; the kernel would drop our answer else. */
static void turn_away(int fd)
{
    char rest[256];

    (void)!recv(fd, rest, sizeof(rest), MSG_DONTWAIT);
    forget(fd);
    close(fd);
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
    snprintf(text, sizeof(text), "turned away %s at a data port: no valid proof of a key%s", host, unlogged);
    gate->next_log = now + LOG_INTERVAL;
    gate->logged   = gate->strangers;
    tu_log_info(text);
}

static int gate_accept(int fd, struct sockaddr *address, socklen_t *length)
{
    watched_t *listening = watched_at(fd);
    struct sockaddr_storage from;
    socklen_t from_length;
    bool shut;
    int accepted;

    if (listening == NULL || listening->kind != LISTENS) {
        accepted = accept4(fd, address, length, SOCK_CLOEXEC);
        forget(accepted);
        return accepted;
    }
    for (int i = 0; i < STRANGERS_AT_ONCE; i++) {
        memset(&from, 0, sizeof(from));
        from_length = sizeof(from);
        accepted    = accept4(fd, NULL, NULL, SOCK_CLOEXEC); /* asked for the address, the kernel refuses a peer with port 0 */
        if (accepted < 0 && (errno == ECONNABORTED || errno == EPROTO || errno == EPERM)) {
            continue; /* this connection has failed; UCX would stop listening */
        }
        if (accepted < 0) {
            return -1;
        }
        forget(accepted);
        if (getpeername(accepted, (struct sockaddr *)&from, &from_length) == 0 &&
            let_in(listening, accepted, (const struct sockaddr *)&from, &shut)) {
            if (shut) {
                turn_away(accepted);
                continue;
            }
            if (address != NULL) {
                memcpy(address, &from, *length < from_length ? *length : from_length);
                *length = from_length;
            }
            return accepted;
        }
        log_stranger(listening->gate, &from); /* before it: whoever sees the end may ask for the count */
        turn_away(accepted);
    }
    errno = EAGAIN; /* the descriptor stays readable */
    return -1;
}

/* Puts a proof into a socket that connects. Returns false if the system has no random numbers. */
static bool make_proof(watched_t *socket, const tu_pair_t *pair)
{
    proof_t *proof = &socket->proof;

    if (getrandom(proof->nonce, NONCE, 0) != NONCE) {
        return false;
    }
    memcpy(socket->key, pair->theirs, TU_KEY);
    memcpy(proof->name, pair->their_name, NAME);
    proof->epoch = tu_le64_from(pair->their_epoch);
    make_code(pair->theirs, "connect", &socket->place, proof->epoch, proof->nonce, proof->code);
    return true;
}

/* An admitted host is shown no proof at first. It may have none of the keys for its place: a key works only while both
 * sides have the pair. To refuse one would be fatal to a raw endpoint, which UCX does not connect again. */
static int gate_connect(int fd, const struct sockaddr *address, socklen_t length)
{
    tu_gate_t *gate = acting;
    bool elsewhere  = false;
    const network_t *network;
    const tu_pair_t *pair;
    watched_t *new;
    place_t place;
    bool is_own;

    forget(fd);
    if (gate == NULL || !place_of(address, &place)) {
        return connect(fd, address, length);
    }
    new = watch(gate, fd, CONNECTS);
    if (new == NULL) {
        return -1;
    }
    new->place = place;
    is_own     = tu_sockaddr_is_own(address, length);
    pthread_mutex_lock(&mutex);
    network = admitted_network(gate, &place);
    pair    = pair_for_place(gate, &place, is_own, &elsewhere);
    if (pair == NULL && elsewhere) {
        network = NULL;
    } else if (network != NULL && !network->wants_keys) {
        pair = NULL;
    } else if (pair == NULL && network == NULL) {
        pair = gate->own;
    }
    if (pair != NULL ? !make_proof(new, pair) : network == NULL) {
        /* ECANCELED: a pair for this place has just ended, which is no news (HARMLESS in log.py). EACCES: the place was
         * not let in. */
        errno = pair == NULL && !elsewhere && ended_at(gate, &place) ? ECANCELED : EACCES;
        pthread_mutex_unlock(&mutex);
        free(new);
        return -1;
    }
    pthread_mutex_unlock(&mutex);
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

    if (socket == NULL || socket->kind != CONNECTS || socket->keyless || socket->shown) {
        return send(fd, data, length, flags);
    }
    parts[0] = (struct iovec){.iov_base = &socket->proof, .iov_len = sizeof(proof_t)};
    parts[1] = (struct iovec){.iov_base = (void *)(uintptr_t)data, .iov_len = length};
    sent     = sendmsg(fd, &message, flags);
    if (sent < 0) {
        return -1;
    }
    if (sent < (ssize_t)sizeof(proof_t)) {
        errno = ECONNRESET; /* a new socket has room for it */
        return -1;
    }
    socket->shown = true;
    if (sent == sizeof(proof_t) && length > 0) {
        errno = EAGAIN;
        return -1;
    }
    return sent - (ssize_t)sizeof(proof_t);
}

/* The peer has refused this connection. Prepares UCX's next attempt: with a proof instead of without one, or the reverse
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
    TU_LIST_FOR_EACH(pair, &socket->gate->pairs, link) {
        if (!socket->keyless && same_bytes(pair->theirs, socket->key, TU_KEY)) {
            tu_list_remove(&pair->link);
            tu_list_append(&socket->gate->pairs, &pair->link);
            pair->known = false;
            break;
        }
    }
    pthread_mutex_unlock(&mutex);
}

/* The peer's nonces have another epoch than the proof: the next attempt has that one. */
static void note_epoch(const watched_t *socket)
{
    tu_pair_t *pair;

    pthread_mutex_lock(&mutex);
    TU_LIST_FOR_EACH(pair, &socket->gate->pairs, link) {
        if (same_bytes(pair->theirs, socket->key, TU_KEY)) {
            pair->their_epoch = tu_le64_to(socket->answer.epoch);
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
    bool current;

    if (socket == NULL || socket->kind != CONNECTS) {
        return recv(fd, data, length, flags);
    }
    if (socket->keyless) {
        received = receive_first(socket, fd, data, length, flags);
        if (received > 0) {
            forget(fd);
        }
        return received;
    }
    while (socket->received < sizeof(answer_t)) {
        received = receive_first(socket, fd, (char *)&socket->answer + socket->received,
                                 sizeof(answer_t) - socket->received, MSG_DONTWAIT);
        if (received <= 0) {
            return received;
        }
        socket->received += (size_t)received;
    }
    current = tu_le64_to(socket->answer.epoch) == tu_le64_to(socket->proof.epoch);
    if (!has_code(socket->answer.code, socket->key, current ? "accept" : "epoch", &socket->place, socket->answer.epoch,
                  socket->proof.nonce)) {
        errno = ECONNREFUSED;
        return -1;
    }
    if (!current) {
        note_epoch(socket);
        return 0; /* the peer closes it; UCX connects again */
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
    static const tu_import_t imports[] = {
        TU_IMPORT("bind", gate_bind),       TU_IMPORT("listen", gate_listen),
        TU_IMPORT("accept", gate_accept),   TU_IMPORT("connect", gate_connect),
        TU_IMPORT("send", gate_send),       TU_IMPORT("recv", gate_recv),
        TU_IMPORT("close", gate_close),
    };
    const void *libucs = (const void *)(uintptr_t)ucs_status_string;

    for (size_t i = 0; i < BUCKETS; i++) {
        tu_list_init(&names[i]);
    }
    missing = tu_replace_imports(libucs, imports, sizeof(imports) / sizeof(*imports));
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
        tu_list_init(&gate->ended);
    }
    return gate;
}

/* UCX's worker was created: what it listens on is known. Returns true if no port was free. */
bool tu_gate_ready(tu_gate_t *gate)
{
    __atomic_store_n(&gate->ready, true, __ATOMIC_RELAXED);
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
    pthread_mutex_lock(&mutex);
    while ((pair = TU_LIST_FIRST(&gate->pairs, tu_pair_t, link)) != NULL ||
           (pair = TU_LIST_FIRST(&gate->ended, tu_pair_t, link)) != NULL) {
        tu_list_remove(&pair->by_name);
        pair_free(pair);
    }
    pthread_mutex_unlock(&mutex);
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

/* For tests: the most nonces that a pair remembers from now on; 0: as usual. */
void tu_test_most_nonces(size_t count)
{
    most_nonces = count > 0 ? count : MOST_NONCES;
}

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
    if (__atomic_load_n(&gate->ports[number].fd, __ATOMIC_RELAXED) < 0) {
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
