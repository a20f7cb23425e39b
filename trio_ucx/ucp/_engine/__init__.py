"""The engine: what makes a UCX worker progress inside a Trio run, and the operations and endpoints that it has.

    arming                     what progresses a worker next: its state, and a table of transitions; without I/O
    pending, polling           what a task may wait for, and how it waits
    batches, pairs, backoff,
      data_ports, receivers,
      identity, statistics,
      teardown                 parts of an engine that know nothing of it
    borrowed, stream_buffer,
      operations               what belongs to an engine
    tag_dispatch, dispatch     from records to those
    trio_run, receive_queue    parts of an engine that call it: where it belongs; its queue in shared memory
    loop_hooks, safety_net,
      progress                 hooks into Trio's loop, a timer for missed events, the progress task
    engine                     the engine, which makes its parts
    peers, posting             noticing that a process died; from arguments to an operation in flight
    answers, shutdown          the end of a worker
    lifetime                   opens an engine, and closes it

It may import the C half, and of ``ucp`` what is below: status, attributes, addresses, contexts, memory. Inside it,
a module imports only modules above it in this list, or beside it. Only for annotations, any may import the engine.
"""
