"""Answers of the data: prompts as engines get them, masks on what the assistant says, rows that are refused."""

from __future__ import annotations

import asyncio
import json

import pytest

from turnout.core.errors import DataError
from turnout.core.types import Trajectory
from turnout.protocol.sglang import SamplingParams
from turnout.rollout.demonstrations import Demonstrations, load_demonstrations
from turnout.rollout.prompts import DataSpec, load_prompts
from turnout.rollout.sampler import Ask, SamplingPlan
from turnout.rollout.tokenizer import HubTokenizer
from turnout.train.model_tokenizer import EOS_ID, byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return HubTokenizer(tmp_path_factory.mktemp("none"), byte_tokenizer(), (EOS_ID,))


def written(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def said(*turns):
    roles = {"u": "user", "a": "assistant", "s": "system"}
    return [{"role": roles[turn[0]], "content": turn[1:]} for turn in turns]


def trained(shown, tokenizer):
    """The texts of the runs of the response that train, special tokens too."""
    runs, before = [], 0
    for token, mask in zip(shown.ids, shown.mask):
        if mask and not before:
            runs.append([])
        if mask:
            runs[-1].append(token)
        before = mask
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def chat(path, label_key=None):
    return DataSpec(path, label_key=label_key, metadata_key="metadata", apply_chat_template=True)


def test_every_turn_of_the_assistant_trains_to_its_end_token_and_nothing_else(tmp_path, tokenizer):
    talk = said("sBe short.", "uHi", "aHello", "uBye", "aSo long")
    spec = chat(written(tmp_path, {"input": talk, "metadata": {"from": 1}}))
    (prompt,), shown = load_demonstrations(spec, tokenizer, 100)
    (made,) = shown.values()
    assert trained(made, tokenizer) == ["Hello<|eos|>", "So long<|eos|>"]
    whole = tokenizer.render(talk, None, {})
    text = tokenizer.decode([*prompt.token_ids, *made.ids], skip_special_tokens=False)
    assert whole.startswith(text) and whole[len(text) :] == "\n", "to the last end token"
    assert prompt.label == made.text and prompt.metadata == {"from": 1}
    asked = chat(written(tmp_path, {"input": talk[:2]}))
    assert load_prompts(asked, tokenizer)[0].token_ids == prompt.token_ids, (
        "what an engine would be asked with"
    )


@pytest.mark.parametrize("prompt", ["2 + 2 =", said("sSum.", "u2 + 2 ="), said("uHi", "aHello", "u2 + 2 =")])
def test_a_label_is_the_answer_and_trains_alone(tmp_path, tokenizer, prompt):
    path = written(tmp_path, {"input": prompt, "answer": "4"})
    (found,), shown = load_demonstrations(chat(path, "answer"), tokenizer, 100)
    made = shown[found.prompt_id]
    assert trained(made, tokenizer) == ["4<|eos|>"] and set(made.mask) == {1}
    assert found.label == "4" and found.token_ids == load_prompts(chat(path), tokenizer)[0].token_ids


def test_without_a_template_the_answer_follows_the_text_and_gets_an_end(tmp_path, tokenizer):
    path = written(tmp_path, {"input": "one, two,", "answer": " three"})
    (prompt,), shown = load_demonstrations(DataSpec(path, label_key="answer"), tokenizer, 100)
    assert prompt.token_ids == tuple(tokenizer.encode("one, two,", special=True))
    assert trained(shown["0"], tokenizer) == [" three<|eos|>"]


def test_long_answers_are_dropped_and_counted(tmp_path, tokenizer, caplog):
    rows = [{"input": "x", "answer": "y" * count} for count in (3, 9, 4)]
    spec = DataSpec(written(tmp_path, *rows), label_key="answer")
    prompts, _ = load_demonstrations(spec, tokenizer, 5)
    assert [prompt.prompt_id for prompt in prompts] == ["0", "2"]
    assert "1 responses have more than 5 tokens" in caplog.text
    with pytest.raises(DataError, match="all responses have more than 1 tokens"):
        load_demonstrations(spec, tokenizer, 1)


def test_rows_that_show_no_answer_are_all_told(tmp_path, tokenizer):
    rows = [
        {"input": said("uHi", "aHello")},
        {"input": said("uHi")},
        {"input": said("aHello")},
        {"input": said("uHi", "aHello", "uBye")},
        {"input": "Hi"},
        {"input": 3},
    ]
    with pytest.raises(DataError) as caught:
        load_demonstrations(chat(written(tmp_path, *rows)), tokenizer, 100)
    assert [fault.where.rsplit(":", 1)[1] for fault in caught.value.faults] == ["2", "3", "4", "5", "6"]
    with pytest.raises(DataError, match="no text, or empty"):
        path = written(tmp_path, {"input": "x", "answer": ""})
        load_demonstrations(DataSpec(path, label_key="answer"), tokenizer, 100)


def test_a_template_that_shows_earlier_turns_otherwise_is_refused(tmp_path, tokenizer):
    """As Qwen3's, which leaves the thoughts of earlier turns out."""
    inner = byte_tokenizer()
    inner.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] if loop.last else '...' }}"
        "{{ eos_token if m['role'] == 'assistant' else '' }}{% endfor %}"
    )
    odd = HubTokenizer(tokenizer.folder, inner, (EOS_ID,))
    spec = chat(written(tmp_path, {"input": said("uHi", "aHello", "uBye", "aSo long")}))
    with pytest.raises(DataError, match="message 1 otherwise within the whole conversation"):
        load_demonstrations(spec, odd, 100)


def test_a_sample_is_the_answer_as_of_the_current_version(tmp_path, tokenizer):
    path = written(tmp_path, {"input": said("uHi", "aHello", "uBye", "aSo long")})
    (prompt,), shown = load_demonstrations(chat(path), tokenizer, 100)
    plan = SamplingPlan(1, SamplingParams(max_new_tokens=5), 1.0, 1)
    made = asyncio.run(
        Demonstrations(shown, lambda: "v000003-ab").sample(Ask(prompt, plan, Trajectory.unbegun(7), 0))
    )
    assert (made.response_ids, made.loss_mask, made.seed) == (shown["0"].ids, shown["0"].mask, 7)
    assert made.spans.labels == ("v000003-ab",) and not made.partial
