"""What trio_ucx does only because UCX has a fault, or hides something: one module for each.

Each module's docstring says why it is needed, with the report (ucx-reports.md); which releases of UCX need it; how
one notices that it is not needed any more; and its test. Options, layouts and constants that are private to UCX stand
here.

    releases          differences between releases, and the warning about unknown ones
    address_layout    what UCX does not tell about worker addresses
    default_options   options that trio_ucx sets
    rdma              strangers at RDMA devices, which have no gate
    option_limits     values of options with which UCX crashes, hangs or loses messages
    shared_memory     a kind of shared memory that is not available keeps UCX from opening a worker
    sandboxes         a systemd unit denies what UCX needs, and UCX does not say so
    wake_sockets      anybody can send to the sockets that wake a worker which sleeps on shared memory
    descriptors       few file descriptors left end the process
    forks             a forked child must not use UCX
    log               UCX logs to stdout
    network_devices   of several network devices, UCX may choose one that does not lead to the peer
    key_gate          strangers at the ports of UCX's TCP transport (data ports)
    stopped_queue     a killed writer stops a queue in shared memory

What must happen inside UCX's calls is in C: ``_native/key_gate.c``, ``log.c`` and ``wake_sockets.c`` belong to the
modules of these names; ``routes.c`` belongs to ``network_devices``; ``close_on_exec.c`` keeps UCX's descriptors out of
child processes; ``sockets.c`` keeps a close from waiting for a full send buffer; ``keepalive.c`` leaves out endpoints
without lanes; ``private_segments.c`` keeps other users out of shared memory. What an endpoint does after a forced close
is in ``_engine/endpoint_core.py``.

The modules import what they need of ``ucp``; ``tests/test_layers.py`` has their places.
"""
