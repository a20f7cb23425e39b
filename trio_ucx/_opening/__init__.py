"""What opening a connection or a listener takes: addresses, keys, options, attempts."""
