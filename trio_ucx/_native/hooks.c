/* Hooks: functions that a worker calls after each progress of UCX. */
#include "native.h"

void tu_hook_init(tu_hook_t *hook, unsigned (*function)(tu_hook_t *hook))
{
    tu_list_init(&hook->link);
    hook->function = function;
}

void tu_hook_add(tu_worker_t *worker, tu_hook_t *hook)
{
    if (!tu_list_is_linked(&hook->link)) {
        tu_list_append(&worker->hooks, &hook->link);
    }
}

void tu_hook_remove(tu_hook_t *hook)
{
    tu_list_remove(&hook->link);
}

unsigned tu_hooks_call(tu_worker_t *worker)
{
    unsigned moved = 0;
    tu_list_t rest; /* hooks that were not called yet; any of them may be removed meanwhile */
    tu_hook_t *hook;

    tu_list_move_all(&worker->hooks, &rest);
    while ((hook = TU_LIST_FIRST(&rest, tu_hook_t, link)) != NULL) {
        tu_list_remove(&hook->link);
        tu_list_append(&worker->hooks, &hook->link);
        moved += hook->function(hook);
    }
    return moved;
}
