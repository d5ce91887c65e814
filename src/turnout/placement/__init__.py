"""Where things run: local processes, ports, the real clock and store."""
