"""The client of one stock SGLang server: SGLang's API where it differs from the embedded engine's.

A stock server has no digest of ours. What it can say of its live weights is a checksum per tensor, under its own
names: `attest` returns these with the label, at level "label", and claims no more. turnout.weights.stock_checksums
makes of the trainer's values what must come back; who holds both may raise the level to "checksum".
"""

from __future__ import annotations

from typing import Any, ClassVar

from turnout.core.errors import EngineError
from turnout.serving.client import CONTROL_DEADLINE_S, Attestation, EngineClient


class SglangClient(EngineClient):
    """SGLang 0.5.23. What it is sent overwrites what it serves at once."""

    stages: ClassVar[bool] = False

    async def generates(self, deadline_s: float) -> None:
        """Returns when the server has made a token; hangs to the deadline while generation is paused."""
        await self._call("/health_generate", None, "health", deadline_s)

    async def served_label(self, deadline_s: float) -> str:
        info = await self._call("/model_info", None, "attest", deadline_s)
        try:
            return str(info["weight_version"])
        except (KeyError, TypeError) as fault:
            raise self.fault(EngineError, "attest", f"answer not understood: {str(info)[:200]}") from fault

    async def attest(self, deadline_s: float) -> Attestation:
        """Label and checksums of the live weights."""
        label = await self.served_label(CONTROL_DEADLINE_S)
        row = await self._call("/weights_checker", {"action": "checksum"}, "attest", deadline_s)
        try:
            return Attestation(label, "", "label", self._checksums(row))
        except (KeyError, TypeError, ValueError) as fault:
            raise self.fault(EngineError, "attest", f"answer not understood: {str(row)[:200]}") from fault

    def _checksums(self, row: Any) -> dict[str, str]:
        """One rank's checksums by SGLang's names; of several ranks none, since each has only a part."""
        if row["success"] is not True:
            raise ValueError(str(row))
        ranks = row["ranks"]
        if len(ranks) != 1:
            return {}
        return {str(name): str(value) for name, value in ranks[0]["checksums"].items()}
