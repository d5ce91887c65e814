"""What users see of the options: the list of flags, the reference page, the help text, the cost of importing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from turnout.config.help import TASKS, Look, render_help
from turnout.config.reference import main, render_reference
from turnout.config.run_config import GROUPS, RunConfig, specs
from turnout.core.errors import ConfigError
from turnout.rollout.builtin_rewards import BUILTIN
from turnout.weights.codecs.registry import CODECS

ROOT = Path(__file__).parents[3]


def test_the_reference_page_is_current(tmp_path):
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page == render_reference(), "run: python -m turnout.config.reference docs/flags.md"
    assert main([str(tmp_path / "x.md")]) == 0 and (tmp_path / "x.md").read_text() == page
    assert main([]) == 2


def test_the_flags_are_the_frozen_ones():
    """A flag that goes or changes its name breaks users' scripts: change tests/unit/config/flags.txt on purpose."""
    frozen = (Path(__file__).parent / "flags.txt").read_text().split()
    assert [spec.flag for spec in specs().values()] == frozen


def test_every_option_is_in_the_help_with_text_and_default():
    text = render_help(["--help-all"])
    for spec in specs().values():
        assert f"--[no-]{spec.flag[2:]}\n" in text if spec.kind == "bool" else f"  {spec.flag} " in text
        assert spec.text.endswith("."), spec.name
        assert spec.default is not None or spec.required or spec.unset, f"{spec.name}: what holds without it?"
    assert "Learning rate" not in text or "(default: 1e-06)" in text


def test_the_short_help_names_the_tasks_and_the_way_to_the_rest():
    text = render_help(["run.yaml", "--help"])
    assert all(name in specs() for names in TASKS.values() for name in names)
    assert all(f"{task}:" in text for task in TASKS) and "--help-all" in text
    assert "--custom-rm-path" in text and "--prox-logp" not in text
    assert all(group.title in " ".join(text.split()) for group in GROUPS)


@pytest.mark.parametrize(
    ("topic", "there", "absent"),
    [("weight updates", "--update-weight-encoding", "--lr"), ("sched", "--max-lead", "--seed"),
     ("staleness", "--staleness-policy", "--max-lead"), ("max_lead", "--max-lead", "--max-staleness N")],
)  # fmt: skip
def test_help_of_a_topic(topic, there, absent):
    text = render_help(["--help", topic])
    assert f"  {there} " in text and f"  {absent}" not in text


def test_help_of_what_is_no_topic_names_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean .*max_staleness"):
        render_help(["--help", "stalenes-max"])


def test_help_in_a_narrow_terminal_and_in_colours():
    text = render_help(["--help"], Look(60))
    prose = [line for line in text.split("\n") if not line.startswith(("  --", "usage"))]
    assert max(map(len, prose)) <= 60 < max(map(len, render_help(["--help"]).split("\n")))
    assert "\x1b" not in text and "\x1b[36m--lr\x1b[0m" in render_help(["--help"], Look(colors=True))


def test_defaults_are_allowed_values():
    values = {spec.name: spec.default for spec in specs().values() if not spec.required}
    required = {"hf_checkpoint": "a", "prompt_data": "b"}
    assert RunConfig.model_validate(values | required) == RunConfig.model_validate(required)


def test_the_named_rewards_are_those_that_exist():
    assert set(specs()["rm_type"].choices) == set(BUILTIN)


def test_the_encodings_are_those_that_exist():
    assert set(specs()["update_weight_encoding"].choices) == set(CODECS)


@pytest.mark.parametrize(
    ("what", "absent"),
    [
        ("import turnout.config", ["torch", "yaml", "numpy", "aiohttp", "asyncio", "transformers"]),
        (
            "import turnout.schedule.session, turnout.schedule.inputs, turnout.train.rank",
            ["torch", "transformers", "gguf", "matplotlib", "tensorboardX", "pandas", "scipy", "sympy"],
        ),
        ("from turnout.cli.main import main; main(['--help'])", ["torch", "pydantic", "numpy", "asyncio"]),
        ("from turnout.cli.main import main; main(['train', '--help'])", ["torch", "numpy", "yaml"]),
    ],
)
def test_starting_stays_cheap(what, absent):
    code = f"{what}\nimport sys\nprint([m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
