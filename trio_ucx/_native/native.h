/* What the files of the C half share: the structures behind a worker, and the functions that they offer each other.
 *
 * Every callback that UCX makes is a C function. It appends a record to its worker's ring and returns, so no Python
 * runs inside UCX. Python asks for the records with tu_worker_progress_and_arm(), which makes UCX progress, collects
 * what arrived, takes the records and arms the worker, in one call.
 *
 * Room in the ring is reserved when something is posted or opened: one record for each pending operation, each endpoint
 * and each queue of active messages. So a callback never has to allocate. A callback for which nothing can be reserved,
 * such as a stranger's connection request, uses the ring's slack, and refuses the request when there is none.
 *
 * One thread uses a worker and everything that belongs to it. Python checks that; the C code does not. Only log.c,
 * key_gate.c and what the headers of extensions name are shared by threads, and they have locks.
 *
 * Ownership of memory
 *
 *   memory                      allocated by            freed by                       UCX may use it
 *   --------------------------  ----------------------  -----------------------------  --------------------------------
 *   tu_context_t                tu_context_create       tu_context_destroy             no
 *   tu_worker_t, its ring       tu_worker_create;       tu_worker_destroy; growing     no
 *                               the ring also grows     frees the smaller ring
 *   scratch (tag_inbox.c)       tu_inbox_collect        tu_worker_destroy              no
 *   blocks of tu_operation_t    tu_post_begin           tu_worker_destroy              as the argument of callbacks
 *   operation->described        tu_post_begin,          when the operation is over     until the operation is over
 *                               tu_tag_wait
 *   tu_long_t, what describes   tu_long_send,           when the message is over; the  as the argument of callbacks;
 *   its pieces                  tu_inbox_collect        rest by tu_worker_destroy      what describes pieces
 *   buffers, headers, replies   Python                  Python, when the operation     until the operation is over
 *                                                       is over
 *   tu_endpoint_t               tu_endpoint_connect,    tu_endpoint_free; without      as the argument of callbacks;
 *                               _to_worker,             error handling it goes to      without error handling until the
 *                               _from_request           worker->closed and is freed    worker is destroyed
 *                                                       by tu_worker_destroy
 *   tu_gate_t                   tu_worker_create        tu_worker_destroy              no
 *   tu_pair_t                   tu_gate_add             tu_gate_remove, _shut_ended,   no
 *                                                       _add, tu_worker_destroy
 *   tu_listener_t               tu_listener_create      tu_listener_destroy            as the argument of callbacks
 *   tu_am_queue_t               tu_am_open              tu_am_close                    as the argument of callbacks
 *   tu_am_message_t             the callback of its     tu_am_close while it is        no; its data, unless copied,
 *                               queue                   queued; then Python, by        belongs to UCX until
 *                                                       tu_am_release, _forget         tu_am_release or the end of
 *                                                                                      tu_am_receive
 *   pieces of a stream          UCX                     UCX, by tu_stream_release      they are UCX's
 *   tu_strided_t                tu_strided_create       Python, by free()              no: operations have copies
 *   lines of UCX's log          log.c                   tu_log_take, with the next     no
 *                                                       call
 *
 * The headers of extensions (see below) say the same of their memory.
 *
 * What is taken for granted of UCX
 *
 * UCX's documentation promises none of this. Each item says why it holds in UCX 1.22, for which transports, and what
 * tests it. Tests with the fixture `transports` can run over RDMA, too.
 *
 *   Tag messages
 *   - An endpoint's messages are found in the order in which they were posted, eager or not: one lane has them all
 *     (ucp_proto_rndv_find_ctrl_lane; MAX_EAGER_LANES=1), and transports keep the order (uct_ud_ep_process_rx, SRD's
 *     ooo_pkts). A probe finds the oldest (ucp_tag_unexp_search). test_ucx_properties.py: test_order_of_messages
 *   - Not so for what a callback posts: it may overtake what waits (uct_mm_ep_process_pending, uct_rc_ep_process_pending).
 *     Pieces of long messages are therefore posted by a hook. test_long_messages.py: test_order
 *   - A message may come in pieces: over UD of a packet (MTU, from 256 bytes), over shared memory, RC and DC of 8 KiB, over
 *     TCP of 64 KiB. FORCE_IMM_CMPL leaves such a message to UCX (ucp_tag_recv_common). In one piece must come control
 *     frames, announcements (64 bytes at most) and batches: option_limits.py, and EndpointCore.splits_batches for UD.
 *     test_ucx_properties.py: test_small_messages_in_several_pieces; test_option_limits.py
 *   - Handles and data have any address: over rc_verbs they follow a header of one byte. They need no bit of ours, and
 *     headers are copied before they are read. test_like_rdma.py; test_wire_fields.py
 *   - Messages below RNDV_THRESH leave, others stay until they are received (RNDV_SCHEME is refused: option_limits.py).
 *     test_ucx_properties.py: test_what_the_rendezvous_threshold_says
 *   - Messages are matched by UCX, not by a device (RC_MLX5_TM_ENABLE): endpoints with error handling have no lane for that
 *     (ucp_wireup_add_tag_lane). No test: it needs ConnectX-5
 *
 *   Requests, progress, events
 *   - Callbacks run within our calls, in the worker's thread; UCX's own thread only schedules them
 *     (ucp_ep_set_failed_schedule, uct_ud_ep_handle_timeout; only wire-up has UCT_CB_FLAG_ASYNC). One may run before the
 *     call that posts returns: tu_post_end. No test: nothing here is of use to a second thread
 *   - When an armed worker has something to do, its descriptor is readable. Completion queues of InfiniBand lose what comes
 *     right before they are armed (uct_ib_iface_arm_cq): arming.c. conftest.py: missed_events is 0 in every test
 *   - Progress returns more than 0 when a piece was sent or received. Otherwise pauses would be too long: progress.py
 *   - Nothing reads a buffer after a forced close, if all lanes are sysv, posix or self: tu_endpoint_copies.
 *     test_long_messages.py: test_abort_releases_buffers_while_others_use_the_endpoint
 *
 *   Active messages, streams
 *   - A message comes whole (UCP_AM_FLAG_WHOLE_MSG), its header in the first piece: at most max_am_header, which
 *     over UD is less than a packet. Ours have 48 bytes. test_active_messages.py: test_sizes
 *   - UCX gets more buffers while data is borrowed: RX_MAX_BUFS is inf (option_limits.py).
 *     test_active_messages.py: test_data_lives_until_it_is_released
 *   - Any endpoint of the worker releases a stream's data (ucp_stream_data_release), such as one to itself.
 *     test_ucp_streams.py: test_data_outlives_all_endpoints
 *
 *   Remote memory
 *   - The layout of packed keys, and 0xff behind them: registered.py, access_paths.py (ucp_rkey_packed_copy,
 *     ucp_ep_rkey_unpack_internal). test_remote_memory.py: test_damaged_descriptors
 *   - What ucp_rkey_ptr returns is a shared mapping of the owner's whole memory. Only sysv, posix and xpmem have it.
 *     test_remote_memory.py: test_map
 *   - Lanes whose names are in access_paths._SOFTWARE, UD among them, do not put and get by hardware.
 *     test_ucx_properties.py: test_ud_does_not_put_by_hardware
 *   - After a flush, what was put is in the memory before a later message arrives: the peer's device has acknowledged it.
 *     test_notifications.py
 *   - UCX forgets its registration of memory once it is told that the memory is unmapped (libucm's hooks; ucm_vm_munmap),
 *     and next searches its cache, as in ucp_mem_map (ucs_rcache_create_region): tu_memory_unmap. test_like_rdma.py:
 *     test_no_registration_outlives_its_memory; over RDMA test_closed_memory.py: test_by_hardware, and the lab's pinned.py
 *
 *   Addresses, endpoints, libraries
 *   - The layout of worker addresses: _quirks/address_layout.py. test_address_layout.py
 *   - Peers may use any transport of an address, also one that is there only to connect others: _transports.common_part.
 *     Which ones are is read from ucp_context_print_info. test_unreachable_peers.py
 *   - Once an endpoint was flushed, or something has arrived over it, its lanes are final: access_paths.connect, mark_proven.
 *     test_remote_memory.py: test_map_before_the_connection_is_up
 *   - An endpoint's memory begins with five lanes' addresses, which epoll has, too (uct_tcp_ep_mod_events): sockets.c, TCP
 *     only. By worker address and with error handling it has one TCP lane, whatever MAX_RNDV_LANES. test_full_sockets.py
 *   - libucp and libuct call each other, and the C library, through import tables: imports.c. Replaced are TCP's connect and
 *     accept (test_key_gate.py), bind of shared memory (test_wake_sockets.py) and keepalive. RDMA bypasses the gate
 *   - What each transport takes of descriptors: descriptors.py; of mlx5 an estimate. test_descriptors.py
 */
