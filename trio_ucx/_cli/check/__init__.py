"""The command ``check``: what of the operation pages a machine can check, here and between two hosts.

    finding   what a check found, and how findings are printed
    machine   limits, shared memory, namespaces, cores: what the kernel gives this process
    devices   RDMA devices and GPUs: why UCX does not use them
    software  which UCX, its transports, and the environment variables for it
    control   the authenticated channel between the two sides of ``check HOST``
    peers     ``check HOST`` and ``check --listen``
    command   the command line

A check is a function that returns findings. It takes what was read as arguments, or where to read it.
"""
