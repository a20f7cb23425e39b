/* Keeps UCX's descriptors out of the programs that this process starts.
 *
 * UCX opens most of its descriptors without close-on-exec. A program that is started by anything but Python's subprocess,
 * such as os.system(), would inherit them, and keep the ports and connections open after this process has ended. UCX's
 * libraries therefore call these functions, which set the flag as they open. accept() is replaced in key_gate.c. What
 * others open has the flag already: shm_open(), UCX's eventfd(), and the libraries of RDMA cards.
 *
 * UCX_LOG_FILE, which UCX opens while it is loaded, is inherited. Where imports cannot be
 * replaced, workers with TCP or shared memory do not open anyway (key_gate.c, wake_sockets.c). */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "native.h"

static int closing_epoll_create(int size)
{
    (void)size;
    return epoll_create1(EPOLL_CLOEXEC);
}

static int closing_pipe(int *ends)
{
    return pipe2(ends, O_CLOEXEC);
}

static int closing_socket(int domain, int type, int protocol)
{
    return socket(domain, type | SOCK_CLOEXEC, protocol);
}

static int closing_timerfd_create(int clock, int flags)
{
    return timerfd_create(clock, flags | TFD_CLOEXEC);
}

static int closing_open(const char *path, int flags, ...)
{
    mode_t mode = 0;
    va_list arguments;

    if ((flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE) {
        va_start(arguments, flags);
        mode = va_arg(arguments, mode_t);
        va_end(arguments);
    }
    return open(path, flags | O_CLOEXEC, mode);
}

static FILE *closing_fopen(const char *path, const char *mode)
{
    char closing[16];

    if ((size_t)snprintf(closing, sizeof(closing), "%se", mode) >= sizeof(closing)) {
        errno = EINVAL;
        return NULL;
    }
    return fopen(path, closing);
}

/* Called once, when UCX has been loaded. */
void tu_close_on_exec(void)
{
    static const tu_import_t imports[] = {
        TU_IMPORT("epoll_create", closing_epoll_create),
        TU_IMPORT("pipe", closing_pipe),
        TU_IMPORT("socket", closing_socket),
        TU_IMPORT("timerfd_create", closing_timerfd_create),
        TU_IMPORT("open", closing_open),
        TU_IMPORT("fopen", closing_fopen),
    };
    const void *libraries[] = {
        (const void *)(uintptr_t)ucs_status_string, /* libucs */
        tu_libuct(),
        (const void *)(uintptr_t)ucp_get_version, /* libucp */
    };

    for (size_t i = 0; i < sizeof(libraries) / sizeof(*libraries); i++) {
        if (libraries[i] != NULL) {
            (void)tu_replace_imports(libraries[i], imports, sizeof(imports) / sizeof(*imports));
        }
    }
}