#ifndef TRIO_UCX_NATIVE_H
#define TRIO_UCX_NATIVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>

#include <ucp/api/ucp.h>

#include "cdef.h"
#include "list.h"
#include "newer.h"

/* Records for which the ring keeps room beside the reserved ones. */
#define TU_RING_SLACK 256
/* Progressing ends when it has found so many bytes of messages that stay in UCX's buffers until Python takes them. */
#define TU_BATCH_BYTES (512 * 1024)
/* Such a message counts as at least so many bytes. UCX has 256 spare buffers for messages in shared memory; when they
 * are used up it needs more memory, and where there is none, messages are lost (uct_mm_iface_process_recv). */
#define TU_BUFFER 4096

/* Nanoseconds, of a clock that never goes back. */
static inline uint64_t tu_now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* ---- the key gate (key_gate.c) ---- */

typedef struct tu_gate tu_gate_t;

/* Returns NULL if there is no memory. */
tu_gate_t *tu_gate_create(const tu_port_range_t *range);
bool tu_gate_ready(tu_gate_t *gate);
void tu_gate_destroy(tu_gate_t *gate);
/* Around each call of UCX in which it may listen or connect. */
tu_gate_t *tu_gate_enter(tu_gate_t *gate);
void tu_gate_leave(tu_gate_t *before);
uint64_t tu_gate_strangers(const tu_gate_t *gate);

