/* UCX's log: keeps its lines until a Python thread takes them, so that no Python runs inside UCX.
 *
 * UCX logs in every thread in which it runs, its own included, and may hold locks meanwhile. Without a reader (before
 * the first context is opened, after the last one is closed, in a forked child) lines go to stderr. No thread of UCX's
 * or the user's waits for long until stderr takes a line: it may be a pipe that nobody reads. */
#define _GNU_SOURCE
#include <alloca.h>
#include <errno.h>
#include <fnmatch.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "native.h"

#include <ucs/debug/log_def.h>

/* Bytes of lines that are kept at most; later lines are lost, and counted. */
#define LOG_BYTES (16 * 1024 * 1024)
/* Nanoseconds that UCX waits for errors to be logged, as it may be about to end the process: at most so many in each
 * second, because UCX can log the same error thousands of times within one call. */
#define ERROR_PATIENCE 20000000
#define SECOND 1000000000
/* Milliseconds that a line waits until what it is written to takes it. Later lines do not wait, until one is taken. */
#define WRITE_PATIENCE 100

extern ucs_status_t ucs_global_opts_get_value(const char *name, char *value, size_t max);

typedef struct line {
    struct line *next;
    size_t size;
    tu_log_line_t line;        /* for Python; the text follows */
} line_t;

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t came;       /* there is a line, or the reader is to end */
    pthread_cond_t logged;     /* all lines have been logged */
    line_t *first;
    line_t **last;
    size_t bytes;
    uint64_t lost;
    unsigned reader;           /* the number of the thread that takes lines; 0: none */
    unsigned readers;
    line_t *taken;             /* the reader is logging this line */
    bool patient;              /* whether the reader keeps up, so that errors may wait for it */
    uint64_t second;           /* when the present second began */
    uint64_t waited;           /* nanoseconds that errors have waited in it */
    int trigger;               /* UCX ends the process at a line of this level */
    char files[256];           /* UCX_LOG_FILE_FILTER */
} self = {
    .mutex  = PTHREAD_MUTEX_INITIALIZER,
    .came   = PTHREAD_COND_INITIALIZER,
    .logged = PTHREAD_COND_INITIALIZER,
    .last   = &self.first,
};

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');

    return slash == NULL ? path : slash + 1;
}

static const char *level_name(int level)
{
    return level == UCS_LOG_LEVEL_PRINT ? "PRINT" : level < UCS_LOG_LEVEL_LAST ? ucs_log_level_names[level] : "?";
}

static bool is_reader(unsigned reader)
{
    bool is;

    pthread_mutex_lock(&self.mutex);
    is = self.reader == reader;
    pthread_mutex_unlock(&self.mutex);
    return is;
}

/* Waits until a line can be written to a descriptor without blocking; without limit if it is the reader's, while the
 * reader is to go on. Returns false if it cannot. */
bool tu_log_can_write(unsigned reader, int fd)
{
    static bool stalled; /* the last line was not taken */
    struct pollfd entry = {.fd = fd, .events = POLLOUT};
    bool reads;
    int ready;

    do {
        reads = reader != 0 && is_reader(reader);
        ready = poll(&entry, 1, reads || !__atomic_load_n(&stalled, __ATOMIC_RELAXED) ? WRITE_PATIENCE : 0);
        __atomic_store_n(&stalled, ready == 0, __ATOMIC_RELAXED);
    } while (ready <= 0 && (reads || (ready < 0 && errno == EINTR)));
    return ready > 0;
}

/* Writes a line to stderr, when it cannot be logged. It may quote a peer, whose text must not control the terminal. */
void tu_log_print(const tu_log_line_t *line)
{
    char text[PIPE_BUF]; /* a pipe that takes anything takes so many bytes */
    int length = snprintf(text, sizeof(text), "%s:%u UCX %s %s", base_name(line->file), line->number,
                          level_name(line->level), line->text);
    char *end  = text + (length < (int)sizeof(text) ? length : (int)sizeof(text) - 1);

    for (char *at = text; at < end; at++) {
        if (*at < ' ' || *at > '~') {
            *at = '?';
        }
    }
    *end = '\n';
    if (tu_log_can_write(0, STDERR_FILENO)) {
        (void)!write(STDERR_FILENO, text, (size_t)(end + 1 - text));
    }
}

