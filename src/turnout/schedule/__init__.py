"""The main loop and what wires it."""
