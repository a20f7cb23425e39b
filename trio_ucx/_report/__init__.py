"""The report: everything in this process that waits, and the likely causes of a hang.

    items      what a report consists of, and how it is written: as a tree, or as JSON
    frames     where Trio's tasks and loops stand, read from their frames
    network    what the kernel knows about peers: stopped processes, unanswered packets
    causes     what probably keeps a worker or a connection from going on
    collect    reads the engines, Connections, listeners and tasks of the process
    reporting  ``report``, and ``report_on_signal``, which also answers another process that asks

Collecting runs nothing and changes nothing. It may happen in a signal handler, between any two steps of the library: it
takes copies of what it iterates over, and a part that cannot be read is replaced by the exception.
"""

from .reporting import report as report
from .reporting import report_as_environment_says as report_as_environment_says
from .reporting import report_on_signal as report_on_signal
