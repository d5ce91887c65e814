"""The help text of `turnout train --help`: every option by group, with its value, default and meaning."""

from __future__ import annotations

import textwrap
from itertools import groupby

from turnout.config.option import OptionSpec
from turnout.config.run_config import specs

_INDENT = " " * 6


def render_help(width: int = 100) -> str:
    """All options as text of at most `width` columns (flags and values are never broken)."""
    lines = [
        "usage: turnout train [RUN.yaml | RUN.json] [--option value ...]",
        "",
        "Order: defaults, then the file, then the command line. In the file an option is written with underscores",
        "(rollout_batch_size: 8). A switch takes no value: --shuffle, --no-shuffle. An option that may be not",
        "given is unset with --no-NAME. RUN_DIR/config.json of an earlier run repeats that run.",
    ]
    lines[3] = lines[3].replace("shuffle", "rollout-shuffle")
    for group, members in groupby(specs().values(), key=lambda spec: spec.group):
        lines += ["", f"{group}:"]
        for spec in members:
            lines += _entry(spec, width)
    return "\n".join(lines) + "\n"


def _entry(spec: OptionSpec, width: int) -> list[str]:
    flag = f"--[no-]{spec.flag[2:]}" if spec.kind == "bool" else f"{spec.flag} {spec.value_text}"
    unit = f" {spec.unit}" if spec.unit and isinstance(spec.default, int | float) else ""
    shown = "required" if spec.required else f"default: {spec.default_text}{unit}"
    text = f"{spec.text} ({shown})" if not spec.unit or unit else f"{spec.text} In {spec.unit}. ({shown})"
    wrapped = textwrap.wrap(
        text, width, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False
    )
    return [f"  {flag}", *wrapped]
