"""The engine: what makes a UCX worker progress inside a Trio run, and the operations and endpoints that it has.

    arming                     what progresses a worker next: its state, and a table of transitions; without I/O
    waits                      what a task may wait for, and how it waits
    batches, endpoints_to_worker,
      ending                   parts of an engine that know nothing of it
    borrowed, stream_buffer,
      operations               what belongs to an engine
    endpoint_core, share       endpoints, and the shares that Connections have in them
    identity, statistics       what one can ask about a worker
    teardown                   what ends with a worker
    tag_dispatch, dispatch     from records to operations, to Connections, and to whatever else receives
    trio_run, receive_queue,
      peer_processes           where a worker belongs; its queue in shared memory; peers' processes
    progress                   the progress task, a hook into Trio's loop, a timer for missed events
    engine                     the engine, which makes its parts
    posting                    from arguments to an operation in flight
    draining                   ends what is in flight, and destroys the worker
    lifetime                   opens an engine, and closes it

It may import the C half, and of ``ucp`` the layers below it (see ``ucp/__init__.py``). Inside it,
a module imports only modules above it in this list, or beside it. Only for annotations, any may import ``engine``,
``endpoint_core`` and ``share``.
"""
