"""Text as tokens come: what a stream shows is always a beginning of what the response ends with."""

from __future__ import annotations

import random

import pytest

from tests.engine_models import add_tokenizer
from turnout.core.types import Finish
from turnout.engine.request_machine import Request
from turnout.engine.text import Decoder, ShownText, StopWatch, response_text
from turnout.protocol.sglang import SamplingParams

LETTERS = "ab EN\u00e9\u4e16\U0001f600\U0001f469\u200d"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(add_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize("seed", range(40))
def test_a_stream_shows_whole_characters_and_no_text_that_a_stop_string_takes_back(tokenizer, seed):
    draw = random.Random(seed)
    text = "".join(draw.choices(LETTERS, k=60))
    stops = ("END", "a\U0001f600b", text[20 : 20 + draw.randrange(1, 6)])[: draw.randrange(4)]
    ids = tokenizer(text)["input_ids"]
    watch, shown = StopWatch(tokenizer, stops, True), ShownText(tokenizer, stops, True)
    request = Request("r", [5], SamplingParams(stop=stops), 0)
    seen, at, waiting = "", 0, []
    for token in ids:
        request.tokens.append(token)
        waiting.append(token)
        if watch.push([token]):
            request.finish = Finish.STOP
        if draw.random() < 0.5 or request.finish:  # a slow reader takes several at once
            seen += shown.push(waiting)
            waiting = []
            at += 1
        assert "\ufffd" not in seen and text.startswith(seen)
        assert not any(stop in seen for stop in stops)
        if request.finish:
            break
    seen += shown.push([] if request.finish else waiting)
    final = response_text(tokenizer, request)
    assert final.startswith(seen) and at > 0
    assert len(final) - len(seen) < max((len(stop) for stop in stops), default=1)
    if request.finish:
        assert seen == final


def test_bytes_that_are_no_character_are_shown_in_the_end(tokenizer):
    decoder = Decoder(tokenizer, True)
    half = tokenizer("\U0001f600")["input_ids"][:2]
    assert [decoder.push([token]) for token in half * 4] == [""] * 7 + ["\ufffd" * 4]
    assert decoder.push(tokenizer("ok")["input_ids"]) == "ok"


def test_without_a_tokenizer_nothing_is_shown():
    assert ShownText(None, (), True).push([1, 2]) == ""
