"""What a run says at its end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from turnout.config.rundir import RunPaths
from turnout.observe.audit import AuditReport, GroupCounts
from turnout.observe.summary import RunSummary
from turnout.schedule.finish import show
from turnout.schedule.incarnation import RunOutcome


@pytest.mark.parametrize("train_only", [False, True])
def test_the_dashboard_is_named_where_it_finds_the_run(train_only, tmp_path, capsys):
    config = SimpleNamespace(train_only=train_only, plots=False)
    summary = RunSummary("ok", [], 1.0, 0.0, 0, GroupCounts(0, 0, 0, 0, 0), AuditReport([], []))
    show(config, RunPaths(tmp_path, tmp_path, tmp_path), RunOutcome(), summary)
    told = capsys.readouterr().out
    assert f"run          {tmp_path}" in told and (f"turnout dash {tmp_path}" in told) is not train_only
