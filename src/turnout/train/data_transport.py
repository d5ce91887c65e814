"""How rollout data come from the controller to the trainer's ranks (--rollout-data-transport): put once, read by
every rank under the handle that travels in the control message.

A handle is `<scheme>:<rest>`; READERS has the ranks' half of each scheme. Promises: what was put stays until it is
dropped, and no longer; what the controller leaves behind when it is killed goes with the next run's sweep.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from turnout.core.errors import TrainError
from turnout.placement import ray_data
from turnout.placement.shared_memory import FOLDER, new_file


class DataTransport(Protocol):
    """The controller's half. Calls block; one at a time."""

    def put(self, data: bytes) -> str:
        """The handle of these bytes; raises TrainError where there is no room for them."""
        ...

    def drop(self, handle: str) -> None:
        """No rank reads it any more."""
        ...


class LocalData:
    """`local`: a file in shared memory, for ranks on this machine."""

    def put(self, data: bytes) -> str:
        try:
            return f"file:{new_file(data)}"
        except OSError as fault:
            raise TrainError(f"{len(data)} bytes of rollout data in {FOLDER}: {fault}") from fault

    def drop(self, handle: str) -> None:
        Path(handle.partition(":")[2]).unlink(missing_ok=True)


Data = bytes | memoryview
READERS: dict[str, Callable[[str], Data]] = {
    "file": lambda rest: Path(rest).read_bytes(),
    "ray": ray_data.read,
}


def read_data(handle: str) -> Data:
    """In a rank: what was put under this handle."""
    scheme, _, rest = handle.partition(":")
    return READERS[scheme](rest)