/* ---- wake-up sockets (wake_sockets.c) ---- */

/* How the names of these sockets end. */
#define TU_WAKE_SUFFIX ".wake"

typedef struct tu_wake {
    char folder[TU_WAKE_FOLDER]; /* "": the worker is not to have such sockets */
    unsigned sockets;            /* how many it has made */
} tu_wake_t;

void tu_wake_opening(tu_wake_t *wake);

/* ---- UCX's log (log.c) ---- */

/* Logs a line of ours, at INFO, in any thread. Its number is 0. */
void tu_log_info(const char *text);

/* ---- UCX's keepalive (keepalive.c) ---- */

/* Keeps it from looking at endpoints that UCX could not make. */
void tu_keepalive_guard(void);

/* ---- import tables (imports.c) ---- */

typedef struct tu_import {
    const char *name;
    const void *function; /* what replaces it */
} tu_import_t;

#define TU_IMPORT(name, function) {(name), (const void *)(uintptr_t)(function)}

/* Returns false if the library does not import the function, or if the system does not let it be replaced. */
bool tu_replace_import(const void *inside, const char *name, const void *function);
/* Replaces several. Returns the name of one that was not replaced; NULL: there is none. */
const char *tu_replace_imports(const void *inside, const tu_import_t *imports, size_t count);

/* ---- routes (routes.c) ---- */

int tu_route_interface(const struct sockaddr *from, const struct sockaddr *to);
bool tu_route_exists(int interface, const struct sockaddr *to);

/* ---- the UCX library (library.c) ---- */

const void *tu_libuct(void);

/* ---- allocating (library.c) ----
 *
 * Everything but the log, the context, the sockets' addresses and what belongs to sockets of UCX's (key_gate.c) is
 * allocated by these functions, so that tests can make them fail: tu_test_refuse_memory(). free() frees it. */

extern int64_t tu_allocations_left; /* that succeed; -1: no limit */

static inline bool tu_may_allocate(void)
{
    if (tu_allocations_left > 0) {
        tu_allocations_left--;
        return true;
    }
    return tu_allocations_left < 0;
}

