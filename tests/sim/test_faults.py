"""Worlds with all faults: nothing is lost, doubled, too old or stuck, and every kind of fault hits."""

from __future__ import annotations

import json

import pytest

from turnout.cli.main import main
from turnout.core.errors import DeadlineExceeded
from turnout.sim import simulate
from turnout.sim.faults import KINDS
from turnout.sim.report import WorldOptions
from turnout.sim.simulate import Simulation, totals

SEEDS = 40
KEYS = [
    "seeds",
    "lost",
    "doubled",
    "over_bound",
    "stuck",
    "invariant_failures",
    "versions_committed",
    "faults_injected",
    "virtual_seconds",
]


def test_worlds_with_all_faults_keep_every_promise():
    found = totals(Simulation(SEEDS, WorldOptions()))
    assert {report.seed: report.failures[:3] for report in found.failing} == {}
    assert [kind for kind in KINDS if not found.faults[kind]] == []
    assert found.happened["train_steps"] >= 20 * SEEDS and found.happened["groups"] >= 200 * SEEDS
    assert len(found.schedules) == 3


def test_the_command_writes_its_report_and_says_what_failed(tmp_path, capsys):
    report = tmp_path / "report.json"
    assert main(["simulate", "--seeds", "2", "--faults", "none", "--json", str(report)]) == 0
    row = json.loads(report.read_text())
    assert list(row)[: len(KEYS)] == KEYS and row["seeds"] == 2 and row["versions_committed"] > 0
    sabotage = ["simulate", "--seeds", "3", "--sabotage", "lag-off-by-one", "--json", str(report)]
    assert main(sabotage) == 1
    row = json.loads(report.read_text())
    assert sum(row[key] for key in KEYS[1:6]) > 0 and row["failing_seeds"]
    assert "replay: turnout simulate --seed" in capsys.readouterr().out


def test_a_world_that_never_reports_is_named(monkeypatch):
    """Its process may have died: a pool begins another, and never tells of the work that is gone."""
    monkeypatch.setattr(simulate, "WORLD_S", 0.001)
    with pytest.raises(DeadlineExceeded, match="the world of seed 3 "):
        totals(Simulation(2, WorldOptions(), first=3, processes=2))


def test_one_world_alone_shows_who_did_what(capsys):
    assert main(["simulate", "--seed", "1", "--schedule", "sync", "--trace"]) == 0
    out = capsys.readouterr().out
    assert "VersionCommitted" in out and "finished with" in out and "every promise kept" in out


@pytest.mark.parametrize(
    "words, text", [(["--faults", "meteor"], "meteor"), (["--sabotage", "none"], "none")]
)
def test_a_name_that_is_none_is_refused(words, text, capsys):
    assert main(["simulate", *words]) == 2
    assert text in capsys.readouterr().err


def test_the_names_of_sabotages_are_listed(capsys):
    assert main(["simulate", "--list-sabotage"]) == 0
    assert len(capsys.readouterr().out.split()) >= 25
