"""What `turnout engines` asks of a run that works, as both ends know it: files in the run's directory.

    requests/ID.request.json    {verb, engines, count}      the command writes it, the run takes (removes) it
    requests/ID.answer.json     {done, text, engines}       the run writes it, the command takes it

Every file comes whole, by a rename. A request that was taken and not answered died with its run, and so did what it
was about: nothing of it is kept for a later one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

FOLDER = "requests"
ASKED, ANSWERED = ".request.json", ".answer.json"
VERBS = ("ls", "add", "remove")


@dataclass(frozen=True)
class EngineRequest:
    """`ls`: the engines; `add`: those at these addresses, or `count` more of the run's own; `remove`: these ids."""

    verb: str
    engines: tuple[str, ...] = ()
    count: int = 1

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> EngineRequest:
        """Raises ValueError for what is no request."""
        row = json.loads(data)
        if not isinstance(row, dict) or row.get("verb") not in VERBS:
            raise ValueError("no request that this run knows")
        return cls(str(row["verb"]), tuple(map(str, row.get("engines", ()))), int(row.get("count", 1)))


@dataclass(frozen=True)
class EngineAnswer:
    """`done`: whether it was done as asked; `text` says what was, or why not; `engines`: a row for each engine that
    the run has now."""

    done: bool
    text: str
    engines: tuple[dict[str, Any], ...] = ()

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> EngineAnswer:
        row = json.loads(data)
        return cls(bool(row["done"]), str(row["text"]), tuple(row["engines"]))
