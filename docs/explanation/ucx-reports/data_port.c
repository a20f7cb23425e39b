/*
 * A stranger at TCP's data port
 *
 * What happens. Each TCP interface of a worker listens. A program that connects and sends the magic number is taken for
 * a peer, and UCX trusts what it sends next. Lengths, numbers and states are checked by assertions only, which a
 * release build leaves out, or which end the process.
 *
 * * A connection request with the greatest number, 2^64 - 1, ends the process: Assertion 'ret == 1' failed in
 *   uct_tcp_cm_insert_ep (1.22). 42 bytes.
 * * A request to put: uct_tcp_ep_handle_put_req and uct_tcp_ep_progress_put_rx write what follows wherever the header
 *   says. No key is asked for, RMA need not be in use, and UCX_TCP_PUT_ENABLE=n turns off sending only. 67 bytes and
 *   the data.
 * * A message that is longer than the buffer is received behind the end of it, into the buffers of other connections.
 * * UCP's own messages are taken for well-formed. Their ids of endpoints and requests may be plain pointers
 *   (UCS_PTR_MAP_KEY_INDIRECT_FLAG not set), which are followed. A wireup request has a worker address, with the fault
 *   of damaged_address.c. With messages of 64 times 0x22, 16 of 28 kinds ended the process in 1.22, 15 in 1.13.
 * * More connections than descriptors: when accept fails with EMFILE, uct_tcp_iface_connect_handler closes the
 *   listening socket. Nobody can connect any more, also when there are descriptors again.
 *
 * This program. Starts a server for each of these, and connects to it over loopback. The strangers know the magic
 * number and the port, nothing else. An argument chooses one:
 *
 *   number       a connection request with the number 2^64 - 1
 *   put          a request to write to memory: the server gives the address of a variable of its own, and prints it
 *                afterwards
 *   length       a message that is longer than the buffer for it
 *   messages     one message of each kind of UCP's, of 64 equal bytes
 *   descriptors  more connections than the server has descriptors
 *
 * Shown with UCX 1.13.1: yes; UCX 1.22.0: yes.
 *
 * Suggested change. In src/uct/tcp:
 *
 * * A secret of the interface, random, as part of its address (uct_tcp_iface_addr_t), which the connection request must
 *   repeat; nothing else is accepted before it. Then only those who were given a worker address can connect at all.
 * * tcp_cm.c: uct_tcp_cm_handle_conn_pkt and uct_tcp_cm_handle_conn_req check length, state, and conn_sn <
 *   UCT_TCP_CM_CONN_SN_MAX, and otherwise close the connection (uct_tcp_ep_handle_disconnected).
 * * tcp_ep.c: uct_tcp_ep_progress_am_rx does the same for hdr->length and for a request to put before a connection
 *   request; and a put is refused where PUT_ENABLE is off. A key for remote memory, which TCP has none of so far and
 *   which the request would carry, would confine it to memory that was registered.
 * * tcp_iface.c: uct_tcp_iface_connect_handler keeps the socket after EMFILE, ENFILE, ENOBUFS and ENOMEM. As the event
 *   would be reported again at once, it should turn the handler's events off for a while, or keep a spare descriptor to
 *   accept and close with.
 *
 * In src/ucp, handlers compare the length of a message with that of its header; ids that come from a peer must be
 * indirect keys.
 *
 * What trio_ucx does. A data port lets in only connections that prove a key, and hosts that the program admits
 * (trio_ucx/_native/key_gate.c). A listener whose data port was closed goes on with another worker.
 */
#include "common.h"

#include <arpa/inet.h>
#include <netinet/in.h>

/* The data port's protocol (src/uct/tcp/tcp.h) */
enum { CONNECT = 32, PUT = 33 }; /* UCT_TCP_EP_CM_AM_ID, UCT_TCP_EP_PUT_REQ_AM_ID */

static const uint64_t magic = 0xCAFEBABE12345678ul;

struct __attribute__((packed)) header {
    uint8_t id;
    uint32_t length;
};

struct __attribute__((packed)) opening {
    uint64_t magic;
    struct header header;
    uint32_t event;
    uint8_t flags;
    uint64_t number;
    struct sockaddr_in address;
};

static struct opening opening(uint64_t number)
{
    return (struct opening){
        .magic = magic,
        .header = {CONNECT, sizeof(struct opening) - sizeof magic - sizeof(struct header)},
        .event = 1,
        .number = number,
        .address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(9)},
    };
}

/* ---- the server ---- */

static volatile uint64_t variable;

struct report {
    struct sockaddr_in port;
    uint64_t variable;
};

