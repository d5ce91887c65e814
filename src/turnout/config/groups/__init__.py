"""The groups of options, one file each. A group declares; what follows from two options together is in `checks`."""
