"""Every command in README and docs/ is covered (tests/doc_commands.py): here, all that are not run."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from tests.doc_commands import ROOT, RULES, Command, all_commands, words_of
from turnout.cli.main import COMMANDS
from turnout.config.load import load
from turnout.train import model_zoo

EVERY = all_commands()
DATA = str(ROOT / "examples" / "data" / "sums_train.jsonl")
RUN_FILE = str(ROOT / "examples" / "tiny.yaml")
NAMES = re.compile(r"run\.yaml|RUN\.yaml|RUN_DIR/config\.json|RUN/broken/\w+/replay\.json")


class ParsedWell(Exception):
    """The command line was read to its end and found good."""


@pytest.fixture
def parsers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands end where they have read their arguments; configurations are checked whole."""
    parse = argparse.ArgumentParser.parse_args

    def parse_args(*words, **named):
        parse(*words, **named)
        raise ParsedWell

    def load_only(*words):
        load(*words)
        raise ParsedWell

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(model_zoo, "resolve_checkpoint", Path)
    targets = [command.target.partition(":")[0] for command in COMMANDS.values()]
    for name in [*targets, "turnout.cli.weights_map", "turnout.cli.weights_follow", "turnout.plan.make"]:
        module = importlib.import_module(name)
        if getattr(module, "load", None) is load:
            monkeypatch.setattr(module, "load", load_only)


def by(*hows: str) -> list[object]:
    found = [command for command in EVERY if command.rule is not None and command.rule.how in hows]
    return [pytest.param(command, id=f"{command.place}:{command.line}") for command in found]


def test_every_command_is_covered() -> None:
    assert [str(command) for command in EVERY if command.rule is None] == [], (
        "add a rule to tests/doc_commands.py"
    )
    assert len(EVERY) > 40


def test_every_rule_covers_something_and_says_why() -> None:
    used = {command.rule for command in EVERY}
    assert [rule.pattern for rule in RULES[:-1] if rule not in used] == []
    assert [rule.pattern for rule in RULES if rule.how in ("parse", "elsewhere") and not rule.why] == []


@pytest.mark.parametrize("command", by("parse", "example", "run"))
def test_a_command_line_is_good(
    command: Command, parsers_only: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = words_of(command.text)
    if words[0] != "turnout":
        return
    monkeypatch.chdir(ROOT)
    name, *rest = [RUN_FILE if NAMES.fullmatch(word) else word for word in words[1:]]
    rest = [DATA if word == "sums.jsonl" else word for word in rest]
    for flag in (
        "--calibrate",
        "--cluster-file",
    ):  # of `plan`: files that a reader has, read before all checks
        while flag in rest:
            del rest[rest.index(flag) : rest.index(flag) + 2]
    left_out = [RUN_FILE] if rest[:1] == ["..."] else []
    rest = left_out + [word for word in rest if word != "..."]
    module, _, function = COMMANDS[name].target.partition(":")
    with pytest.raises(ParsedWell):
        getattr(importlib.import_module(module), function)(rest)


@pytest.mark.parametrize("command", by("example"))
def test_an_example_is_run_by_a_test(command: Command) -> None:
    found = re.search(r"examples/([a-z_/]+\.yaml)", command.text)
    assert found is not None and (ROOT / "examples" / found[1]).is_file()
    name = found[1].rpartition("/")[2]
    tests = [path.read_text("utf-8") for path in (ROOT / "tests" / "process").glob("test_*.py")]
    named = re.compile(rf"""\b{re.escape(name)}\b|["']{name.removesuffix(".yaml")}["']""")
    assert any(named.search(text) for text in tests)


@pytest.mark.parametrize("command", by("make"))
def test_make_has_the_target(command: Command) -> None:
    target = shlex.split(command.text)[1]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert re.search(rf"^{target}:", makefile, re.MULTILINE) or (
        target.startswith("bench-") and "bench-%:" in makefile
    )


@pytest.mark.parametrize("command", by("extra"))
def test_an_extra_is_there(command: Command) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert re.search(r"\[([a-z-]+)\]", command.text)[1] in extras
