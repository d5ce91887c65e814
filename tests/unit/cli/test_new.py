"""`turnout new`: what it writes is a run that loads, with a comment at every option; nothing is overwritten."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest

from turnout.cli import main as cli
from turnout.cli.new_files import HELD_OUT, RUN, SECTIONS, TRAIN, WHEN, files
from turnout.config.load import load
from turnout.config.run_config import specs
from turnout.core.imports import load_function


@pytest.mark.parametrize("task", SECTIONS)
def test_the_run_loads_and_its_functions_are_there(task, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "mine", "--task", task]) == 0
    out = capsys.readouterr().out
    assert "cd mine" in out and "mine/run.yaml" in out
    monkeypatch.chdir(tmp_path / "mine")
    config = load(tmp_path / "mine" / RUN)
    told = re.search(r"turnout train run\.yaml (--hf-checkpoint .*?)  ", out)
    assert told is not None and told[1] in (tmp_path / "mine" / RUN).read_text()
    assert load(tmp_path / "mine" / RUN, told[1].split()).hf_checkpoint == "tiny:llama"
    for flag, path in (
        ("--custom-rm-path", config.custom_rm_path),
        ("--custom-generate-function-path", config.custom_generate_function_path),
        ("--custom-agent-path", config.custom_agent_path),
    ):
        if path is not None:
            assert callable(load_function(flag, path))
    assert (config.loss_type == "sft_loss") == (task == "sft")


@pytest.mark.parametrize("task", SECTIONS)
def test_every_option_says_what_it_does_and_when_to_change_it(task):
    text = files(task)[RUN]
    keys = re.findall(r"^([a-z_]+):", text, re.MULTILINE)
    assert keys == [name for _, options in SECTIONS[task] for name in options] and len(set(keys)) == len(keys)
    for name in keys:
        comment = text[: text.index(f"\n{name}:")].rpartition("\n\n")[2]
        flat = " ".join(line.lstrip("# ") for line in comment.split("\n"))
        assert specs()[name].text in flat and WHEN[name] in flat, name
    assert max(map(len, text.split("\n"))) <= 110


def test_no_held_out_task_is_trained_on():
    made = files("rl")
    rows = [
        [json.loads(line) for line in made[name].splitlines()] for name in ("train.jsonl", "heldout.jsonl")
    ]
    texts = [{row["prompt"][1]["content"] for row in part} for part in rows]
    assert [len(part) for part in texts] == [TRAIN, HELD_OUT] and not texts[0] & texts[1]
    assert files("rl") == made


def test_the_reward_counts_the_last_number(tmp_path):
    place = tmp_path / "reward.py"
    place.write_text(files("rl")["reward.py"])
    reward = load_function("--custom-rm-path", f"{place}:reward")
    assert reward("", "it is 41, no, 42.", "42") == 1 and reward("", "42 or 43", "42") == 0
    assert reward("", "none", "42") == 0
    assert importlib.util.find_spec("reward") is None  # it was loaded by its file


def test_a_home_of_nobody_is_a_folder_as_any(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "~nobody-of-this-name/x"]) == 0
    assert (tmp_path / "~nobody-of-this-name" / "x" / "run.yaml").is_file()


def test_nothing_is_overwritten_and_nothing_is_written_beside_it(tmp_path, capsys):
    (tmp_path / "reward.py").write_text("mine")
    assert cli.main(["new", str(tmp_path)]) == 2
    assert "reward.py: exists already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["reward.py"]
    (tmp_path / "file").write_text("")
    assert cli.main(["new", str(tmp_path / "file" / "x")]) == 2
    assert "can't be written: Not a directory" in capsys.readouterr().err
