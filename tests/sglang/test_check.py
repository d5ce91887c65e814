"""`turnout check` of a real SGLang: what is proved of it, and that it serves on as before."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.sglang.conftest import KEY, Server
from turnout.placement.real import RealClock
from turnout.serving.access import Access
from turnout.serving.checklist.engines import Look
from turnout.serving.checklist.folder import Prober
from turnout.serving.checklist.lines import Result
from turnout.serving.client import EngineClient
from turnout.serving.sglang_client import SglangClient

DEADLINE_S = 300.0


def test_a_folder_is_shared_with_a_stock_engine(server: Server, model: Path, tmp_path: Path) -> None:
    """By what it says of an empty folder, and by what it loads from one; it holds the same weights afterwards."""

    def connect(stock: bool) -> EngineClient:
        kind = SglangClient if stock else EngineClient
        return kind("s", server.client.address, RealClock(), Access(admin_key=KEY))

    for checkpoint in (None, model):
        prober = Prober(tmp_path, RealClock(), DEADLINE_S, checkpoint)
        [facts] = asyncio.run(Look(RealClock(), DEADLINE_S, prober, model).at_all([connect]))
        assert not facts.fault and facts.weights is not None and facts.shared is not None
        assert facts.shared.result is Result.PROVED, facts.shared
        assert ("loaded" in facts.shared.how) == (checkpoint is not None)
    assert facts.differs == "" and list(tmp_path.iterdir()) == []
    server.do(server.client.generates(DEADLINE_S))
