"""Remote memory: puts, gets and atomics, by whichever access path reaches the owner.

Imports the engine, and memory.
"""