static inline void *tu_malloc(size_t size)
{
    return tu_may_allocate() ? malloc(size) : NULL;
}

static inline void *tu_calloc(size_t count, size_t size)
{
    return tu_may_allocate() ? calloc(count, size) : NULL;
}

static inline void *tu_aligned_alloc(size_t alignment, size_t size)
{
    return tu_may_allocate() ? aligned_alloc(alignment, size) : NULL;
}

static inline void *tu_realloc(void *memory, size_t size)
{
    return tu_may_allocate() ? realloc(memory, size) : NULL;
}

/* ---- extensions ----
 *
 * An extension is a folder of C code that the core does not name. The build says which ones there are: TU_EXTENSIONS is
 * TU_EXTENSION(folder) for each (build_ffi.py). An extension defines one tu_extension_t, called tu_extension_<folder>.
 * Those that come later may use those before. */

#define TU_EXTENSION(folder) TU_INDEX_##folder,
enum { TU_EXTENSIONS TU_EXTENSION_COUNT };
#undef TU_EXTENSION

typedef struct tu_extension {
    /* Prepares a worker. */
    ucs_status_t (*open)(tu_worker_t *worker);
    /* Whether UCX has requests to an endpoint that are part of some larger operation. NULL: it never has. */
    bool (*in_flight)(tu_endpoint_t *endpoint);
    /* Flushes an endpoint, if the extension has something to flush there: returns true, and sets the verdict. NULL: it
     * never has. */
    bool (*flush)(tu_endpoint_t *endpoint, int64_t *verdict);
    /* UCX still has the endpoint; nothing more is posted to it. */
    void (*endpoint_closing)(tu_endpoint_t *endpoint);
    /* UCX's worker has gone, and no callback will come any more. Not called if `open` stored no state. */
    void (*worker_destroyed)(tu_worker_t *worker);
} tu_extension_t;

/* A function that the worker calls after each progress of UCX while the hook is in its list. Its owner adds it
 * when there is something to do, and removes it when there is not. The function returns how much it did; it may add
 * and remove hooks, its own included. */
typedef struct tu_hook {
    tu_list_t link;
    unsigned (*function)(struct tu_hook *hook);
} tu_hook_t;

/* Work that goes on as the worker progresses, without Python. A sequence is a series of operations; C code posts each
 * when it has seen the one before complete. So each step is a wait of its own, which polling may shorten. A copy needs
 * nothing but time. */
typedef struct tu_background {
    unsigned sequences;        /* sequences that have begun and not ended */
    unsigned ready;            /* sequences of these that can go on at once */
    uint64_t steps;            /* operations that sequences have posted since the worker was created */
    uint64_t slice_end;        /* when sequences give the thread back to Python; 0: not set in this call yet */
    unsigned copies;           /* copies that have begun and not ended; each progress does a piece of one */
} tu_background_t;

/* ---- the structures ---- */

struct tu_context {
    ucp_context_h context;
    uint64_t features;
    ucp_config_t *config;      /* kept for `python -m trio_ucx info` */
};

typedef struct tu_operation {
    tu_worker_t *worker;
    uint64_t id;               /* generation << 32 | slot; 0 while the slot is free */
    void *request;             /* UCX's handle; NULL when it completed inside the call that posted it */
    void *described;           /* freed when it is over: the list or strided array that UCX reads, or a tag_wait_t */
    void (*cancel)(void *owner); /* cancels an operation that our C code carries out; NULL: UCX carries it out */
    void *owner;               /* the argument of `cancel` */
    uint32_t slot;
    uint32_t generation;
    struct tu_operation *next_free;
} tu_operation_t;

/* How long a waiting task polls before it parks: adaptive_poll.c. Times are in nanoseconds. */
typedef struct tu_poll {
    uint64_t bound;            /* the user's limit; 0: never poll */
    uint64_t limit;            /* how long polling has been worth while lately */
    uint64_t began;            /* when the wait began that the limit is to be adapted to; 0: none */
    unsigned misses;           /* polls that found nothing, less those that hits have made up for */
    uint64_t resumes;          /* when polling is tried again */
    unsigned unchecked;        /* polls that have paid since the last look at whether the thread was interrupted */
    long interruptions;        /* how often it was, at that look; -1: not known */
    bool goes_on;              /* a sequence went on in the last poll or progress, and may go on */
    bool continues;            /* the last poll ended before its time, for a schedule point */
    uint64_t last;             /* when the poll began, or a sequence last posted something in it */
    uint64_t steps;            /* background.steps when the wait began */
    unsigned doublings;        /* how often the pause before that has been doubled */
} tu_poll_t;

