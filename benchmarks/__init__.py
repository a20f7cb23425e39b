"""What trio_ucx costs, beside others that do the same. See README.md here.

    jobs            what is measured: latency, bandwidth, message rate, idle CPU
    contenders/     one file for each library or tool; each gives the two ends of a pair
    control, child  the process of one end, and how it is told what to do
    pairs, runner   starting the processes, giving orders, limits of time, interleaved rounds
    quiet           whether the machine is
    stats, marks    figures from measurements; what trio_ucx has to reach
    report, plots   tables, JSON, pictures
    steps           prices of single steps, in one process
    compare, scale, microseconds, crowded
                    the programs
    defaults        trio_ucx's own values of UCX's options against UCX's: another one, for which trio_ucx's CLI measures

What runs in the children imports nothing but the standard library and its own contender, so that a contender can live
in an environment of its own (``--python``). Hence dataclasses, not attrs.
"""
