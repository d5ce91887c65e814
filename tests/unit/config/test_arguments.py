"""The command line's grammar."""

from __future__ import annotations

import pytest

from turnout.config.arguments import read_arguments
from turnout.config.refusals import ELSEWHERE, NOT_YET
from turnout.config.run_config import specs


def read(*argv):
    return read_arguments(list(argv), specs())


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--rollout-batch-size", "32"], "rollout_batch_size", 32),
        (["--rollout-batch-size=32"], "rollout_batch_size", 32),
        (["--lr", "1e-5"], "lr", 1e-5),
        (["--rollout-top-k", "-1"], "rollout_top_k", -1),
        (["--deterministic"], "deterministic", True),
        (["--no-rollout-shuffle"], "rollout_shuffle", False),
        (["--rollout-shuffle=false"], "rollout_shuffle", False),
        (["--rollout-stop", "a", "b c"], "rollout_stop", ["a", "b c"]),
        (["--rollout-stop=--"], "rollout_stop", ["--"]),
        (["--rollout-stop"], "rollout_stop", []),
        (["--rollout-stop-token-ids", "1", "-2"], "rollout_stop_token_ids", [1, -2]),
        (["--apply-chat-template-kwargs", '{"a": [1]}'], "apply_chat_template_kwargs", {"a": [1]}),
        (["--no-eval-interval"], "eval_interval", None),
        (["--label-key="], "label_key", ""),
        (["--label-key", "a=b"], "label_key", "a=b"),
        (["--seed", "1", "--seed", "2"], "seed", 2),
        (["--dtype", "float64"], "dtype", "float64"),
    ],
)
def test_values(argv, name, value):
    found = read(*argv)
    assert not found.faults
    assert found.values == {name: value} and type(found.values[name]) is type(value)


def test_a_list_ends_at_the_next_flag():
    assert read("--rollout-stop", "a", "--seed", "3").values == {"rollout_stop": ["a"], "seed": 3}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--seed"], "a value is missing"),
        (["--seed", "--deterministic"], "a value is missing"),
        (["--seed", "1_0"], "must be a whole number"),
        (["--seed", "1.0"], "must be a whole number"),
        (["--seed", "9" * 5000], "more than 100 digits"),
        (["--lr", "x"], "must be a number"),
        (["--deterministic=yes"], "a switch is true or false"),
        (["--no-deterministic=true"], "takes no value"),
        (["--no-seed"], "no such option"),
        (["--rollout_batch_size", "3"], "no such option"),
        (["--rollout-batch", "3"], "no such option"),
        (["stray"], "belongs to no option"),
        (["--deterministic", "stray"], "belongs to no option"),
        (["-x"], "belongs to no option"),
        (["--"], "belongs to no option"),
        (["--apply-chat-template-kwargs", "{a}"], "not JSON"),
    ],
)
def test_faults(argv, said):
    found = read(*argv)
    assert len([f for f in found.faults if said in f.reason]) == 1, [f.line() for f in found.faults]
    assert all(len(f.line()) < 300 for f in found.faults)


def test_it_reads_on_after_a_fault():
    found = read("--sed", "1", "--seed", "x", "--lr", "2e-5", "oops")
    assert len(found.faults) == 3 and found.values == {"lr": 2e-5} and found.refused == {"seed"}


def test_underscores_in_a_flag_are_told_with_the_right_spelling():
    assert "did you mean --rollout-batch-size" in read("--rollout_batch_size", "3").faults[0].remedy


@pytest.mark.parametrize(
    "flag",
    [
        "--lora-rank",
        "--speculative-draft-model",
        "--image-key",
        "--multimodal-keys",
        "--release-train",
    ],
)
def test_features_that_do_not_exist_yet_are_refused_by_name(flag):
    (fault,) = read(flag, "a", "b").faults
    assert fault.where == flag and fault.reason.startswith("not yet done: ") and fault.remedy


@pytest.mark.parametrize(
    "value, read_as", [((), True), (("-1",), -1), (("a",), "a"), (("x", "y"), ["x", "y"])]
)
def test_arguments_of_other_programs_are_entries_of_a_mapping(value, read_as):
    found = read("--router-queue-size", *value, "--sglang-mem-fraction-static", "0.8")
    assert not found.faults
    assert found.inside == {
        "router_args": {"queue-size": read_as},
        "sglang_args": {"mem-fraction-static": 0.8},
    }


@pytest.mark.parametrize("flag", ["--router-polcy", "--sglang-devise", "--sglang-router-prt"])
def test_what_is_nearly_an_option_is_no_argument_of_another_program(flag):
    found = read(flag, "a")
    assert "did you mean" in found.faults[0].remedy and not found.inside


def test_no_name_is_both_an_option_and_refused():
    names = set(specs())
    for refused in (*NOT_YET, *ELSEWHERE):
        if refused.endswith("*"):
            assert not [n for n in names if n.startswith(refused[:-1])], refused
        else:
            assert refused not in names


def test_remedies_name_options_that_exist():
    import re

    flags = {spec.flag for spec in specs().values()} | {f"--no-{s.flag[2:]}" for s in specs().values()}
    for text in [*(meanwhile for _, meanwhile in NOT_YET.values()), *ELSEWHERE.values()]:
        for flag in re.findall(r"--[a-z][a-z0-9-]+", text):
            assert flag in flags or any(f.startswith(flag) and flag.endswith("-") for f in flags), (
                flag,
                text,
            )
