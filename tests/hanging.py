"""What hangs on purpose: rewards, and a trainer (`python -m tests.hanging WORDS...` is `turnout WORDS...` with one
that never ends a step)."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from turnout.cli.main import main
from turnout.train.local import LocalBackend

S = 600.0


def hangs(prompt: str, response: str, label: Any) -> float:
    time.sleep(S)
    return 0.0


async def holds_the_loop(prompt: str, response: str, label: Any) -> float:
    time.sleep(S)  # noqa: ASYNC251 - the mistake that is made on purpose
    return 0.0


def stand_still(*_: Any) -> Any:
    threading.Event().wait()


if __name__ == "__main__":
    setattr(LocalBackend, "train", stand_still)  # noqa: B010 - its type is another, on purpose
    sys.exit(main(sys.argv[1:]))
