"""`turnout train` with weights sent in different ways, to engines of one and of two ranks: the same training.

The few cases that the suite has time for; all of them: python -m tests.weight_matrix (make soak).
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.process.run_process import of_kind, processes_of, train
from tests.weight_matrix import COMMON, WAYS, Case, cases, differences, fresh, run
from turnout.weights.codecs.registry import CODECS
from turnout.weights.manifest import DELTA, complete_versions

FIRST = Case("full", "disk", "", "bfloat16", 1)
DELTAS = [
    Case("delta", "disk", "packed", "bfloat16", 1),
    Case("delta", "group", "", "bfloat16", 1),
]
RANKS = [Case("full", "tensor", "", "bfloat16", 2), Case("delta", "disk", "ranked", "bfloat16", 2)]


def test_deltas_train_as_full_versions_do(tmp_path: Path) -> None:
    """Roots of all versions, tokens, log-probs and metrics are equal bit for bit; the engines that took deltas give
    the log-probs of a fresh engine that loads the final weights."""
    first = run(FIRST, tmp_path / FIRST.name)
    expected = fresh(FIRST, tmp_path / FIRST.name)
    assert differences(FIRST, first, None, expected) == []
    for case in DELTAS:
        assert differences(case, run(case, tmp_path / case.name), first, expected) == []
        assert processes_of(tmp_path / case.name / "run") == []
    kept = complete_versions(tmp_path / DELTAS[0].name / "run" / "weights")
    assert {manifest.encoding for manifest in kept if manifest.kind == DELTA} <= {"packed"}


def test_engines_of_two_ranks_take_them_too(tmp_path: Path) -> None:
    seen = [run(case, tmp_path / case.name) for case in RANKS]
    for case, found in zip(RANKS, seen):
        assert differences(case, found, seen[0], seen[0].evals) == []
        assert processes_of(tmp_path / case.name / "run") == []


def test_the_matrix_has_every_legal_pair_and_every_encoding() -> None:
    found = cases()
    assert len(found) == len({case.name for case in found})
    for ranks in (1, 2):
        mine = [case for case in found if case.ranks == ranks and case.dtype == "bfloat16"]
        assert {(c.mode, c.transport) for c in mine} == set(WAYS)
        assert {c.encoding for c in mine} - {""} == set(CODECS)


SPOILED = """
import sys
if "turnout.engine" in sys.orig_argv:
    from turnout.engine.weights import LiveWeights

    activate = LiveWeights.activate

    def one_off(self, staged):
        done = activate(self, staged)
        name = "model.norm.weight"
        if not staged.full:
            self.storage.read(self.storage.live(self.storage.specs[name].buffer), name)[3] ^= 1
        return done

    LiveWeights.activate = one_off
"""


def test_one_wrong_element_in_an_engine_ends_the_run(tmp_path: Path) -> None:
    """--check-weight-update-equal sees what the attestation does not: memory that was right when it was written."""
    (tmp_path / "sitecustomize.py").write_text(SPOILED)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = ("--update-weight-mode", "delta", "--dtype", "bfloat16", "--lr", "2e-5")
    status, _, err = train(tmp_path / "run", *COMMON, *words, PYTHONPATH=paths)
    assert status == 5, err
    assert "model.norm.weight" in err and "changed since they were attested" in err
    assert [row["version"][:7] for row in of_kind(tmp_path / "run", "VersionCommitted")] == ["v000000"]
