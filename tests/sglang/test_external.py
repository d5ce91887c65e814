"""A run on two engines of somebody else, one of them a real SGLang with an admin key: both prove every version."""

from __future__ import annotations

from tests.engine_process import engine
from tests.process.run_process import TINY, ended, of_kind, start
from tests.sglang.conftest import Server
from turnout.train.model_zoo import resolve_checkpoint


def test_an_embedded_engine_and_an_sglang_of_somebody_else(sglang_python, tmp_path):
    model, run = resolve_checkpoint("tiny:llama"), tmp_path / "run"
    server = Server(sglang_python, model, tmp_path, key="sesame")
    try:
        with engine(model, tmp_path, "--dtype", "float32", "--allowed-root", str(tmp_path)) as ours:
            names = {server.client.address.place, ours.url.removeprefix("http://")}
            words = ("--dtype", "float32", "--num-rollout", "2", "--no-plots", "--skip-eval-before-train",
                     "--rollout-external-engine-addrs", *names, "--rollout-engine-admin-key-env", "KEY",
                     "--trainer-threads", "1", "--eval-num-prompts", "2")  # fmt: skip
            status, out, err = ended(
                start("train", str(TINY), "--run-dir", str(run), *words, KEY="sesame"), 600.0
            )
    finally:
        server.stop()
    assert status == 0, err
    rows = of_kind(run, "VersionAttested")
    last = of_kind(run, "VersionCommitted")[-1]["version"]
    assert {(row["engine"] in names, row["level"]) for row in rows if row["version"] == last} == {
        (True, "memory"), (True, "checksum")
    }  # fmt: skip
    told = out + err + "".join(path.read_text(errors="replace") for path in run.glob("*.json*"))
    assert "sesame" not in told
