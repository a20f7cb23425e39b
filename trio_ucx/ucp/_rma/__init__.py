"""Remote memory: puts, gets and atomics, by whichever way reaches the owner.

Imports the engine, and memory.
"""
