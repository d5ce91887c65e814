"""What users see of the options: the list of flags, the reference page, the help text, the cost of importing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from turnout.config.help import render_help
from turnout.config.reference import main, render_reference
from turnout.config.run_config import RunConfig, specs
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
    text = render_help()
    for spec in specs().values():
        assert f"--[no-]{spec.flag[2:]}\n" in text if spec.kind == "bool" else f"  {spec.flag} " in text
        assert spec.text.endswith("."), spec.name
        assert spec.default is not None or spec.required or spec.unset, f"{spec.name}: what holds without it?"
    assert "Learning rate" not in text or "(default: 1e-06)" in text


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
        ("from turnout.cli.main import main; main(['--help'])", ["torch", "pydantic", "numpy", "asyncio"]),
        ("from turnout.cli.main import main; main(['train', '--help'])", ["torch", "numpy", "yaml"]),
    ],
)
def test_starting_stays_cheap(what, absent):
    code = f"{what}\nimport sys\nprint([m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
