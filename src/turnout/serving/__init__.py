"""Talking to engines: client, launcher. Only this package builds URLs."""