typedef struct tu_long tu_long_t;
typedef struct tu_pace tu_pace_t;

/* Takes packed messages of a Connection. False: they are left to Python. */
typedef bool (*tu_taker_t)(void *taker, uint64_t tag, size_t length, size_t count, const char *data);

struct tu_worker {
    ucp_worker_h worker;
    const tu_context_t *context;
    tu_gate_t *gate;
    tu_wake_t wake;
    int efd;
    bool knows_user_data;      /* UCX 1.18 can be asked for an endpoint's user data */
    bool loses_info;           /* UCX 1.13 does not say what was received when a receive completes at once */
    bool late_events;          /* arming may lose events: there is InfiniBand. (To look costs 0.5 us over TCP.) */
    uint64_t memory_types;     /* bits by ucs_memory_type_t: the memory that its transports reach */
    uint64_t claimed_bit;      /* tags with this bit are the Connections'; 0: all messages are left to UCX */

    uint64_t failed;           /* operations that have failed */
    size_t collected;          /* bytes of the messages in the ring that UCX still has */
    bool behind;               /* UCX has messages for which there was no room: tag_inbox.c */
    char *scratch;             /* TU_LONGEST_BATCH bytes; NULL: to be allocated */
    size_t arena_used;         /* starts at 0 again when the ring is empty */
    tu_taker_t take;           /* is asked before Python; NULL: nobody is */
    void *taker;
    char arena[TU_ARENA];

    tu_record_t *ring;
    size_t capacity;           /* a power of two */
    size_t first;
    size_t used;
    size_t reserved;

    tu_operation_t **blocks;   /* slots, in blocks that never move because UCX holds pointers to them */
    size_t block_count;
    tu_operation_t *free_slots;
    ucp_datatype_t strided;    /* 0 until it is needed */

    bool streams;              /* whether endpoints may have stream data */
    bool unread;               /* some have stream data for which the ring had no room */
    ucp_ep_h spare;            /* gives stream data back when there is no other endpoint: stream.c */

    tu_poll_t poll;
    tu_background_t background;
    tu_list_t hooks;
    void *extensions[TU_EXTENSION_COUNT]; /* the state of each */
    uint64_t next_room;        /* when to look for full send buffers again, in nanoseconds: endpoint.c */
    uint64_t next_look;        /* the same for sockets to which UCX has more to write */

    uint32_t long_count;       /* long messages that were sent */
    uint64_t others;           /* other messages of Connections that were sent or have arrived */
    tu_list_t long_received;   /* that were announced and have not ended */
    tu_list_t long_cut;        /* that were sent and have not ended although their endpoint is closed */
    tu_long_t *long_spare;     /* for the next announcement; NULL: to be allocated */

    tu_list_t endpoints;
    tu_list_t closed;          /* endpoints that UCX may still name: endpoint.c */
    tu_counts_t counts;
    uint64_t moved; /* what progress has sent and received, in fragments */
};

struct tu_endpoint {
    tu_worker_t *worker;
    ucp_ep_h ep;               /* NULL once closing began */
    uint64_t id;
    bool error_handling;
    bool failed;               /* its record is in the ring, or was; no room is reserved for one any more */
    tu_pace_t *pace;           /* of the long messages sent there; NULL: none were */
    bool unread;               /* it has stream data for which the ring had no room */
    void *extensions[TU_EXTENSION_COUNT]; /* what each keeps for it, and frees in `endpoint_closing` */
    tu_list_t link;            /* in the worker's endpoints, or in its closed ones */
};

struct tu_listener {
    tu_worker_t *worker;
    ucp_listener_h listener;
    uint64_t id;
};

