"""The hot loops in C, built with the system's compiler on first use, each with a NumPy reference.

`library()` returns the loaded library or None; which path was taken is logged once.
"""
