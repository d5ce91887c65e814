"""The reference page of all options: `python -m turnout.config.reference docs/flags.md` writes it.

A test compares the committed page with what this makes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from turnout.config.option import OptionSpec
from turnout.config.refusals import ELSEWHERE, NOT_YET
from turnout.config.run_config import specs

_HEAD = """# Options

Made by `python -m turnout.config.reference docs/flags.md` from the declarations in `src/turnout/config/groups`;
don't edit it by hand.

Order: defaults, then the file, then the command line; checks come after all of them, and every fault is told at
once. In a YAML or JSON file an option is written with underscores: `rollout_batch_size: 8`. A switch takes no
value: `--rollout-shuffle`, `--no-rollout-shuffle`. Where the default is *in italics* nothing is given, which is
different from 0; `--no-NAME` on the command line, or `null` in the file, makes it so again. A list is several
values after one flag, a mapping is JSON. `turnout train RUN_DIR/config.json` repeats an earlier run.
"""


def render_reference() -> str:
    """The page as Markdown."""
    parts = [_HEAD]
    for group, members in groupby(specs().values(), key=lambda spec: spec.group):
        parts.append(f"\n## {group}\n\n| option | value | default | meaning |\n|---|---|---|---|\n")
        parts += [_row(spec) for spec in members]
    parts.append("\n## Known names that are refused\n\n| name | what it is | meanwhile |\n|---|---|---|\n")
    parts += [f"| `{_flag(name)}` | {what} | {instead} |\n" for name, (what, instead) in NOT_YET.items()]
    parts.append("\n## Other names\n\n| name | here |\n|---|---|\n")
    parts += [f"| `{_flag(name)}` | {here} |\n" for name, here in ELSEWHERE.items()]
    return "".join(parts)


def _row(spec: OptionSpec) -> str:
    value = "true, false" if spec.kind == "bool" else spec.value_text.replace("|", ", ")
    unit = f" ({spec.unit})" if spec.unit else ""
    default = f"*{spec.default_text}*" if spec.default is None else f"`{spec.default_text}`"
    return f"| `{spec.flag}` | {value}{unit} | {default} | {spec.text} |\n"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def write_page(argv: list[str], usage: str, render: Callable[[], str]) -> int:
    """`python -m usage`: writes the page to the one file that is named; the exit status."""
    if len(argv) != 1:
        sys.stderr.write(f"usage: python -m {usage}\n")
        return 2
    Path(argv[0]).write_text(render(), encoding="utf-8")
    return 0


def main(argv: list[str]) -> int:
    return write_page(argv, "turnout.config.reference docs/flags.md", render_reference)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
