"""The engine: what makes a UCX worker progress inside a Trio run, and the operations and endpoints that it has.

    arming                     what progresses a worker next: its state, and a table of transitions; without I/O
    pending, polling           what a task may wait for, and how it waits
    batches, tag_dispatch,
      pairs, backoff,
      data_ports, statistics   parts of an engine that know nothing of it
    engine                     the engine
    progress, loop_hooks,
      safety_net               what calls it: the progress task, hooks into Trio's loop, a timer for missed events
    operations, stream_buffer,
      borrowed, peers          what belongs to an engine
    dispatch, posting          from records to those; from arguments to an operation in flight
    answers, shutdown          the end of a worker
    lifetime                   makes an engine of its parts, and closes it

It may import the C half, and of ``ucp`` what is below: status, attributes, addresses, contexts, memory. Inside it,
a module imports only modules above it in this list, or beside it.
"""
