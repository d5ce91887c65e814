"""From prompt to completed group: source, group machine, workers, rewards."""
