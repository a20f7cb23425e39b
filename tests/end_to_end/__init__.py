"""Whole programs: the command line, the examples, the benchmarks, the build, and C programs as peers.

``programs.py`` starts ours, ``c_programs.py`` compiles those in C. By default one short test of each program runs.
"""
