"""The commands in README and docs/, and how each of them is proved to work.

A command is a line of a shell block, with its continuation lines and without its comment. The first rule whose
pattern matches it says how it is covered:

    tour       run as it stands, by tests/process/test_tour.py
    run        run there too, on the run of the tour, with names put in and small numbers
    example    parsed and checked, and run by a test that names the example's file
    parse      by the command's own parser and all checks of the configuration; `why` says why it is not run
    make       the Makefile has the target
    extra      pyproject.toml has the extra
    elsewhere  not here; `why` says where instead
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = ("sh", "bash", "shell", "console")
PROGRAMS = ("turnout", "make", "pip", "python", "curl", "sqlite3", "git", "cd", "$", ".", "export")


@dataclass(frozen=True)
class Rule:
    pattern: str
    how: str
    why: str = ""


RULES = (
    Rule(r"make [a-z0-9-]+( |$)", "make"),
    Rule(r"pip install 'turnout\[[a-z-]+\]'$", "extra"),
    Rule(r"pip install '\w+>=", "elsewhere", "a package of somebody else"),
    Rule(r"echo \$\?$", "elsewhere", "of the shell"),
    Rule(r"turnout train .*'verifiers:", "elsewhere", "needs a taskset: `make test-verifiers`"),
    Rule(r"python -m http\.server ", "elsewhere", "Python's own"),
    Rule(
        r"python -m sglang\.launch_server ", "elsewhere", "SGLang is started by tests/sglang, in its own lane"
    ),
    Rule(
        r"curl -s localhost:30000/",
        "elsewhere",
        "tests/process/test_engine_http.py asks the same of the engine",
    ),
    Rule(r"sqlite3 RUN_DIR/", "run"),
    Rule(r"turnout (inspect|doctor|simulate|completion) ", "run"),
    Rule(r"turnout weights (ls|verify|map) ", "run"),
    Rule(r"turnout train examples/[a-z_/]+\.yaml", "example"),
    Rule(r"turnout train RUN/broken/", "parse", "tests/process/test_debug_runs.py replays a step that broke"),
    Rule(r"turnout train .*--load-debug", "elsewhere", "needs batches: tests/process/test_debug_runs.py"),
    Rule(
        r"turnout train ",
        "parse",
        "its options are run one by one in tests/process; a run takes half a minute",
    ),
    Rule(r"turnout check ", "parse", "tests/process/test_check.py runs every line of it"),
    Rule(r"turnout eval ", "parse", "tests/process/test_evaluation.py, and the tour"),
    Rule(r"turnout serve ", "parse", "serves without an end; tests/process/test_engine_life.py"),
    Rule(r"turnout bench conformance", "parse", "minutes; whole in tests/process/test_conformance.py"),
    Rule(r"turnout engines ", "parse", "needs a run at work: tests/process/test_engines_command.py"),
    Rule(r"turnout weights follow ", "parse", "needs an engine and a store: tests/process/test_follower.py"),
    Rule(r"turnout dash ", "parse", "serves without an end; the tour has the same"),
    Rule(r"turnout plan ", "parse", "the tour plans, and tests/unit/plan"),
    Rule(r"turnout model push ", "parse", "needs a hub"),
    Rule(r"turnout new ", "parse", "writes files: tests/unit/cli runs what it writes"),
    Rule(r"turnout [a-z]+", "parse", "not said"),  # the last: a command that has no rule of its own yet
)
TOUR = "docs/tour.md"


@dataclass(frozen=True)
class Command:
    """A command as it stands in the file `place` at a line."""

    place: str
    line: int
    text: str

    @property
    def rule(self) -> Rule | None:
        if self.place == TOUR:
            return Rule("turnout ", "tour")
        return next((rule for rule in RULES if re.match(rule.pattern, self.text)), None)

    def __str__(self) -> str:
        return f"{self.place}:{self.line}: {self.text}"


def words_of(text: str) -> list[str]:
    """The words of a command, up to where its output goes."""
    words = shlex.split(text)
    ends = [at for at, word in enumerate(words) if word in (">", "|", "&&", "&")]
    return words[: min(ends, default=len(words))]


def pages() -> list[Path]:
    """README in both languages, and every page of docs/."""
    return [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def commands_of(path: Path) -> list[Command]:
    """In their order. Raises ValueError for a block whose quotes do not close."""
    text = path.read_text(encoding="utf-8")
    found = []
    for block in FENCE.finditer(text):
        if not is_shell(block[1], block[2]):
            continue
        first = text.count("\n", 0, block.start()) + 2
        found += [
            Command(path.relative_to(ROOT).as_posix(), first + at, line) for at, line in lines_of(block[2])
        ]
    return found


def is_shell(language: str, body: str) -> bool:
    """A block without a language counts where a line of it begins with a program."""
    return language in SHELL or (
        not language and any(line.split(" ")[0] in PROGRAMS for line in body.splitlines())
    )


def lines_of(body: str) -> list[tuple[int, str]]:
    """Commands of a block, each with the number of its first line; what a `console` block prints is left out."""
    prompts = any(line.startswith("$ ") for line in body.splitlines())
    found: list[tuple[int, str]] = []
    held, since = "", 0
    for number, line in enumerate(body.splitlines()):
        if prompts and not held and not line.startswith("$ "):
            continue
        since = since if held else number
        held = f"{held}\n{line}" if held else line.removeprefix("$ ")
        if held.endswith("\\") or not is_whole(held):
            continue
        if words := shlex.split(held.replace("\\\n", " "), comments=True):
            whole = shlex.join(words) if "\n" in held else without_comment(held)
            found.append((since, re.sub(r"^(?:[A-Z_]+=\S+ )+", "", whole)))
        held = ""
    if held:
        raise ValueError(f"a quote is not closed: {held[:80]}")
    return found


def is_whole(text: str) -> bool:
    try:
        shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError:
        return False
    return True


def without_comment(line: str) -> str:
    return re.sub(r"\s+#.*$", "", line).strip()


def all_commands() -> list[Command]:
    return [command for path in pages() for command in commands_of(path)]
