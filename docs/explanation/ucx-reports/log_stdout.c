/* Prints one line of data. UCX adds a warning of its own to stdout. */
#include "common.h"

int main(void)
{
    option("UCX_TLS", "tcp,none_such");
    ucp_context_h context = open_context(UCP_FEATURE_TAG);

    printf("data\n");
    ucp_cleanup(context);
    return 0;
}
