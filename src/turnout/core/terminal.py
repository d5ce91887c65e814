"""Whether a stream gets colours, and texts in them.

The rules of https://no-color.org and https://force-color.org: NO_COLOR (not empty) forbids them, else FORCE_COLOR
(not empty, not 0) demands them, else only a terminal that is not TERM=dumb has them. rich follows the same for the
panel.
"""

from __future__ import annotations

from collections.abc import Mapping

BOLD, DIM, RED, CYAN = "1", "2", "1;31", "36"


def has_colors(is_terminal: bool, environment: Mapping[str, str]) -> bool:
    """Whether what goes to a stream may hold colours."""
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return is_terminal and environment.get("TERM", "dumb") != "dumb"


def painted(text: str, code: str, colors: bool) -> str:
    """The text in a colour (BOLD, RED, ...), or as it is."""
    return f"\x1b[{code}m{text}\x1b[0m" if colors and text else text