static uint64_t now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_REALTIME, &time);
    return (uint64_t)time.tv_sec * SECOND + (uint64_t)time.tv_nsec;
}

static struct timespec time_at(uint64_t nanoseconds)
{
    return (struct timespec){
        .tv_sec  = (time_t)(nanoseconds / SECOND),
        .tv_nsec = (long)(nanoseconds % SECOND),
    };
}

static bool all_logged(void)
{
    return self.first == NULL && self.taken == NULL;
}

static void wait_until_logged(void)
{
    uint64_t began = now();
    uint64_t end;
    struct timespec until;

    if (began - self.second >= SECOND) {
        self.second = began;
        self.waited = 0;
    }
    if (self.waited >= ERROR_PATIENCE) {
        return;
    }
    until = time_at(began + ERROR_PATIENCE - self.waited);
    while (self.reader != 0 && self.patient && !all_logged()) {
        self.patient = pthread_cond_timedwait(&self.logged, &self.mutex, &until) == 0;
    }
    end          = now();
    self.waited += end > began ? end - began : 0;
}

/* UCX is about to end the process: the earlier lines are logged first, or written to stderr after a second. */
static void log_the_rest(void)
{
    struct timespec until = time_at(now() + SECOND);
    line_t *line;

    while (self.reader != 0 && !all_logged() &&
           pthread_cond_timedwait(&self.logged, &self.mutex, &until) == 0) {
    }
    if (self.taken != NULL) {
        tu_log_print(&self.taken->line); /* perhaps for the second time */
    }
    for (line = self.first; line != NULL; line = line->next) {
        tu_log_print(&line->line);
    }
}

/* Returns whether the line was kept. */
static bool keep(const tu_log_line_t *line)
{
    size_t length = strlen(line->text) + 1;
    line_t *copy;

    if (self.reader == 0) {
        return false;
    }
    copy = self.bytes < LOG_BYTES ? malloc(sizeof(*copy) + length) : NULL;
    if (copy == NULL) {
        self.lost++;
        return true;
    }
    copy->next = NULL;
    copy->size = sizeof(*copy) + length;
    copy->line = *line;
    copy->line.text = memcpy(copy + 1, line->text, length);
    *self.last   = copy;
    self.last    = &copy->next;
    self.bytes  += copy->size;
    pthread_cond_signal(&self.came);
    return true;
}

static ucs_log_func_rc_t log_line(const char *file, unsigned number, const char *function, ucs_log_level_t level,
                                  const ucs_log_component_config_t *component, const char *format, va_list arguments)
{
    size_t size        = ucs_log_get_buffer_size();
    char *text         = alloca(size);
    tu_log_line_t line = {.level = (int)level, .number = number, .file = file, .function = function, .text = text};
    bool kept;

    if ((int)level <= self.trigger) {
        pthread_mutex_lock(&self.mutex);
        log_the_rest();
        pthread_mutex_unlock(&self.mutex);
        return UCS_LOG_FUNC_RC_CONTINUE; /* UCX writes it to stderr, and aborts */
    }
    if ((level > component->log_level && level != UCS_LOG_LEVEL_PRINT) ||
        (self.files[0] != '\0' && fnmatch(self.files, file, 0) == FNM_NOMATCH)) {
        return UCS_LOG_FUNC_RC_STOP;
    }
    vsnprintf(text, size, format, arguments);
    pthread_mutex_lock(&self.mutex);
    kept = keep(&line);
    if (kept && level <= UCS_LOG_LEVEL_ERROR) {
        wait_until_logged();
    }
    pthread_mutex_unlock(&self.mutex);
    if (!kept) {
        tu_log_print(&line);
    }
    return UCS_LOG_FUNC_RC_STOP;
}

