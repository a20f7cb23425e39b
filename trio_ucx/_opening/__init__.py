"""What opening a connection or a listener takes: addresses, options and attempts."""
