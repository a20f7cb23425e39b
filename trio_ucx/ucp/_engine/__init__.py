"""The engine: what makes a UCX worker progress inside a Trio run, and the operations and endpoints that it has.

Imports the C half, and of this package what is below: status, attributes, addresses, contexts, memory.
"""
