"""The soak's parts: a workload, an injector of faults, logs, and a checker that reads them.

``log`` writes and reads what each process did; ``payload`` makes messages that describe themselves; ``workload`` is a
server or client process; ``injector`` kills and stops such processes; ``broken`` breaks the library on purpose;
``checker`` finds violations of the promises in the logs; ``summary`` prints its figures. ``tests/faults/soak.py`` joins
them.
"""
