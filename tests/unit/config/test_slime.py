"""Command lines of slime: every flag of its that people use is asked what it does here, and does that."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path

import pytest

from tests.unit.config.conftest import faults_of
from turnout.config import load
from turnout.config.arguments import read_arguments
from turnout.config.option import OptionSpec
from turnout.config.refusals import RENAMED
from turnout.config.run_config import specs
from turnout.config.sglang_arguments import arguments_of, package_of
from turnout.config.slime import IGNORED, NEUTRAL, SWITCHES, VALUES, translated
from turnout.config.slime_page import fate, main, names, render

ROOT = Path(__file__).parents[3]


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def sample(spec: OptionSpec) -> list[str]:
    """Words that such an option takes."""
    kinds = {
        "int": ["3"],
        "float": ["0.5"],
        "bool": [],
        "ints": ["1", "2"],
        "strs": ["a", "b"],
        "json": ["{}"],
    }
    return [spec.choices[0]] if spec.kind == "choice" else kinds.get(spec.kind, ["text"])


def read(*argv: str):
    given = translated(argv)
    return read_arguments(given.words, specs()), given.ignored


def test_the_page_is_current(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "coming-from-slime.md").read_text(encoding="utf-8")
    assert page == render(), "run: python -m turnout.config.slime_page docs/coming-from-slime.md"
    assert main([str(tmp_path / "x.md")]) == 0 and (tmp_path / "x.md").read_text() == page
    assert main([]) == 2 and len(names()) == len(set(names())) > 180


@pytest.mark.parametrize("name", names())
def test_each_flag_does_what_the_page_says(name: str) -> None:
    told, flag = fate(name), flag_of(name)
    if told.startswith("the same"):
        found, ignored = read(flag, *sample(specs()[name]))
        assert set(found.values) == {name} and not found.faults and not ignored
    elif name in RENAMED:
        option, _, value = RENAMED[name].partition(" ")
        spec = specs()[option.removeprefix("--").replace("-", "_").removeprefix("no_")]
        found, ignored = read(flag, *([] if value else sample(spec)))
        assert set(found.values) == {spec.name} and not found.faults and not ignored
        assert not value or found.values[spec.name] == value
    elif name in IGNORED:
        found, ignored = read(flag, "7", "8")
        assert not found.values and not found.faults and ignored == {IGNORED[name]: [flag]}
        assert told == f"ignored: {IGNORED[name]}"
    elif told.startswith("goes to"):
        found, ignored = read(flag, "0.8")
        inner = name.removeprefix("sglang_").removeprefix("router_").replace("_", "-")
        option = "router_args" if "the router" in told else "sglang_args"
        assert found.inside == {option: {inner: 0.8}} and not found.faults
    else:
        found, ignored = read(flag, "of-no-use")
        assert [fault.where for fault in found.faults] == [flag] and not found.values and not ignored
        assert found.faults[0].remedy and "refused" in told


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_value_that_asks_for_what_happens_anyway_is_passed_over(name: str) -> None:
    values, reason = NEUTRAL[name]
    for value in values:
        found, ignored = read(flag_of(name), value)
        assert ignored == {reason: [flag_of(name)]} and not found.values and not found.faults
    found, ignored = read(flag_of(name), "2.5")
    assert found.faults and not ignored


def test_values_with_another_name() -> None:
    for (name, value), ours in VALUES.items():
        assert read(flag_of(name), value)[0].values == {name: ours} and ours in specs()[name].choices
        assert read(f"{flag_of(name)}={value}")[0].values == {name: ours}
    for (name, value), ours in SWITCHES.items():
        assert read(flag_of(name), value)[0].values == {ours[2:].replace("-", "_"): True}
    assert read("--eval-prompt-data", "aime", "x.jsonl")[0].values == {"eval_prompt_data": "x.jsonl"}
    assert read("--entropy-coef", "0.00", "--kl-coef=0")[0].faults == []
    assert read("--load", "other", "--save", "saved")[0].faults[0].where == "--load"


SCRIPT = """
    --swiglu --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm
    --norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 320 --kv-channels 16 --qk-layernorm
    --hf-checkpoint model --ref-load model --load saved --save saved --save-interval 20
    --prompt-data train.jsonl --input-key input --label-key label --apply-chat-template --rollout-shuffle
    --rm-type math --num-rollout 300 --rollout-batch-size 32 --n-samples-per-prompt 8
    --rollout-max-response-len 512 --rollout-temperature 0.8 --global-batch-size 256 --balance-data
    --eval-interval 20 --eval-prompt-data held held.jsonl --n-samples-per-eval-prompt 16
    --eval-max-response-len 1024 --eval-temperature 0.6 --eval-top-p 1
    --tensor-model-parallel-size 1 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1
    --expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --recompute-granularity full
    --recompute-method uniform --recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 9216
    --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00
    --eps-clip 0.2 --eps-clip-high 0.28 --use-tis --tis-clip 3
    --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
    --attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32 --attention-backend flash
