#define FAKE_DONE 0
#define FAKE_PENDING 1
#define FAKE_DONE_INSIDE 2

extern int64_t tu_allocations_left;
extern uint64_t fake_clock;    /* nanoseconds */
extern int fake_answer;        /* to memory of links: one of the above, or a status */
extern int fake_refusal;       /* to a program's message: a status, or 0 */
extern size_t fake_freed;      /* requests */
extern size_t fake_allocated;  /* what the links have allocated, and not freed */

tu_endpoint_t *fake_endpoint(void);
/* The core's: gives UCX a message. */
int64_t tu_tag_send_one(tu_endpoint_t *to, const void *data, size_t length, int memory, uint64_t tag);
/* A tu_outlet_t: as if UCX sent it at once. */
int64_t fake_outlet(void *context, uint32_t number, const void *data, size_t length);
/* Takes what was sent: tag, size, data, again and again. Returns the number of bytes. */
size_t fake_log_take(char *out);
/* What UCX still has. */
size_t fake_pending(void);
/* UCX is done with it. Returns whether it has kept its contents. */
bool fake_complete(size_t index, int status);
