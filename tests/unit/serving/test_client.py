"""The client of an engine, against a scripted one: every bad answer is the right error, told whole."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.scripted_engine import CUT, HANG, RESET, Answer, ScriptedEngine, reply
from turnout.core.errors import EngineBusy, EngineDead, EngineError, EngineRefused
from turnout.core.types import Finish
from turnout.placement.real import RealClock
from turnout.protocol.sglang import GenerateRequest, SamplingParams
from turnout.serving.address import Address
from turnout.serving.client import Attestation, EngineClient

REQUEST = GenerateRequest("r" * 32, (1, 2, 3), SamplingParams(max_new_tokens=4, sampling_seed=5))
LATE_S = 0.05


def against(
    use: Callable[[EngineClient], Awaitable[Any]], *answers: Answer, path: str = "/generate"
) -> tuple[Any, ScriptedEngine]:
    """The result of `use`, or what it raised, and the engine that it spoke to."""

    async def main() -> tuple[Any, ScriptedEngine]:
        async with ScriptedEngine("engine-7") as engine:
            engine.script(path, *answers)
            client = engine.client()
            client.version = "v000003-aaaaaaaaaaaaaaaa"
            try:
                return await use(client), engine
            except Exception as fault:
                return fault, engine

    return asyncio.run(main())


def broken_reply(pairs: Any) -> Any:
    return {"meta_info": {"finish_reason": "stop", "output_token_logprobs": pairs}}


def generate(client: EngineClient) -> Awaitable[Any]:
    return client.generate(REQUEST, 10.0)


def told(fault: Any, kind: type[EngineError], phase: str, *words: str) -> None:
    """The very class, and a line that names engine, phase, last version and cause (RTR-16)."""
    assert type(fault) is kind, repr(fault)
    text = str(fault)
    assert text.startswith(
        f"engine engine-7 failed in phase {phase}, last version v000003-aaaaaaaaaaaaaaaa: "
    )
    for word in words:
        assert word in text


def test_a_request_and_its_reply() -> None:
    got, engine = against(generate)
    assert (got.finish, len(got.output_ids), got.output_ids[0]) == (Finish.LENGTH, 4, 5)
    assert engine.sent("/generate") == [REQUEST.to_json()]


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (Answer(400, {"error": {"message": "context length is 64"}}), EngineRefused, ["400", "length is 64"]),
        (Answer(401, {"message": "no"}), EngineRefused, ["401", "no"]),
        (Answer(404, {"error": "nothing here"}), EngineRefused, ["404", "nothing here"]),
        (Answer(422, [1]), EngineRefused, ["422"]),
        (Answer(429, {"error": {"message": "queue is full"}}), EngineBusy, ["429", "queue is full"]),
        (Answer(503, {"error": {"code": "no_available_workers"}}), EngineBusy, ["503", "no_available_workers"]),
        (Answer(500, b"Traceback: boom"), EngineError, ["500", "boom"]),
        (Answer(502, b""), EngineError, ["502"]),
        (Answer(204, b""), EngineError, ["204"]),
        (Answer(302, b"", headers={"Location": "/elsewhere"}), EngineError, ["302"]),
        (Answer(200, b"<html>"), EngineError, ["no JSON", "<html>"]),
        (Answer(200, b'{"text":'), EngineError, ["no JSON"]),
        (Answer(200, b'"\xff\xfe"'), EngineError, ["not understood"]),
        (Answer(500, b"\xff\xfe"), EngineError, ["500"]),
        (Answer(200, b""), EngineError, ["not understood"]),
        (Answer(200, {"text": "ab"}), EngineError, ["not understood", "meta_info"]),
        (Answer(200, [{}, {}]), EngineError, ["not understood", "list of 2"]),
        (Answer(200, None), EngineError, ["not understood"]),
        (Answer(200, broken_reply(3)), EngineError, ["not understood"]),
        (Answer(200, broken_reply([[]])), EngineError, ["not understood"]),
        (Answer(200, b"[" * 100_000), EngineError, ["no JSON"]),
        (Answer(500, b"[" * 100_000), EngineError, ["500"]),
        (Answer(200, reply(4) | {"output_ids": [float("inf")]}), EngineError, ["not understood"]),
        (CUT, EngineDead, ["/generate"]),
        (RESET, EngineDead, ["/generate"]),
    ],
)  # fmt: skip
def test_a_bad_answer_to_generate(answer: Answer, kind: type[EngineError], words: list[str]) -> None:
    fault, engine = against(generate, answer)
    told(fault, kind, "rollout", *words)
    assert len(engine.sent("/generate")) == 1, "nothing is retried by the client"
    assert len(engine.calls) == 1, "no redirect is followed"


def test_a_nan_as_a_bare_token_is_an_abort() -> None:
    row = reply(4)
    row["meta_info"]["output_token_logprobs"][2][0] = float("nan")
    got, _ = against(generate, Answer(body=row))
    assert (got.finish, len(got.output_ids)) == (Finish.ABORT, 2)


def test_a_late_answer() -> None:
    fault, _ = against(lambda client: client.generate(REQUEST, LATE_S), HANG)
    told(fault, EngineError, "rollout", "waited 0.05 s for engine engine-7 to answer /generate")


def test_a_refused_connection() -> None:
    async def main() -> Any:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))  # bound and not listening: refused, and nobody else's
            client = EngineClient("engine-7", Address("127.0.0.1", held.getsockname()[1]), RealClock())
            client.version = "v000003-aaaaaaaaaaaaaaaa"
            with pytest.raises(EngineDead) as caught:
                await client.health(10.0)
            await client.close()
            return caught.value

    told(asyncio.run(main()), EngineDead, "health", "/health")


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH_9.9\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"]
)
def test_a_port_of_something_else(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def main() -> Any:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            client = EngineClient("engine-7", Address(*server.sockets[0].getsockname()), RealClock())
            client.version = "v000003-aaaaaaaaaaaaaaaa"
            with pytest.raises(EngineError) as caught:
                await client.health(10.0)
            await client.close()
            return caught.value

    told(asyncio.run(main()), EngineError, "health", "/health")


CONTROL: list[tuple[str, str, Any]] = [
    ("/health", "health", lambda c: c.health(10.0)),
    ("/weight_version", "attest", lambda c: c.attest(10.0)),
    ("/v1/loads", "load", lambda c: c.load()),
    ("/update_weights_from_disk", "update", lambda c: c.update_from_disk("/w", "v", 10.0)),
    ("/update_weight_version", "update", lambda c: c.set_version_label("v")),
    ("/begin_weight_update", "update", lambda c: c.control("/begin_weight_update", {}, 10.0)),
]


@pytest.mark.parametrize(("path", "phase", "use"), CONTROL)
def test_rtr_16_a_failed_control_call_is_no_success(path: str, phase: str, use: Any) -> None:
    fault, engine = against(use, Answer(500, b"busy"), path=path)
    told(fault, EngineError, phase, path, "500", "busy")
    assert len(engine.calls) == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(body={"success": False, "message": "checksum"}), ["checksum"]),
        (Answer(body={"message": "no word of success"}), ["no word of success"]),
        (Answer(body={"success": "true"}), []),
        (Answer(body=[{"success": True}]), []),
        (Answer(body=None), []),
        (Answer(body=b""), []),
    ],
)
def test_wgt_01_only_a_plain_success_is_one(answer: Answer, words: list[str]) -> None:
    fault, engine = against(
        lambda c: c.update_from_disk("/w", "v", 10.0), answer, path="/update_weights_from_disk"
    )
    told(fault, EngineError, "update", *words)
    assert engine.sent("/weight_version") == []


def test_wgt_25_every_behaviour_flag_is_sent() -> None:
    """An engine's default may be to abort all requests: nothing may be left to it."""

    async def use(client: EngineClient) -> None:
        await client.set_version_label("v")
        await client.update_from_disk("/w", "v1", 10.0)

    _, engine = against(use, Answer(body={"success": True}), path="/update_weights_from_disk")
    assert engine.sent("/update_weight_version") == [{"new_version": "v", "abort_all_requests": False}]
    assert engine.sent("/update_weights_from_disk") == [
        {"model_path": "/w", "load_format": "auto", "weight_version": "v1", "abort_all_requests": False,
         "flush_cache": True}
    ]  # fmt: skip
    assert engine.aborted_by_default == 0


