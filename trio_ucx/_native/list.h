/* Lists whose links lie inside their items: adding an item allocates nothing, and so cannot fail.
 *
 * A list is a ring of links; the list itself is one of them. A link that is in no list is a ring of its own, so that
 * removing it again does no harm. Lists and links must be initialised.
 */
#ifndef TRIO_UCX_LIST_H
#define TRIO_UCX_LIST_H

#include <stdbool.h>
#include <stddef.h>

typedef struct tu_list {
    struct tu_list *next, *previous;
} tu_list_t;

/* The structure of which `pointer` is the member. */
#define TU_ITEM(pointer, type, member) ((type *)(void *)((char *)(pointer) - offsetof(type, member)))

/* The first item, or NULL. */
#define TU_LIST_FIRST(list, type, member) (tu_list_is_empty(list) ? NULL : TU_ITEM((list)->next, type, member))

/* The item after this one, or NULL. */
#define TU_LIST_NEXT(list, item, member)                                                                              \
    ((item)->member.next == (list) ? NULL : TU_ITEM((item)->member.next, __typeof__(*(item)), member))

/* The body must not remove an item, unless it leaves the loop. */
#define TU_LIST_FOR_EACH(item, list, member)                                                                          \
    for ((item) = TU_ITEM((list)->next, __typeof__(*(item)), member); &(item)->member != (list);                      \
         (item) = TU_ITEM((item)->member.next, __typeof__(*(item)), member))

/* The body may remove `item`, and no other one. */
#define TU_LIST_FOR_EACH_SAFE(item, after, list, member)                                                              \
    for ((item)  = TU_ITEM((list)->next, __typeof__(*(item)), member),                                                \
        (after) = TU_ITEM((item)->member.next, __typeof__(*(item)), member);                                          \
         &(item)->member != (list);                                                                                   \
         (item) = (after), (after) = TU_ITEM((item)->member.next, __typeof__(*(item)), member))

static inline void tu_list_init(tu_list_t *list)
{
    list->next = list->previous = list;
}

static inline bool tu_list_is_empty(const tu_list_t *list)
{
    return list->next == list;
}

static inline bool tu_list_is_linked(const tu_list_t *link)
{
    return link->next != link;
}

static inline void tu_list_append(tu_list_t *list, tu_list_t *link)
{
    link->next           = list;
    link->previous       = list->previous;
    link->previous->next = link;
    list->previous       = link;
}

static inline void tu_list_prepend(tu_list_t *list, tu_list_t *link)
{
    tu_list_append(list->next, link);
}

static inline void tu_list_remove(tu_list_t *link)
{
    link->previous->next = link->next;
    link->next->previous = link->previous;
    tu_list_init(link);
}

/* Moves all items of one list to another, which is empty and need not be initialised. */
static inline void tu_list_move_all(tu_list_t *from, tu_list_t *to)
{
    *to = *from;
    if (tu_list_is_empty(from)) {
        tu_list_init(to);
    } else {
        to->next->previous = to->previous->next = to;
        tu_list_init(from);
    }
}

#endif
