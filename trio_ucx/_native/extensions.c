/* The extensions of this build, and the calls of the core to them. */
#include "native.h"

#define TU_EXTENSION(folder) extern const tu_extension_t tu_extension_##folder;
TU_EXTENSIONS
#undef TU_EXTENSION

#define TU_EXTENSION(folder) &tu_extension_##folder,
static const tu_extension_t *const extensions[TU_EXTENSION_COUNT] = {TU_EXTENSIONS};
#undef TU_EXTENSION

ucs_status_t tu_extensions_open(tu_worker_t *worker)
{
    ucs_status_t status = UCS_OK;
    int i;

    for (i = 0; i < TU_EXTENSION_COUNT && status == UCS_OK; i++) {
        status = extensions[i]->open(worker);
    }
    return status;
}

void tu_extensions_worker_destroyed(tu_worker_t *worker)
{
    int i;

    for (i = TU_EXTENSION_COUNT; i-- > 0;) {
        if (worker->extensions[i] != NULL) {
            extensions[i]->worker_destroyed(worker);
        }
    }
}

bool tu_extensions_in_flight(tu_endpoint_t *endpoint)
{
    int i;

    for (i = 0; i < TU_EXTENSION_COUNT; i++) {
        if (extensions[i]->in_flight != NULL && extensions[i]->in_flight(endpoint)) {
            return true;
        }
    }
    return false;
}

bool tu_extensions_flush(tu_endpoint_t *endpoint, int64_t *verdict)
{
    int i;

    for (i = 0; i < TU_EXTENSION_COUNT; i++) {
        if (extensions[i]->flush != NULL && extensions[i]->flush(endpoint, verdict)) {
            return true;
        }
    }
    return false;
}

void tu_extensions_closing(tu_endpoint_t *endpoint)
{
    int i;

    for (i = TU_EXTENSION_COUNT; i-- > 0;) {
        extensions[i]->endpoint_closing(endpoint);
    }
}
