"""The help texts of `turnout train`: the options that most runs set, by task; all of them; those of one topic.

Promises: every option is in `--help-all`; a topic is a group's title, or its start, or a word in options' names.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from turnout.config.option import OptionSpec
from turnout.config.run_config import GROUPS, specs
from turnout.core.errors import ConfigError, Fault
from turnout.core.terminal import BOLD, CYAN, painted

# The short help: what a person wants to do -> the options for that.
TASKS: dict[str, tuple[str, ...]] = {
    "What is trained": ("hf_checkpoint", "ref_load"),
    "On which tasks": ("prompt_data", "input_key", "label_key", "apply_chat_template", "eval_prompt_data"),
    "What is rewarded": ("rm_type", "custom_rm_path", "custom_generate_function_path"),
    "How much": (
        "num_rollout",
        "rollout_batch_size",
        "n_samples_per_prompt",
        "rollout_max_response_len",
        "rollout_temperature",
    ),
    "How it learns": ("advantage_estimator", "lr", "kl_loss_coef", "off_policy"),
    "Who waits for whom": ("schedule", "max_staleness", "colocate", "update_weight_mode"),
    "On which engines": (
        "rollout_num_engines",
        "use_fault_tolerance",
        "rollout_external_engine_addrs",
        "sglang_config",
    ),
    "Where it is kept": ("run_dir", "resume", "save_interval", "seed"),
}
_USAGE = "usage: turnout train [RUN.yaml | RUN.json] [--option value ...]"
_GRAMMAR = (
    "Order: defaults, then the file, then the command line. In the file an option is written with underscores "
    "(rollout_batch_size: 8). A switch takes no value: --rollout-shuffle, --no-rollout-shuffle. An option that may "
    "be not given is unset with --no-NAME. RUN_DIR/config.json of an earlier run repeats that run."
)
_INDENT = " " * 6


@dataclass(frozen=True)
class Look:
    """`width`: columns at most (flags and values are never broken)."""

    width: int = 100
    colors: bool = False


def render_help(words: Sequence[str] = (), look: Look | None = None) -> str:
    """The text for the command line `words`: `--help`, `--help TOPIC`, `--help-all`. Raises ConfigError for a topic
    that is none."""
    look = look or Look()
    at = next((at for at, word in enumerate(words) if word in ("-h", "--help")), len(words))
    topic = words[at + 1] if at + 1 < len(words) and not _is_place(words[at + 1]) else ""
    if topic:
        return _about(topic, look)
    if "--help-all" in words:
        every = groupby(specs().values(), key=lambda spec: spec.group)
        body = [line for title, members in every for line in _section(title, members, look)]
        return _text([_USAGE, "", *_wrapped(_GRAMMAR, look.width), *body])
    known = specs()
    body = [
        line for title, names in TASKS.items() for line in _section(title, (known[n] for n in names), look)
    ]
    groups = ", ".join(group.title for group in GROUPS)
    more = (
        f"These are {sum(map(len, TASKS.values()))} of {len(known)} options. `turnout train --help-all` tells all, "
        f"`--help TOPIC` those of a group or with a word in their name ({groups}). "
        "`turnout new` writes a run to begin with."
    )
    return _text([_USAGE, "", *_wrapped(_GRAMMAR, look.width), *body, "", *_wrapped(more, look.width)])


def _about(topic: str, look: Look) -> str:
    wanted = topic.lower().lstrip("-").replace("-", "_")
    title = wanted.replace("_", " ")
    found = [spec for spec in specs().values() if spec.group.lower().startswith(title)]
    found = found or [spec for spec in specs().values() if wanted in spec.name]
    if not found:
        names = [*(group.title.lower() for group in GROUPS), *specs()]
        near = difflib.get_close_matches(wanted, names, n=3)
        remedy = f"did you mean {' or '.join(near)}?" if near else "see `turnout train --help`"
        raise ConfigError(Fault("--help", topic, "no such group, and no option with it in its name", remedy))
    by_group = groupby(found, key=lambda spec: spec.group)
    return _text([line for title, members in by_group for line in _section(title, members, look)][1:])


def _is_place(word: str) -> bool:
    return word.startswith("-") or word.endswith((".yaml", ".yml", ".json"))


def _text(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)


def _section(title: str, members: Iterable[OptionSpec], look: Look) -> list[str]:
    return [
        "",
        painted(f"{title}:", BOLD, look.colors),
        *(line for spec in members for line in _entry(spec, look)),
    ]


def _entry(spec: OptionSpec, look: Look) -> list[str]:
    flag, value = (f"--[no-]{spec.flag[2:]}", "") if spec.kind == "bool" else (spec.flag, spec.value_text)
    unit = f" {spec.unit}" if spec.unit and isinstance(spec.default, int | float) else ""
    shown = "required" if spec.required else f"default: {spec.default_text}{unit}"
    text = f"{spec.text} ({shown})" if not spec.unit or unit else f"{spec.text} In {spec.unit}. ({shown})"
    wrapped = textwrap.wrap(
        text, look.width, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False
    )
    return [f"  {painted(flag, CYAN, look.colors)} {value}".rstrip(), *wrapped]
