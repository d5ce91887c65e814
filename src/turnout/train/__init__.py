"""The optimizer's half: model, packed batches, losses, step."""
