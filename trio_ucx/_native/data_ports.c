/* The ports of UCX's TCP transport: each gets a packet filter before it listens.
 *
 * UCX binds a socket for each network device, and makes it listen at once, inside ucp_worker_create. It has no hook
 * there. A filter that is attached afterwards does not stop a stranger who has connected in the meantime. The entries
 * for bind and listen in the import table (GOT) of libucs are therefore replaced with the functions below. They act only
 * while this thread creates a worker, so other users of the same libucs are not affected. */
#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "native.h"

#if defined(__x86_64__)
#define IS_IMPORT(type) ((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT)
#elif defined(__aarch64__)
#define IS_IMPORT(type) ((type) == R_AARCH64_JUMP_SLOT || (type) == R_AARCH64_GLOB_DAT)
#else
#define IS_IMPORT(type) false
#endif

/* The ports of the worker that this thread creates. */
static __thread tu_data_ports_t *creating;

/* UCX tries random ports of its range (TCP_PORT_RANGE) until one is free. If none is, it tries for ever. And without
 * SO_REUSEADDR a port is not free for a minute after its last connection (TIME_WAIT). */
static int bind_in_range(int fd, const struct sockaddr *address, socklen_t length)
{
    union {
        struct sockaddr_storage any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } copy;

    if (bind(fd, address, length) == 0) {
        return 0;
    }
    if (creating == NULL || errno != EADDRINUSE || length > sizeof(copy)) {
        return -1;
    }
    memcpy(&copy, address, length);
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
    for (unsigned port = creating->lowest; port <= creating->highest && port != 0; port++) {
        *(copy.any.ss_family == AF_INET6 ? &copy.v6.sin6_port : &copy.v4.sin_port) = htons((uint16_t)port);
        if (bind(fd, (const struct sockaddr *)&copy, length) == 0) {
            return 0;
        }
    }
    creating->used_up = true;
    errno             = EADDRNOTAVAIL; /* with EADDRINUSE UCX would try again */
    return -1;
}

static int listen_behind_filter(int fd, int backlog)
{
    struct sock_filter drop    = BPF_STMT(BPF_RET | BPF_K, 0);
    struct sock_fprog program  = {.len = 1, .filter = &drop};

    if (creating != NULL && creating->count < TU_DATA_PORTS) {
        if (setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof(program)) != 0) {
            creating->error = errno;
        }
        creating->fds[creating->count++] = fd;
    }
    return listen(fd, backlog);
}

/* Replaces an entry of an import table. If that fails, Python notices that the worker's address has other ports. */
static void replace(void **entry, void *function)
{
    uintptr_t page_size = (uintptr_t)sysconf(_SC_PAGESIZE);
    void *page          = (void *)((uintptr_t)entry & ~(page_size - 1));

    /* The linker may have made the table read-only (RELRO). It stays writable, as most import tables are. */
    if (mprotect(page, page_size, PROT_READ | PROT_WRITE) == 0) {
        __atomic_store_n(entry, function, __ATOMIC_RELEASE);
    }
}

typedef struct imports {
    ElfW(Addr) base;
    const ElfW(Sym) *symbols;
    const char *strings;
} imports_t;

static void replace_imports(imports_t *imports, ElfW(Addr) table, size_t size)
{
    const ElfW(Rela) *entry = (const ElfW(Rela) *)table;
    const char *name;
    void **slot;

    for (size_t i = 0; i < size / sizeof(*entry); i++) {
        if (!IS_IMPORT(ELF64_R_TYPE(entry[i].r_info))) {
            continue;
        }
        name = imports->strings + imports->symbols[ELF64_R_SYM(entry[i].r_info)].st_name;
        slot = (void **)(imports->base + entry[i].r_offset);
        if (strcmp(name, "bind") == 0) {
            replace(slot, (void *)(uintptr_t)bind_in_range);
        } else if (strcmp(name, "listen") == 0) {
            replace(slot, (void *)(uintptr_t)listen_behind_filter);
        }
    }
}

static const ElfW(Phdr) *segment(struct dl_phdr_info *object, ElfW(Word) type, ElfW(Addr) address)
{
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &object->dlpi_phdr[i];
        ElfW(Addr) begin         = object->dlpi_addr + header->p_vaddr;

        if (header->p_type == type && (address == 0 || (begin <= address && address < begin + header->p_memsz))) {
            return header;
        }
    }
    return NULL;
}

/* Replaces the imports of libucs, which is the object that contains ucs_status_string. */
static int visit(struct dl_phdr_info *object, size_t size, void *arg)
{
    imports_t imports           = {.base = object->dlpi_addr};
    ElfW(Addr) tables[2]        = {0, 0};
    size_t sizes[2]             = {0, 0};
    const ElfW(Phdr) *dynamic   = segment(object, PT_DYNAMIC, 0);
    const ElfW(Dyn) *tag;

    (void)size;
    (void)arg;
    if (dynamic == NULL || segment(object, PT_LOAD, (ElfW(Addr))(uintptr_t)ucs_status_string) == NULL) {
        return 0;
    }
    for (tag = (const ElfW(Dyn) *)(imports.base + dynamic->p_vaddr); tag->d_tag != DT_NULL; tag++) {
        switch (tag->d_tag) {
        case DT_SYMTAB: imports.symbols = (const ElfW(Sym) *)tag->d_un.d_ptr; break;
        case DT_STRTAB: imports.strings = (const char *)tag->d_un.d_ptr; break;
        case DT_JMPREL: tables[0] = tag->d_un.d_ptr; break;
        case DT_PLTRELSZ: sizes[0] = tag->d_un.d_val; break;
        case DT_RELA: tables[1] = tag->d_un.d_ptr; break;
        case DT_RELASZ: sizes[1] = tag->d_un.d_val; break;
        default: break;
        }
    }
    /* The C library has made the addresses absolute; where one does not, this would read elsewhere. */
    if ((ElfW(Addr))(uintptr_t)imports.symbols >= imports.base && (ElfW(Addr))(uintptr_t)imports.strings >= imports.base) {
        for (int i = 0; i < 2; i++) {
            if (tables[i] >= imports.base) {
                replace_imports(&imports, tables[i], sizes[i]);
            }
        }
    }
    return 1;
}

static void replace_once(void)
{
    dl_iterate_phdr(visit, NULL);
}

/* From now on, until tu_data_ports_end, the sockets on which UCX listens go into `ports`. */
void tu_data_ports_begin(tu_data_ports_t *ports)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, replace_once);
    creating = ports;
}

void tu_data_ports_end(void)
{
    creating = NULL;
}
