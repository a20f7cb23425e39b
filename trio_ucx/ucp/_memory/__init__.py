"""Memory: buffers that UCX reads and writes, in host or device memory, and memory that is registered for peers.

Imports the C half, and of this package status and utilities.
"""
