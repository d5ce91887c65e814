"""Order of sources, round trip, and every fault at once."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.config.conftest import VALID, faults_of, only
from turnout.config import RunConfig, dump, load
from turnout.config.run_config import GROUPS, specs
from turnout.core.errors import ConfigError


def test_defaults_then_file_then_command_line(write):
    path = write("rollout_batch_size: 4\nlr: 1e-5\nrollout_shuffle: false\n")
    config = load(path, ["--rollout-batch-size", "16"])
    assert config.rollout_batch_size == 16
    assert config.lr == 1e-5
    assert config.rollout_shuffle is False
    assert config.n_samples_per_prompt == specs()["n_samples_per_prompt"].default == 8


def test_cfg_10_falsy_values_of_the_file_win_over_truthy_defaults(write):
    path = write(
        "clip_grad: 0\ntensorboard: false\nmax_failed_groups: 0\ninput_key: ''\nbefore_after_samples: 0\n"
    )
    config = load(path, [])
    assert (config.clip_grad, config.tensorboard, config.max_failed_groups) == (0.0, False, 0)
    assert (config.input_key, config.before_after_samples) == ("", 0)


def test_cfg_05_zero_is_not_the_same_as_not_given(write):
    assert load(write(), []).save_interval is None
    assert only(write("save_interval: 0\nsave: ck\n"), []).where.startswith("--save-interval")


def test_the_command_line_can_ungive_what_the_file_gave(write):
    path = write("eval_prompt_data: held.jsonl\neval_interval: 5\n")
    assert load(path, []).eval_interval == 5
    assert load(path, ["--no-eval-interval"]).eval_interval is None


def test_a_file_named_in_yaml_names_the_run_unless_it_is_named(write):
    assert load(write(), []).run_name == "quick"
    assert load(write("run_name: mine\n"), []).run_name == "mine"
    assert load(write(), ["--run-name", "other"]).run_name == "other"


def test_no_file_at_all(folder):
    argv = ["--hf-checkpoint", "model", "--prompt-data=train.jsonl", "--rm-type", "f1", "--num-epoch", "1"]
    config = load(None, argv)
    assert (config.run_name, config.num_epoch, config.num_rollout) == ("run", 1, None)


def test_dumped_configuration_loads_to_the_same(write, folder):
    more = "rollout_stop: ['\\n', '😀']\napply_chat_template_kwargs: {enable_thinking: false}\nrun_dir: out\n"
    first = load(write(more + "eps_clip_high: 0.28\nrollout_stop_token_ids: [1, 2]\n"), ["--lr", "2e-5"])
    (folder / "config.json").write_text(dump(first), encoding="utf-8")
    again = load(folder / "config.json", [])
    assert again.run_dir is None, "where a run wrote is no part of what it was"
    assert again == first.model_copy(update={"run_dir": None})


def test_explicit_null_in_json_survives_and_is_refused_where_nothing_may_be_not_given(folder):
    base = {"hf_checkpoint": "model", "prompt_data": "train.jsonl", "rm_type": "exact", "num_rollout": 3}
    (folder / "a.json").write_text(json.dumps(base | {"eps_clip_high": None}))
    assert load(folder / "a.json", []).eps_clip_high is None
    (folder / "b.json").write_text(json.dumps(base | {"lr": None}))
    fault = only(folder / "b.json", [])
    assert fault.where.startswith("--lr") and "can't be empty" in fault.reason


def test_every_fault_of_every_kind_is_told_at_once(folder):
    path = folder / "bad.yaml"
    path.write_text(
        "hf_checkpoint: ./nowhere\n"  # a missing folder
        "prompt_data: train.jsonl\n"
        "rollout_batch_sise: 8\n"  # a misspelt key
        "rollout_batch_size: '8'\n"  # text for a number
        "eps_clip: 1.5\n"  # out of range
        "n_samples_per_prompt: 1\n"  # two options against each other
        "release_train: true\n"  # a feature that doesn't exist yet
        "num_rollout: 5\n"
        "num_rollout: 6\n"  # a key twice
        "rm_type: exact\n"
    )
    lines = "\n".join(fault.line() for fault in faults_of(path, ["--sede", "7", "--lr", "fast"]))
    for part in (
        "--hf-checkpoint (bad.yaml:1)",
        "did you mean rollout_batch_size?",
        "--rollout-batch-size (bad.yaml:4)",
        "--eps-clip (bad.yaml:5)",
        "--n-samples-per-prompt (bad.yaml:6)",
        "bad.yaml:7 = release_train: true: not yet done",
        "bad.yaml:9 = num_rollout: the key stands twice, first in line 8",
        "did you mean --seed?",
        "--lr = fast: must be a number",
    ):
        assert part in lines, lines
    assert len(lines.splitlines()) == 9, lines


def test_missing_required_options_are_faults_among_others(folder):
    wheres = [fault.where for fault in faults_of(None, ["--rollout-temperature", "0"])]
    for flag in ("--hf-checkpoint", "--prompt-data", "--rollout-temperature", "--num-rollout"):
        assert flag in wheres
    assert len(set(wheres)) == len(wheres), wheres


@pytest.mark.parametrize(
    ("line", "flag", "said"),
    [
        ("lr: fast", "--lr", "must be a number, is text"),
        ("seed: true", "--seed", "must be a whole number, is true or false"),
        ("seed: 1.5", "--seed", "must be a whole number"),
        ("deterministic: 'yes'", "--deterministic", "must be true or false, is text"),
        ("deterministic: 1", "--deterministic", "must be true or false, is a whole number"),
        ("label_key: 12", "--label-key", "must be text, is a whole number"),
        ("rollout_stop: {a: 1}", "--rollout-stop", "must be a list of texts, is a mapping"),
        ("rollout_stop_token_ids: [1, x]", "--rollout-stop-token-ids (quick.yaml:5)[1]", "is text"),
        ("apply_chat_template_kwargs: [1]", "--apply-chat-template-kwargs", "must be a mapping"),
        ("dtype: float16", "--dtype", "no such choice"),
        ("rollout_temperature: .nan", "--rollout-temperature", "finite"),
        ("lr: .inf", "--lr", "finite"),
        ("admin_token_env: hunter-2", "--admin-token-env", "not allowed"),
    ],
)
def test_a_wrong_value_is_told_with_its_option_and_line(write, line, flag, said):
    fault = only(write(line + "\n"), [])
    assert fault.where.startswith(flag) and "quick.yaml:5" in fault.where
    assert said in fault.reason


def test_a_choice_that_is_nearly_right_names_the_one_that_was_meant(write):
    remedy = only(write("schedule: asynch\n"), []).remedy
    assert remedy == "did you mean async? one of: sync, pipelined, async"
    assert only(write("schedule: 7\n"), []).remedy == "one of: sync, pipelined, async"


def test_bytes_on_the_command_line_that_are_no_unicode(write):
    assert "Unicode" in only(write(), ["--save", "a\udcff"]).reason


def test_one_text_stands_for_a_list_of_one(write):
    config = load(write("rollout_stop: '</answer>'\nrollout_stop_token_ids: 7\n"), [])
    assert config.rollout_stop == ["</answer>"] and config.rollout_stop_token_ids == [7]


def test_a_secret_is_neither_shown_nor_saved(write, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    text = "\n".join(f.line() for f in faults_of(write("admin_token: hunter2\n"), ["--hf-token", "hunter3"]))
    assert "hunter" not in text and "--admin-token-env" in text
    assert "hunter2" not in dump(load(write("admin_token_env: MY_TOKEN\n"), []))


def test_a_default_list_is_not_shared(write):
    load(write(), []).rollout_stop.append("x")
    assert load(write(), []).rollout_stop == []


def test_a_group_can_not_be_left_out_of_the_configuration():
    declared = [name for group in GROUPS for name in group.model_fields]
    assert len(set(declared)) == len(declared), "an option stands in two groups"
    assert set(declared) == set(RunConfig.model_fields) == set(specs())


TEXT = st.text(alphabet="aZ0 ._-/:\n\x00é😀{", max_size=8)


def _value(name: str) -> st.SearchStrategy[object]:
    spec = specs()[name]
    kinds: dict[str, st.SearchStrategy[object]] = {
        "int": st.integers(-3, 5000),
        "float": st.floats(-1, 10) | st.integers(0, 3),
        "bool": st.booleans(),
        "str": TEXT,
        "choice": st.sampled_from(spec.choices or ("",)),
        "ints": st.lists(st.integers(-5, 5), max_size=3),
        "strs": st.lists(TEXT, max_size=3),
        "json": st.dictionaries(TEXT, st.integers(0, 9), max_size=2),
    }
    junk = st.none() | TEXT | st.booleans() | st.lists(st.none(), max_size=1)
    return kinds[spec.kind] | junk


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_any_values_give_a_configuration_that_round_trips_or_named_faults(data):
    names = data.draw(st.sets(st.sampled_from(sorted(specs())), max_size=8))
    values = {name: data.draw(_value(name)) for name in sorted(names)}
    base = {"hf_checkpoint": "org/model", "prompt_data": "reasoning_gym:x", "num_rollout": 3}
    config, faults = _load_values(base | values)
    if config is None:
        assert faults
        for fault in faults:
            assert fault.where.startswith("--") and fault.reason
    else:
        again, none = _load_values(json.loads(dump(config)))
        assert not none and again == config.model_copy(update={"run_dir": None})


def _load_values(values: dict[str, object]):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "values.json"
        file.write_text(json.dumps(values), encoding="utf-8")
        try:
            return load(file, []), ()
        except ConfigError as error:
            return None, error.faults


def test_the_valid_file_is_valid(write):
    assert VALID and load(write(), []).num_rollout == 10


def test_a_file_that_is_nearly_there_is_named(write, folder):
    path = write()
    with pytest.raises(ConfigError, match=r"No such file or directory -> did you mean .*quick\.yaml\?"):
        load(path.with_name("quik.yaml"), [])
    with pytest.raises(ConfigError, match="is a folder -> give the run's file"):
        load(folder, [])
    path.rename(folder / "config.json")
    with pytest.raises(ConfigError, match=r"is a folder -> did you mean .*config\.json\?"):
        load(folder, [])


def test_a_path_beside_a_run_file_that_is_elsewhere(write, folder):
    (folder / "sub").mkdir()
    (folder / "sub" / "mine.jsonl").touch()
    path = write().rename(folder / "sub" / "quick.yaml")
    (fault,) = faults_of(path, ["--prompt-data", "mine.jsonl"])
    assert fault.reason == "no such file" and fault.remedy.endswith(f"cd {folder / 'sub'}")
    (folder / "mein.jsonl").touch()
    (fault,) = faults_of(path, ["--prompt-data", "mien.jsonl"])
    assert fault.remedy == "did you mean mein.jsonl?"