def test_rol_13_an_empty_request_id_never_leaves() -> None:
    async def use(client: EngineClient) -> None:
        with pytest.raises(ValueError, match="never empty"):
            await client.generate(GenerateRequest("", (1,)), 10.0)

    got, engine = against(use)
    assert got is None
    assert engine.calls == []


def test_an_oversize_control_body_never_leaves_and_a_long_prompt_does() -> None:
    async def use(client: EngineClient) -> Any:
        with pytest.raises(ValueError, match="control body of"):
            await client.control("/update_weights_from_tensor", {"x": "x" * (1 << 20)}, 10.0)
        long = GenerateRequest("rid", (100_000,) * 200_000, SamplingParams(max_new_tokens=1))
        return await client.generate(long, 30.0)

    got, engine = against(use)
    assert [call.path for call in engine.calls] == ["/generate"]
    assert got.finish is Finish.LENGTH


@pytest.mark.parametrize(
    ("body", "expected"),
    [({"version": "v", "root": "r", "level": "memory"}, Attestation("v", "r", "memory")), ({"version": "v"}, None),
     ([], None), (None, None)],
)  # fmt: skip
def test_attestations(body: Any, expected: Attestation | None) -> None:
    got, _ = against(lambda c: c.attest(10.0), Answer(body=body), path="/weight_version")
    if expected is None:
        told(got, EngineError, "attest", "not understood")
    else:
        assert got == expected


