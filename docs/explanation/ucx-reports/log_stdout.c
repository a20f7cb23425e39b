/*
 * UCX logs to stdout
 *
 * What happens. Warnings and errors go to stdout, in the midst of a program's output, as soon as anything is wrong: an
 * option, a transport that does not exist, a full descriptor table. Behind a pipe that nobody reads the process blocks.
 * UCX_LOG_FILE=stderr must be set before the library is loaded.
 *
 * This program. Prints one line of data, to which UCX adds a warning of its own; /tmp/log_stdout 2>/dev/null | wc -l
 * says 2.
 *
 * Shown with UCX 1.13.1: yes; UCX 1.22.0: yes.
 *
 * Suggested change. ucs_log_init in src/ucs/debug/log.c: ucs_log_file = stderr, and the same for the two
 * fprintf(stdout, ...) there; the text of LOG_FILE in src/ucs/config/global_opts.c.
 *
 * What trio_ucx does. The lines go to a logger of Python's, unless UCX_LOG_FILE is set.
 */
#include "common.h"

int main(void)
{
    option("UCX_TLS", "tcp,none_such");
    ucp_context_h context = open_context(UCP_FEATURE_TAG);

    printf("data\n");
    ucp_cleanup(context);
    return 0;
}
