"""Vocabulary of the system: identifiers, versions, trajectories, events, errors and ports. No IO, no torch."""
