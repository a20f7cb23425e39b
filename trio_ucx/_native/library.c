/* The UCX library in use, a few Linux system calls that Python 3.11 lacks, and the allocations that tests make fail. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "native.h"

#define HUGE_PAGE ((uintptr_t)2 << 20) /* x86-64's, and that of AArch64 with pages of 4 KiB */

int64_t tu_allocations_left = -1;

/* Which UCX the build was for: trio_ucx/_native/__init__.py reads it from the file, before it loads either. */
extern const char tu_built_for[];
const char tu_built_for[] = "trio_ucx was built for " TU_UCX;

/* For tests only: after `allowed` more allocations by this module, all fail; -1 ends that. UCX's allocations, and those
 * of the log, are not affected. */
void tu_test_refuse_memory(int64_t allowed)
{
    tu_allocations_left = allowed;
}

const char *tu_library_file(void)
{
    Dl_info info;

    if (dladdr((void *)(uintptr_t)ucp_get_version, &info) == 0 || info.dli_fname == NULL) {
        return "";
    }
    return info.dli_fname;
}

/* Something in libuct, to which this module is not linked; NULL if it is not found. */
const void *tu_libuct(void)
{
    void *libucp       = dlopen(tu_library_file(), RTLD_LAZY | RTLD_NOLOAD);
    const void *libuct = NULL;

    if (libucp != NULL) {
        libuct = dlsym(libucp, "uct_iface_open"); /* in what libucp depends on */
        dlclose(libucp);
    }
    return libuct;
}

void tu_library_version(unsigned *major, unsigned *minor, unsigned *release)
{
    ucp_get_version(major, minor, release);
}

void tu_compiled_version(unsigned *major, unsigned *minor)
{
    *major = UCP_API_MAJOR;
    *minor = UCP_API_MINOR;
}

const char *tu_status_text(int status)
{
    return ucs_status_string((ucs_status_t)status);
}

/* Asks for huge pages for memory that nobody has written to yet, so that the kernel clears 2 MiB at a time instead of
 * one page. A kernel that has none ignores this. */
void tu_prefer_huge_pages(void *address, size_t length)
{
    uintptr_t begin = ((uintptr_t)address + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1);
    uintptr_t end   = ((uintptr_t)address + length) & ~(HUGE_PAGE - 1);

    if (begin < end) {
        (void)madvise((void *)begin, end - begin, MADV_HUGEPAGE);
    }
}

int tu_timer_create(void)
{
    return timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
}

/* Starts the timer, or stops it (0). Either way it is not readable until it expires. */
int tu_timer_set(int fd, uint64_t nanoseconds, bool repeat)
{
    struct itimerspec spec;

    memset(&spec, 0, sizeof(spec));
    spec.it_value.tv_sec  = (time_t)(nanoseconds / 1000000000u);
    spec.it_value.tv_nsec = (long)(nanoseconds % 1000000000u);
    if (repeat) {
        spec.it_interval = spec.it_value;
    }
    return timerfd_settime(fd, 0, &spec, NULL);
}

/* Whether the timer has expired since it was last started, or since the last call of this function; then it stops being
 * readable. A timer that was started again meanwhile goes on. */
bool tu_timer_ended(int fd)
{
    uint64_t times;

    return read(fd, &times, sizeof(times)) == sizeof(times);
}

/* Creates a descriptor that is readable when either of two is. Returns -1, and sets errno, if that fails. */
int tu_wait_create(int efd, int timer)
{
    struct epoll_event event = {.events = EPOLLIN, .data = {.fd = 0}};
    int fd                   = epoll_create1(EPOLL_CLOEXEC);
    int error;

    if (fd < 0) {
        return -1;
    }
    if (epoll_ctl(fd, EPOLL_CTL_ADD, efd, &event) < 0 || epoll_ctl(fd, EPOLL_CTL_ADD, timer, &event) < 0) {
        error = errno;
        close(fd);
        errno = error;
        return -1;
    }
    return fd;
}

/* Whether two segments of System V's shared memory of these sizes can be allocated at the same time: 0, or errno. Their
 * pages are not touched. */
int tu_probe_sysv(size_t one, size_t other)
{
    int first  = shmget(IPC_PRIVATE, one, IPC_CREAT | 0600);
    int second = first < 0 ? -1 : shmget(IPC_PRIVATE, other, IPC_CREAT | 0600);
    int error  = second < 0 ? errno : 0;

    if (first >= 0) {
        shmctl(first, IPC_RMID, NULL);
    }
    if (second >= 0) {
        shmctl(second, IPC_RMID, NULL);
    }
    return error;
}

static void *do_nothing(void *nothing)
{
    return nothing;
}

/* Returns 0 if a thread can be started, otherwise errno. */
int tu_probe_thread(void)
{
    pthread_t thread;
    int error = pthread_create(&thread, NULL, do_nothing, NULL);

    if (error == 0) {
        pthread_join(thread, NULL);
    }
    return error;
}

/* The number of descriptors that can be opened, up to about `wanted`; if fewer, errno says why. Counts the numbers below
 * the limit that are not in use, from the top, where a few calls find many. */
int tu_descriptors_left(int wanted)
{
    struct pollfd entries[256];
    struct rlimit limit;
    int           count = 0;
    int           fd    = eventfd(0, EFD_CLOEXEC); /* fails also if the machine has none left */

    if (fd < 0 || close(fd) != 0 || getrlimit(RLIMIT_NOFILE, &limit) != 0) {
        return 0;
    }
    for (rlim_t end = limit.rlim_cur; end > 0 && count < wanted;) {
        nfds_t size = end < 256 ? end : 256;

        end -= size;
        for (nfds_t i = 0; i < size; i++) {
            entries[i] = (struct pollfd){.fd = (int)(end + i)};
        }
        if (poll(entries, size, 0) < 0) {
            return 0;
        }
        for (nfds_t i = 0; i < size; i++) {
            count += (entries[i].revents & POLLNVAL) != 0;
        }
    }
    errno = EMFILE;
    return count;
}

bool tu_readable(int fd)
{
    struct pollfd entry = {.fd = fd, .events = POLLIN, .revents = 0};

    return poll(&entry, 1, 0) > 0;
}
