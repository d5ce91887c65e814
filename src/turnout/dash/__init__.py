"""The dashboard: a local web page over a run's directory, read-only."""
