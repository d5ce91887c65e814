"""reasoning-gym tasks by name."""

from __future__ import annotations

import asyncio
import builtins
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turnout.core.errors import ConfigError, DataError
from turnout.core.types import Finish, Prompt, Trajectory
from turnout.placement.real import RealClock
from turnout.rollout import tasks
from turnout.rollout.prompts import DataSpec, fingerprint, load_prompts
from turnout.rollout.rewards import RewardRunner, load_reward
from turnout.rollout.tokenizer import HubTokenizer, load_tokenizer
from turnout.train.model_tokenizer import byte_tokenizer, save_tokenizer

PATH = 'reasoning_gym:basic_arithmetic:{"size": 6, "seed": 3, "max_terms": 3}'
MADE = replace(Trajectory.unbegun(0), finish=Finish.STOP, text="r")


@pytest.fixture(scope="module")
def tok(tmp_path_factory: pytest.TempPathFactory) -> HubTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(byte_tokenizer(), folder)
    return load_tokenizer(folder)


def test_the_same_text_gives_the_same_prompts_and_another_seed_others(tok: HubTokenizer) -> None:
    pytest.importorskip("reasoning_gym", reason="the optional reasoning-gym is not installed")
    one = DataSpec(PATH, apply_chat_template=True)
    first = load_prompts(one, tok)
    assert len(first) == 6
    tasks._dataset.cache_clear()
    tasks._entry.cache_clear()
    assert load_prompts(one, tok) == first
    other = DataSpec(PATH.replace('"seed": 3', '"seed": 4'), apply_chat_template=True)
    assert not {p.text for p in first} & {p.text for p in load_prompts(other, tok)}
    assert fingerprint(one, first).differences(fingerprint(other, load_prompts(other, tok)))
    assert load_prompts(DataSpec(PATH + "@[2:4]", apply_chat_template=True), tok) == first[2:4]
    json.dumps([p.metadata for p in first])


def test_the_verifier_is_the_tasks_own(tok: HubTokenizer) -> None:
    pytest.importorskip("reasoning_gym", reason="the optional reasoning-gym is not installed")

    async def main() -> None:
        runner = RewardRunner(load_reward("reasoning_gym"), RealClock(), 30.0)
        for prompt in load_prompts(DataSpec(PATH), tok):
            said = (f"so <answer>{prompt.label}</answer>", f" {prompt.label}\n", "<answer>x</answer>")
            right, plain, wrong = [await runner.score(prompt, replace(MADE, text=text)) for text in said]
            assert (right.value, plain.value) == (1.0, 1.0)
            assert wrong.value is not None and wrong.value < 0.1
        foreign = await runner.score(Prompt("0", (1,), "p", "l"), MADE)
        assert foreign.value is None
        assert "comes from no reasoning-gym task" in foreign.why

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("reasoning_gym:basic_arithmetik", "did you mean basic_arithmetic"),
        ("reasoning_gym:basic_arithmetic:{", "the options are no JSON"),
        ("reasoning_gym:basic_arithmetic:[1]", "no JSON object"),
        ('reasoning_gym:basic_arithmetic:{"no_such": 1}', "the task refuses its options"),
        ('reasoning_gym:basic_arithmetic:{"min_terms": -1}', "the task refuses its options"),
        ('reasoning_gym:basic_arithmetic:{"size": 0}', "size 0 is no whole number"),
        ('reasoning_gym:basic_arithmetic:{"seed": -1}', "seed -1 is no whole number"),
        ('reasoning_gym:basic_arithmetic:{"seed": true}', "seed True is no whole number"),
        ("reasoning_gym:basic_arithmetic@[9999:]", "holds no row"),
    ],
)
def test_faults_of_a_task(tok: HubTokenizer, path: str, reason: str) -> None:
    pytest.importorskip("reasoning_gym", reason="the optional reasoning-gym is not installed")
    with pytest.raises(DataError, match="refused") as caught:
        load_prompts(DataSpec(path), tok)
    assert reason in str(caught.value)


def test_without_the_package_the_error_names_the_command(
    monkeypatch: pytest.MonkeyPatch, tok: HubTokenizer, tmp_path: Path
) -> None:
    real_import = builtins.__import__

    def no_gym(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".", maxsplit=1)[0] == "reasoning_gym":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_gym)
    tasks._dataset.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'turnout\[reasoning-gym\]'"):
        load_prompts(DataSpec("reasoning_gym:basic_arithmetic"), tok)
