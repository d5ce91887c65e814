"""Encodings of deltas by name (--update-weight-encoding). One file each."""