def test_an_unknown_load_report_is_an_error_and_never_idle() -> None:
    got, _ = against(lambda c: c.load(), Answer(body={"busy": False}), path="/v1/loads")
    told(got, EngineError, "load", "not understood")
    got, _ = against(lambda c: c.load(), Answer(body=[{"num_reqs": 2}]), path="/v1/loads")
    assert got == 2


def test_server_info_under_its_old_name() -> None:
    async def use(client: EngineClient) -> Any:
        return await client.server_info()

    async def main() -> tuple[Any, list[str]]:
        async with ScriptedEngine() as engine:
            engine.script("/server_info", Answer(404, {}))
            engine.script("/get_server_info", Answer(body={"old": True}))
            return await use(engine.client()), [call.path for call in engine.calls]

    assert asyncio.run(main()) == ({"old": True}, ["/server_info", "/get_server_info"])


def test_rtr_01_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    got, engine = against(generate)
    assert got.finish is Finish.LENGTH
    assert len(engine.calls) == 1


def test_rtr_17_failing_answers_with_big_bodies_give_their_connection_back() -> None:
    async def use(client: EngineClient) -> int:
        failed = 0
        for _ in range(100):
            try:
                await client.generate(REQUEST, 10.0)
            except EngineError:
                failed += 1
        return failed

    big = Answer(500, b"x" * (256 << 10))
    good = Answer(body=reply(4))
    got, engine = against(use, *[big, good] * 50)
    assert got == 50
    assert len({call.peer for call in engine.calls}) == 1, "one connection served all of them"


def test_rtr_08_requests_refused_leave_the_engine_usable() -> None:
    async def use(client: EngineClient) -> Any:
        for _ in range(20):
            with pytest.raises(EngineRefused):
                await client.generate(REQUEST, 10.0)
        return await client.generate(REQUEST, 10.0)

    got, engine = against(use, *[Answer(400, {"error": {"message": "too long"}})] * 20)
    assert got.finish is Finish.LENGTH
    assert len(engine.calls) == 21


def test_a_token_is_sent_with_every_call() -> None:
    async def main() -> list[str | None]:
        async with ScriptedEngine() as engine:
            client = engine.client(token="s3cret")
            await client.health(10.0)
            await client.generate(REQUEST, 10.0)
            return [call.headers.get("Authorization") for call in engine.calls]

    assert asyncio.run(main()) == ["Bearer s3cret"] * 2


def test_an_error_never_shows_the_token() -> None:
    async def main() -> str:
        async with ScriptedEngine() as engine:
            engine.script("/health", Answer(500, b"boom"))
            with pytest.raises(EngineError) as caught:
                await engine.client(token="s3cret").health(10.0)
            return str(caught.value)

    assert "s3cret" not in asyncio.run(main())


def test_a_cancelled_call_closes_its_connection() -> None:
    """The engine sees the disconnect, and can end the request."""

    async def main() -> None:
        async with ScriptedEngine() as engine:
            engine.script("/generate", HANG)
            task = asyncio.ensure_future(engine.client().generate(REQUEST, 10.0))
            await engine.until_running(1)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await engine.until_running(0)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_client_can_be_closed_twice_and_used_again() -> None:
    async def use(client: EngineClient) -> Any:
        await client.close()
        await client.generate(REQUEST, 10.0)
        await client.close()
        await client.close()
        return await client.generate(REQUEST, 10.0)

    got, _ = against(use)
    assert got.finish is Finish.LENGTH


def test_rtr_02_an_engine_on_ipv6() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError as fault:
            pytest.skip(f"no IPv6 loopback here: {fault}")

    async def main() -> Any:
        async with ScriptedEngine(host="::1") as engine:
            return await engine.client().generate(REQUEST, 10.0)

    assert asyncio.run(main()).finish is Finish.LENGTH