void tu_log_info(const char *text)
{
    const tu_log_line_t line = {.level = UCS_LOG_LEVEL_INFO, .file = "", .function = "", .text = text};

    pthread_mutex_lock(&self.mutex);
    (void)keep(&line);
    pthread_mutex_unlock(&self.mutex);
}

/* Keeps a table of UCX's, line by line (UCX_PROTO_INFO). UCX would write it past the handler of log lines. */
static void log_table(const char *table)
{
    tu_log_line_t line = {.level = UCS_LOG_LEVEL_PRINT, .number = 1, .file = "table", .function = ""};
    char *rest         = strdup(table);
    char *next         = rest;
    bool kept;

    while (next != NULL && (line.text = strsep(&next, "\n")) != NULL) {
        pthread_mutex_lock(&self.mutex);
        kept = keep(&line);
        pthread_mutex_unlock(&self.mutex);
        if (!kept) {
            tu_log_print(&line);
        }
    }
    free(rest);
}

/* In a forked child only the thread exists that forked. */
static void after_fork(void)
{
    pthread_mutex_init(&self.mutex, NULL);
    pthread_cond_init(&self.came, NULL);
    pthread_cond_init(&self.logged, NULL);
    self.first   = NULL; /* the parent logs them */
    self.last    = &self.first;
    self.bytes   = 0;
    self.lost    = 0;
    self.reader  = 0;
    self.taken   = NULL;
}

/* Installs the handler of UCX's log lines. */
void tu_log_begin(void)
{
    char name[32] = "";
    int level;

    self.trigger = UCS_LOG_LEVEL_FATAL;
    if (ucs_global_opts_get_value("LOG_LEVEL_TRIGGER", name, sizeof(name)) == UCS_OK) {
        for (level = UCS_LOG_LEVEL_FATAL; level < UCS_LOG_LEVEL_LAST; level++) {
            if (strcasecmp(name, ucs_log_level_names[level]) == 0) {
                self.trigger = level;
            }
        }
    }
    if (ucs_global_opts_get_value("LOG_FILE_FILTER", self.files, sizeof(self.files)) != UCS_OK) {
        self.files[0] = '\0';
    }
    pthread_atfork(NULL, NULL, after_fork);
    (void)tu_replace_import((const void *)(uintptr_t)ucp_get_version, "ucs_log_print_compact",
                            (const void *)(uintptr_t)log_table);
    ucs_log_push_handler(log_line);
}

/* Registers a new reader; returns its number. */
unsigned tu_log_open(void)
{
    unsigned reader;

    pthread_mutex_lock(&self.mutex);
    if (++self.readers == 0) {
        self.readers = 1;
    }
    reader       = self.reader = self.readers;
    self.patient = true;
    pthread_mutex_unlock(&self.mutex);
    return reader;
}

/* Lets the reader end when it has taken the remaining lines. */
void tu_log_close(void)
{
    pthread_mutex_lock(&self.mutex);
    self.reader = 0;
    pthread_cond_broadcast(&self.came);
    pthread_cond_broadcast(&self.logged);
    pthread_mutex_unlock(&self.mutex);
}

/* Waits for a line, which belongs to the caller until the next call; *lost is the number of lines that were lost.
 * Returns NULL when the reader is to end. */
const tu_log_line_t *tu_log_take(unsigned reader, const tu_log_line_t *before, uint64_t *lost)
{
    line_t *line;

    pthread_mutex_lock(&self.mutex);
    self.taken = NULL;
    if (before != NULL) {
        free(TU_ITEM(before, line_t, line));
    }
    if (self.first == NULL) {
        self.patient = true;
        pthread_cond_broadcast(&self.logged);
    }
    while (self.first == NULL && self.reader == reader) {
        pthread_cond_wait(&self.came, &self.mutex);
    }
    line = self.first;
    if (line != NULL) {
        self.first = line->next;
        if (self.first == NULL) {
            self.last = &self.first;
        }
        self.bytes -= line->size;
        self.taken  = line;
    }
    *lost     = self.lost;
    self.lost = 0;
    pthread_mutex_unlock(&self.mutex);
    return line == NULL ? NULL : &line->line;
}
