"""What opening a connection or a listener takes: addresses, options, attempts, and the run's worker."""
