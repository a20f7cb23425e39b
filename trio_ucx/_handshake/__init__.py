"""Opening a connection: the exchange on the control socket, then the greeting over UCX.

In this order, each module imports only those above it, and ``client`` and ``server`` do not know each other:

    peer_description  what each side says about itself, and whether both use shared memory; without I/O
    exchange          what is said on the control socket: frames, states and authentication; without I/O
    control_stream    the control socket during the exchange, with or without TLS
    control_sockets   watches a worker's control sockets after the exchange
    socket_owner      the user who owns the other end of a TCP connection within this machine
    registry          what a worker needs for its handshakes
    handshake         one side of a handshake, up to the open connection
    client            the side that connects
    server            the side that listens

It may import the rules (``_rules.wire``), ``_link`` and the layers below.
"""
