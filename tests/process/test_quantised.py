"""A run whose engines keep their weights quantised: every version is attested as what the trainer exported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.run_process import of_kind, train

SHORT = (
    "--trainer-threads", "1", "--num-rollout", "2", "--no-plots", "--eval-num-prompts", "2",
    "--update-weight-buffer-size", str(1 << 20),
)  # fmt: skip


@pytest.mark.parametrize(("scheme", "transport"), [("int8", "disk"), ("fp8", "group")])
def test_a_run_with_quantised_engines_attests_what_the_trainer_exports(
    tmp_path: Path, scheme: str, transport: str
) -> None:
    run = tmp_path / "run"
    flags = ("--engine-quantization", scheme, "--update-weight-transport", transport)
    status, _, err = train(run, *SHORT, *flags)
    assert status == 0, err
    published = [row["root"] for row in of_kind(run, "VersionPublished")]
    attested = [(row["root"], row["level"]) for row in of_kind(run, "VersionAttested")][1:]  # the base first
    assert attested == [(root, "memory") for root in published] and len(published) == 2