/* ---- the ring of records (ring.c) ----
 *
 * tu_ring_reserve keeps room for one record, with slack to spare; tu_ring_unreserve gives it up, right before the
 * record is appended, or when there will be none. Code without a reservation asks before it appends:
 *
 *   tu_ring_has_slack   whether there is room for one more record; allocates nothing
 *   tu_ring_find_room   lets the ring grow to keep the slack, and uses the slack only if there is no memory
 *   tu_ring_make_room   lets the ring grow for `count` records
 *
 * While there is no room, the ring has records. So Python's next call takes some, and then there is room.
 *
 * To append a record without any of this is a fault in the caller. A development build (TRIO_UCX_WERROR=1) aborts. Any
 * other build lets the ring grow, and aborts if there is no memory for that: with a record lost or overwritten, a task
 * would wait for ever, or Python would free a buffer that UCX still uses. */
bool tu_ring_create(tu_worker_t *worker);
bool tu_ring_reserve(tu_worker_t *worker);
void tu_ring_unreserve(tu_worker_t *worker);
bool tu_ring_has_slack(const tu_worker_t *worker);
bool tu_ring_find_room(tu_worker_t *worker);
bool tu_ring_make_room(tu_worker_t *worker, size_t count);
void tu_ring_append(tu_worker_t *worker, uint64_t kind, uint64_t id, ucs_status_t status, uint64_t length,
                    uint64_t tag, uint64_t pointer);
/* The newest record, or NULL when the ring is empty. */
tu_record_t *tu_ring_last(tu_worker_t *worker);
/* Takes records, up to `max` for Python. Packed messages at the front go to worker->take; they become one record. */
size_t tu_ring_take(tu_worker_t *worker, tu_record_t *out, size_t max);

/* ---- query.c ---- */

bool tu_endpoint_uses_tcp(tu_endpoint_t *endpoint);
bool tu_endpoint_copies(tu_endpoint_t *endpoint);

/* ---- sockets.c ---- */

unsigned tu_sockets_full(int efd, ucp_ep_h endpoint, bool stop, unsigned *full);

/* ---- the Connections' messages (tag_inbox.c) ---- */

void tu_inbox_collect(tu_worker_t *worker);
unsigned tu_inbox_progress(tu_worker_t *worker);
void tu_inbox_complete_last(tu_worker_t *worker);
/* Whether the same call may progress again: there is room for what that brings, and no piece of a copy was made (one at a
 * time, so that Python runs). */
bool tu_inbox_goes_on(const tu_worker_t *worker);
/* Whether UCX may have messages that were not collected because there was no memory. */
bool tu_inbox_lacks_memory(const tu_worker_t *worker);

/* ---- long messages (long_messages.c, pacing.c) ---- */

/* The most pieces of an endpoint that UCX has, not counting the first ones of each message. With a round trip of 10 ms, 64
 * are enough for 0.8 GB/s. */
#define TU_MOST_PIECES 64

/* Set in the `pointer` of a record: it is no handle of UCX's, but names a long message. No address of a process has the
 * highest bit. The lowest would not do, because over rc_verbs UCX's handles are odd. */
#define TU_IS_LONG ((uint64_t)1 << 63)
/* Bytes of an announcement: queue (4), queue of the pieces (4), length of the message (8). */
#define TU_LONG_HEAD 16

void tu_message_throw_away(tu_worker_t *worker, ucp_tag_message_h handle);
void tu_long_open(tu_worker_t *worker);
bool tu_long_reserve(tu_worker_t *worker);
ucs_status_t tu_long_announced(tu_worker_t *worker, uint64_t tag, const char *head);
void tu_long_piece_arrived(tu_worker_t *worker, ucp_tag_message_h handle, uint64_t tag, size_t length);
int64_t tu_long_receive(tu_worker_t *worker, uint64_t pointer, const tu_buffers_t *buffers);
void tu_long_endpoint_closing(tu_endpoint_t *endpoint, bool forced);
void tu_long_worker_destroyed(tu_worker_t *worker);

/* ---- hooks (hooks.c) ---- */

