"""What goes wrong in examples/trouble.yaml, by its own reward: an engine is killed once, and a tool stalls once."""

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

KILL_AT, STALL_AT = 3, 20  # calls of the reward
STALL_S = 60.0  # longer than the reward's deadline
VICTIM = b"engine-1"

_calls = itertools.count(1)


def reward(prompt: str, response: str, label: Any, **metadata: Any) -> float:
    """The share of digits, as a tool counts them. What goes wrong does so once in a process, at a fixed call."""
    call = next(_calls)
    if call == KILL_AT:
        kill_an_engine()
    return share_of_digits_tool(response, stalls=call == STALL_AT)


def share_of_digits_tool(response: str, stalls: bool) -> float:
    """Stands for a server that takes a request, and then says nothing."""
    if stalls:
        time.sleep(STALL_S)
    return sum(character.isdigit() for character in response) / max(1, len(response))


def kill_an_engine() -> None:
    """`kill -9` of an engine of this run, as a system does that is short of memory."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
        if parent == os.getpid() and b"turnout.engine" in words and VICTIM in words:
            os.kill(int(place.name), signal.SIGKILL)
