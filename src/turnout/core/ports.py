"""The outside world as the control plane sees it. Production passes the real ones (turnout.placement.real),
the simulator its own: code that takes these runs under a virtual clock unchanged."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    """Time and waiting. All durations are seconds."""

    def wall(self) -> float:
        """Seconds since the epoch, for people and files; never for decisions."""
        ...

    def now(self) -> float:
        """Monotonic seconds, for durations and deadlines."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    async def within(self, seconds: float, what: str, work: Awaitable[T]) -> T:
        """The result of `work`, cancelled after `seconds` with DeadlineExceeded(what, seconds)."""
        ...


class Store(Protocol):
    """Durable files. `publish_*` returns only after the bytes and the name are on stable storage."""

    def read(self, path: Path) -> bytes: ...

    def names(self, folder: Path) -> list[str]:
        """Names in a folder, sorted; an absent folder has none."""
        ...

    def publish_file(self, path: Path, data: bytes) -> None:
        """Atomic: readers see the old content or all of the new."""
        ...

    def create_once(self, path: Path, data: bytes) -> bool:
        """Creates the file with its whole content, or returns False where it already exists."""
        ...

    def publish_folder(self, staged: Path, final: Path) -> None:
        """Syncs every file of `staged`, then renames the folder to `final` and syncs the parent."""
        ...

    def remove_tree(self, path: Path) -> None: ...

    def free_bytes(self, path: Path) -> int: ...


class EventSink(Protocol):
    """Where typed events go (turnout.observe.eventlog). One writer per run."""

    def emit(self, event: Any) -> None: ...
