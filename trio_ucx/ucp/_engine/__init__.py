"""The engine: what makes a UCX worker progress inside a Trio run, and the operations and endpoints that it has.

    listening                  who waits for a worker's descriptor: one of three states
    ending                     how an endpoint ends
    statistics, teardown,
      identity                 what one can ask about a worker; what ends with it
    trio_run, peer_processes   where a worker belongs; peers' processes
    waits                      what a task may wait for, and how it waits
    borrowed, stream_buffer    memory that UCX lends: what arrived
    operations                 operations in flight
    endpoints_to_worker,
      receive_queue            the choice of shared endpoints; a worker's queue in shared memory
    tag_dispatch, links,
      dispatch                 from records to operations, to Connections, and to whatever else receives
    progress                   the progress task, a hook into Trio's loop, a timer for missed events
    engine                     the engine, which makes its parts
    endpoint_core, share       endpoints, and the shares that Connections have in them
    posting                    from arguments to an operation in flight
    draining                   ends what is in flight, and destroys the worker
    lifetime                   opens an engine, and closes it

It may import the C half, and of ``ucp`` the layers below it (see ``ucp/__init__.py``). Inside it, a module imports only
modules above it in this list, or before it in its line. A module that comes before ``engine`` has a Protocol for the
part of the engine that it uses (:class:`~.waits.AwaitedEngine`, say). The Protocol :class:`~.dispatch.EngineEndpoint`
is the part of an endpoint that the engine uses.
"""
