"""Versions by content: digests, manifest, store, update machine. Files only, no engines."""