/* Waits for strangers, until the other end is closed. */
static void serve(int control)
{
    ucp_worker_h worker = open_worker(open_context(UCP_FEATURE_TAG | UCP_FEATURE_AM | UCP_FEATURE_RMA));
    struct report report = {.variable = (uintptr_t)&variable};
    char byte;

    for (int fd = 0; fd < 1000 && report.port.sin_port == 0; fd++) {
        int listens = 0;
        socklen_t size = sizeof listens;
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 && listens) {
            size = sizeof report.port;
            getsockname(fd, (struct sockaddr *)&report.port, &size);
        }
    }
    put_block(control, &report, sizeof report);
    for (double end = now() + 10; now() < end;) {
        ucp_worker_progress(worker);
        if (recv(control, &byte, 1, MSG_DONTWAIT) == 0)
            break;
    }
    if (variable != 0)
        printf("the server's variable is 0x%lx now\n", variable);
}

static void serve_with_few_descriptors(int control)
{
    setrlimit(RLIMIT_NOFILE, &(struct rlimit){60, 60});
    serve(control);
}

/* ---- the strangers ---- */

static int refused;

static int come(const struct report *server)
{
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct timeval second = {.tv_sec = 1};
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &second, sizeof second);
    if (connect(fd, (struct sockaddr *)&server->port, sizeof server->port) != 0)
        refused++;
    return fd;
}

static void say(int fd, const void *data, size_t length)
{
    if (send(fd, data, length, MSG_NOSIGNAL) < 0)
        printf("a stranger cannot write: %s\n", strerror(errno));
}

static void number(const struct report *server, int argument)
{
    struct opening request = opening(UINT64_MAX);
    say(come(server), &request, sizeof request);
    usleep(200000);
}

static void put(const struct report *server, int argument)
{
    struct __attribute__((packed)) {
        struct opening opening;
        struct header header;
        uint64_t address, length;
        uint32_t number;
        uint64_t data;
    } message = {opening(0), {PUT, 20}, server->variable, 8, 1, 0xabadcafe};
    say(come(server), &message, sizeof message);
    usleep(200000);
}

static void length(const struct report *server, int argument)
{
    static struct __attribute__((packed)) {
        uint64_t magic;
        struct header header;
        char data[1000000];
    } message;
    int other = come(server), fd;

    say(other, &magic, 1); /* its buffer lies behind the one that overflows */
    usleep(50000);
    fd = come(server);
    message.magic = magic;
    message.header = (struct header){2, sizeof message.data + 1};
    memset(message.data, 0x41, sizeof message.data);
    say(fd, &message, sizeof message);
    usleep(200000);
    close(other);
    usleep(50000);
}

static void message(const struct report *server, int id)
{
    struct __attribute__((packed)) {
        struct opening opening;
        struct header header;
        char data[64];
    } message = {opening(0), {id, 64}};

    memset(message.data, 0x22, sizeof message.data);
    say(come(server), &message, sizeof message);
    usleep(40000);
}

static void descriptors(const struct report *server, int argument)
{
    int fds[60];

    for (int i = 0; i < 60; i++) {
        fds[i] = come(server);
        usleep(1000);
    }
    for (int i = 0; i < 60; i++)
        close(fds[i]);
    usleep(300000);
    refused = 0;
    come(server);
    printf("when the others have gone, the next one %s\n", refused ? "is refused" : "may connect");
}

/* A server of its own for some strangers. */
static void run(const char *name, void (*side)(int), void (*strangers)(const struct report *, int), int argument)
{
    int ends[2];
    size_t size;
    pid_t server;

    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
        exit(3);
    fflush(stdout);
    if ((server = fork()) == 0) {
        close(ends[0]);
        side(ends[1]);
        fflush(stdout);
        _exit(0);
    }
    close(ends[1]);
    strangers(get_block(ends[0], &size), argument);
    close(ends[0]);
    ended(server, name);
}

static int chosen(int argc, char **argv, const char *kind)
{
    return argc < 2 || strcmp(argv[1], kind) == 0;
}

int main(int argc, char **argv)
{
    option("UCX_TLS", "tcp");
    option("UCX_NET_DEVICES", "lo");
    if (chosen(argc, argv, "number"))
        run("number", serve, number, 0);
    if (chosen(argc, argv, "put"))
        run("put", serve, put, 0);
    if (chosen(argc, argv, "length"))
        run("length", serve, length, 0);
    for (int id = 1; id <= 28 && chosen(argc, argv, "messages"); id++) {
        char name[40];
        sprintf(name, "message %d", id);
        run(name, serve, message, id);
    }
    if (chosen(argc, argv, "descriptors"))
        run("descriptors", serve_with_few_descriptors, descriptors, 0);
    return 0;
}
