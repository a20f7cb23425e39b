"""How a Connection comes about: two peers meet on the control socket, then their endpoints find each other over UCX.

    exchange   what is said on the control socket: frames, states and authentication; without I/O
    facts      what each side says about itself, and what follows for the transports; without I/O
    streams    the bytes of the control socket, with or without TLS
    control    watches control sockets from the end of the exchange on
    registry   from the exchange to a Connection: ids, endpoints, the greeting over UCX
    client     the side that connects
    server     the side that listens

It may import the rules (``_wire``), ``_link`` and the layers below.
"""
