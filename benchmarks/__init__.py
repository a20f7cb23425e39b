"""What trio_ucx costs, compared with other libraries. See README.md here.

    jobs            what is measured: latency, bandwidth, message rate, idle CPU
    contenders/     one file for each library or tool; each gives the two ends of a pair
    control, child  the process of one end, and the orders that it gets
    pairs, runner   starting the processes, giving orders, limits of time, interleaved rounds
    stats, marks    figures from measurements; what trio_ucx has to reach
    busy_cores      whether other programs use the cores that are measured on
    report, plots   tables, JSON, pictures
    steps           the cost of single steps, in one process
    compare, scale, microseconds, crowded
                    the programs
    defaults        another program: trio_ucx's values of UCX's options against UCX's, by the code of perf
    options, trials its options and figures; values measured by turns, and compared

Code that runs in the children imports nothing but the standard library and its own contender, so that a contender can
have an environment of its own (``--python``). For this reason it uses dataclasses, not attrs.
"""
