"""The rules of a connection: what is sent, kept, granted and ended. Pure: no I/O, and no copies of messages."""
