"""The commands of docs/tour.md, run as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.process.run_process import ROOT, ended, start

REFUSED = "--rollout-temprature"


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "tour.md").read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_every_command_of_the_tour_does_what_it_says(tmp_path: Path) -> None:
    lines = commands()
    assert len(lines) >= 6 and any(REFUSED in line for line in lines)
    for line in lines:
        words = shlex.split(line.replace("runs/", f"{tmp_path}/"))
        assert words[0] == "turnout", line
        status, out, err = ended(start(*words[1:]))
        if REFUSED in line:
            assert status == 2 and "3 faults" in err, err
        else:
            assert status == 0, f"{line}\n{out[-1000:]}\n{err[-1000:]}"
