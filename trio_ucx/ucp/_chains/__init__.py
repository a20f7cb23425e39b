"""Request chains: programs of operations that C code runs, each when what it depends on has ended.

Imports the engine, memory, remote memory and endpoints.
"""
