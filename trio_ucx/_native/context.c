/* Contexts: UCX's configuration and resources. */
#define _GNU_SOURCE
#include <stdio.h>

#include "native.h"

/* Reads UCX's options from the environment, and applies the given ones over them; the environment is not changed.
 * *rejected is the index of an option that UCX refused, or `count`. */
int tu_context_create(const char **names, const char **values, size_t count, uint64_t features, const char *name,
                      tu_context_t **out, size_t *rejected)
{
    ucp_params_t params = {
        .field_mask        = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED,
        .features          = features,
        .mt_workers_shared = 1, /* several single-threaded workers may share a context */
    };
    tu_context_t *context = calloc(1, sizeof(*context));
    ucs_status_t status;
    size_t i;

    if (name != NULL) {
        params.field_mask |= UCP_PARAM_FIELD_NAME;
        params.name        = name;
    }
    *rejected = count;
    if (context == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    (void)tu_keep_segments_private();
    context->features = features;
    status = ucp_config_read(NULL, NULL, &context->config);
    if (status != UCS_OK) {
        free(context);
        return status;
    }
    for (i = 0; i < count; i++) {
        status = ucp_config_modify(context->config, names[i], values[i]);
        if (status != UCS_OK) {
            *rejected = i;
            break;
        }
    }
    if (status == UCS_OK) {
        status = ucp_init_version(TU_OLDEST_MAJOR, TU_OLDEST_MINOR, &params, context->config, &context->context);
    }
    if (status != UCS_OK) {
        ucp_config_release(context->config);
        free(context);
        return status;
    }
    *out = context;
    return UCS_OK;
}

void tu_context_destroy(tu_context_t *context)
{
    ucp_cleanup(context->context);
    ucp_config_release(context->config);
    free(context);
}

char *tu_context_config_text(tu_context_t *context)
{
    char *text   = NULL;
    size_t size  = 0;
    FILE *stream = open_memstream(&text, &size);

    if (stream != NULL) {
        ucp_config_print(context->config, stream, NULL, UCS_CONFIG_PRINT_CONFIG);
        fclose(stream);
    }
    return text;
}

char *tu_context_info_text(tu_context_t *context)
{
    char *text   = NULL;
    size_t size  = 0;
    FILE *stream = open_memstream(&text, &size);

    if (stream != NULL) {
        ucp_context_print_info(context->context, stream);
        fclose(stream);
    }
    return text;
}

void tu_text_free(char *text)
{
    free(text);
}
