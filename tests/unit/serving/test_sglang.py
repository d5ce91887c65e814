"""Starting and reading a stock SGLang, as far as no SGLang is needed; the rest is the sglang lane's."""

from __future__ import annotations

import asyncio
import functools
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_engine import Answer, ScriptedEngine
from turnout.core.errors import EngineError
from turnout.placement.real import RealClock
from turnout.serving.sglang_client import SglangClient
from turnout.serving.sglang_launcher import (
    SglangLaunch,
    log_tail,
    server_arguments,
    server_environment,
)

INFO = Answer(body={"weight_version": "v1"})


def awaited(test: Any) -> Any:
    """Runs an async test on a loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **named: Any) -> None:
        asyncio.run(test(*args, **named))

    return run


def spec(**changes: object) -> SglangLaunch:
    given = {
        "engine_id": "e0",
        "python": Path(sys.executable),
        "model": Path("m"),
        "dtype": "bfloat16",
        "folder": Path("logs"),
        "start_deadline_s": 30.0,
        **changes,
    }
    return SglangLaunch(**given)  # pyright: ignore[reportArgumentType]


def test_a_gpu_gets_only_what_it_needs():
    words = server_arguments(spec(arguments={"mem-fraction-static": 0.8, "tp_size": 2}), 7)
    assert words[:4] == ["--model-path", "m", "--host", "127.0.0.1"]
    assert words[4:] == [
        *("--port", "7", "--dtype", "bfloat16", "--device", "cuda"),
        *("--mem-fraction-static", "0.8", "--tp-size", "2"),
    ]
    assert "SGLANG_USE_CPU_ENGINE" not in server_environment(spec())


def test_a_cpu_takes_the_paths_in_plain_pytorch_and_arguments_win():
    words = server_arguments(spec(device="cpu", arguments={"mem_fraction_static": 0.2}), 7)
    assert words[words.index("--attention-backend") + 1] == "torch_native"
    assert (
        words[words.index("--mem-fraction-static") + 1] == "0.2" and words.count("--mem-fraction-static") == 1
    )
    environment = server_environment(spec(device="cpu", threads=3))
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1" and environment["OMP_NUM_THREADS"] == "3"
    assert environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"


def test_switches_and_structures():
    given = {"enable-metrics": True, "skip-server-warmup": False, "context-length": None, "a": {"b": 1}}
    words = server_arguments(spec(arguments=given | {"bs": [1, 2]}), 7)
    assert words[-6:] == ["--enable-metrics", "--a", '{"b": 1}', "--bs", "1", "2"]


def test_the_key_is_on_no_command_line():
    assert "sesame" not in str(server_arguments(spec(key="sesame"), 7))


def test_the_tail_of_a_log_begins_at_its_last_error(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "\n".join(["one", "KeyError: old", "two", "  raise x", "OSError: gone", "nanobind: leaked"])
    )
    assert log_tail(log).split("\n") == ["    raise x", "  OSError: gone"]
    log.write_text("\n".join(str(n) for n in range(40)))
    assert log_tail(log).split() == [str(n) for n in range(28, 40)]


def checked(*ranks: dict[str, str]) -> Answer:
    return Answer(body={"success": True, "message": "", "ranks": [{"checksums": rank} for rank in ranks]})


@pytest.mark.parametrize(
    ("ranks", "sums"), [(({"a": "1", "b": "2"},), {"a": "1", "b": "2"}), (({"a": "1"}, {"a": "3"}), {})]
)
@awaited
async def test_a_stock_server_is_believed_its_label_and_nothing_else(ranks, sums):
    async with ScriptedEngine() as engine:
        engine.script("/model_info", INFO)
        engine.script("/weights_checker", checked(*ranks))
        client = SglangClient("e0", engine.address, RealClock())
        found = await client.attest(20.0)
        await client.close()
    assert (found.label, found.level, found.root, dict(found.checksums)) == ("v1", "label", "", sums)


@pytest.mark.parametrize(
    "body", [{"success": False, "message": "x"}, {"success": True}, [], {"success": True, "ranks": 3}]
)
@awaited
async def test_an_answer_of_another_shape_proves_nothing(body):
    async with ScriptedEngine() as engine:
        engine.script("/model_info", INFO)
        engine.script("/weights_checker", Answer(body=body))
        client = SglangClient("e0", engine.address, RealClock())
        with pytest.raises(EngineError, match="not understood"):
            await client.attest(20.0)
        await client.close()


@awaited
async def test_a_refused_checksum_is_an_error():
    async with ScriptedEngine() as engine:
        engine.script("/model_info", INFO)
        engine.script("/weights_checker", Answer(400, {"success": False, "message": "no"}))
        client = SglangClient("e0", engine.address, RealClock())
        with pytest.raises(EngineError, match="answered 400: no"):
            await client.attest(20.0)
        await client.close()
