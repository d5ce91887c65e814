"""Addresses of engines (turnout.core.address), and how long a connection to one is kept."""

from turnout.core.address import Address, parse_address

__all__ = ["KEPT_ALIVE_S", "Address", "parse_address"]

# An idle connection is used again for so long. SGLang closes its own after 5 s; a request that meets that looks
# like the engine's death.
KEPT_ALIVE_S = 2.0