void tu_hook_init(tu_hook_t *hook, unsigned (*function)(tu_hook_t *hook));
/* Does nothing if the hook was added already. */
void tu_hook_add(tu_worker_t *worker, tu_hook_t *hook);
void tu_hook_remove(tu_hook_t *hook);
unsigned tu_hooks_call(tu_worker_t *worker);

/* ---- calls to extensions (extensions.c) ---- */

ucs_status_t tu_extensions_open(tu_worker_t *worker);
void tu_extensions_worker_destroyed(tu_worker_t *worker);
bool tu_extensions_in_flight(tu_endpoint_t *endpoint);
bool tu_extensions_flush(tu_endpoint_t *endpoint, int64_t *verdict);
void tu_extensions_closing(tu_endpoint_t *endpoint);

/* ---- polling (adaptive_poll.c) ---- */

/* Something arrived by progress, and so was not found by polling. */
void tu_poll_ended(tu_worker_t *worker);
/* Whether the worker should go on polling rather than be armed, because sequences go on; `steps` is the number of their
 * steps when progressing began. */
bool tu_poll_sequences(tu_worker_t *worker, uint64_t steps);

/* ---- operations (operation.c) ---- */

/* Tells UCX the kind of memory of a buffer: see TU_MEMORY_HOST. Without this UCX finds out. */
static inline void tu_set_memory(ucp_request_param_t *param, int memory)
{
    if (memory != TU_MEMORY_UNKNOWN) {
        param->op_attr_mask |= UCP_OP_ATTR_FIELD_MEMORY_TYPE;
        param->memory_type   = (ucs_memory_type_t)(memory - 1);
    }
}

/* An operation on its way to UCX. */
typedef struct tu_post {
    tu_operation_t *operation;
    uint64_t id;
    ucp_request_param_t param;
    void *address;             /* the argument that UCX's functions call "buffer" */
    size_t count;
} tu_post_t;

/* Takes a slot, reserves room for its record and fills in `param` for a send of `buffers` (NULL: none). Returns 0, or
 * the verdict of an operation that could not begin. */
int64_t tu_post_begin(tu_post_t *post, tu_worker_t *worker, const tu_buffers_t *buffers);
/* Turns UCX's answer into a verdict. */
int64_t tu_post_end(tu_post_t *post, ucs_status_ptr_t answer);
/* Returns NULL when the operation is over. */
tu_operation_t *tu_operation_find(tu_worker_t *worker, uint64_t id);
/* Ends an operation, and appends its record. */
void tu_operation_done(tu_operation_t *operation, void *request, ucs_status_t status, uint64_t length, uint64_t tag);
/* UCX's callbacks that do so. */
void tu_operation_sent(void *request, ucs_status_t status, void *user_data);
void tu_operation_received(void *request, ucs_status_t status, size_t length, void *user_data);
void tu_operations_free(tu_worker_t *worker);

/* ---- active messages (active_messages.c) ---- */

ucs_status_t tu_am_handle(tu_worker_t *worker, unsigned am_id, ucp_am_recv_callback_t callback, void *arg);
/* The id of the worker's endpoint that a message came from; 0: it is unknown, or UCX's own. */
uint64_t tu_am_sender(tu_worker_t *worker, const ucp_am_recv_param_t *param);

/* ---- streams (stream.c) ---- */

void tu_stream_collect(tu_worker_t *worker);

/* ---- strided arrays (strided.c) ---- */

/* The datatype of which a strided array is posted as one element, at the address of its description. */
ucs_status_t tu_strided_datatype(ucp_datatype_t *out);
tu_strided_t *tu_strided_copy(const tu_strided_t *strided);
/* A description of `length` bytes of the array from position `offset` on. */
tu_strided_t *tu_strided_part(const tu_strided_t *strided, size_t offset, size_t length);

/* ---- socket addresses (sockaddr.c) ---- */

/* Returns false if `ip` is no address of this family. */
bool tu_sockaddr_make(struct sockaddr_storage *out, socklen_t *length, int family, const char *ip, unsigned port,
                      unsigned scope);
bool tu_sockaddr_is_own(const struct sockaddr *address, socklen_t length);
ucs_status_t tu_sockaddr_text(const struct sockaddr_storage *address, char *host, size_t size, unsigned *port);

#endif