"""


def test_a_script_of_slime_is_a_run(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        c = load(None, shlex.split(SCRIPT))
    assert (c.rollout_temperature, c.max_tokens_per_gpu, c.weight_decay, c.eps_clip_high) == (
        0.8,
        9216,
        0.1,
        0.28,
    )
    assert (c.kl_loss_type, c.off_policy, c.off_policy_clip, c.gradient_checkpointing) == (
        "low_var_kl",
        "tis",
        3.0,
        True,
    )
    assert (c.eval_prompt_data, c.save, c.n_samples_per_eval_prompt) == ("held.jsonl", "saved", 16)
    told = "\n".join(record.message for record in caplog.records)
    for word in shlex.split(SCRIPT):
        name = word[2:].replace("-", "_")
        if word.startswith("--") and name not in (*specs(), *RENAMED, "recompute_granularity"):
            assert word in told, f"{word} was dropped silently"


@pytest.mark.parametrize(
    ("words", "mode", "transport", "encoding"),
    [
        ("--update-weight-mode full --update-weight-transport nccl", "full", "group", None),
        ("--update-weight-mode full --update-weight-transport disk", "full", "disk", None),
        ("--update-weight-mode delta --update-weight-transport disk --update-weight-encoding deltas_zstd",
         "delta", "disk", "deltas_zstd"),
        ("--update-weight-mode delta --update-weight-transport nccl --update-weight-encoding indices",
         "delta", "group", "indices"),
    ],
)  # fmt: skip
def test_the_four_ways_of_an_update(
    write, words: str, mode: str, transport: str, encoding: str | None
) -> None:
    keep = "--update-weight-disk-dir shared --update-weight-disk-keep-files"
    c = load(write(), shlex.split(f"{words} {keep}"))
    assert (c.update_weight_mode, c.update_weight_transport, c.update_weight_encoding) == (
        mode,
        transport,
        encoding,
    )
    assert (c.update_weight_disk_dir, c.update_weight_disk_keep_files) == ("shared", True)


def test_what_would_train_otherwise_is_refused_all_at_once(write) -> None:
    faults = faults_of(
        write(), shlex.split("--context-parallel-size 2 --lora-rank 8 --attention-dropout 0.1")
    )
    assert [fault.where for fault in faults] == [
        "--context-parallel-size", "--lora-rank", "--attention-dropout"
    ]  # fmt: skip


def test_arguments_of_the_installed_sglang(write, folder: Path) -> None:
    """Classes of fields in either place of its source, and what it adds by hand."""
    package = package_of(str(folder / "env" / "bin" / "python"))
    assert package is not None and package_of(str(folder / "none" / "bin" / "python")) is None
    fields = package / "srt" / "arg_groups" / "fields"
    fields.mkdir(parents=True)
    (fields / "device.py").write_text('class Device:\n    device: str = "a"\nadd("--config")\n')
    assert arguments_of(package) == {"mem-fraction-static", "device", "config"}
    words = ["--engine", "sglang", "--sglang-python", "env/bin/python", "--sglang-args"]
    assert load(write(), [*words, '{"mem_fraction_static": 0.8}']).sglang_args == {"mem_fraction_static": 0.8}
