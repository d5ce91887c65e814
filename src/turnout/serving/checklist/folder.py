"""Whether an engine sees the same folder as this host: a nonce both ways, or what a stock SGLang says of a path.

Promises: nothing that an engine serves changes; with `deep` a stock engine whose weights are known to be the
checkpoint's loads them once more, no other engine loads anything; what was written into the folder is removed;
every call has a deadline.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from turnout.core.errors import DeadlineExceeded, EngineDead, EngineError, EngineRefused
from turnout.core.ports import Clock
from turnout.protocol.folder_probe import probe_file
from turnout.serving.checklist.lines import Finding, failed, proved, unknown
from turnout.serving.client import EngineClient

LATE_S = 3.0  # a network file system may show a new file this late
POLL_S = 0.1
SEEN = "Cannot find any model weights"  # what SGLang 0.5.23 says of a folder that is there and empty


@dataclass(frozen=True)
class Prober:
    """`folder` is written to, under the very path that updates name. `checkpoint`, for `deep` only, is what stock
    engines are made to load, where that is what they have loaded already."""

    folder: Path
    clock: Clock
    deadline_s: float
    checkpoint: Path | None = None

    async def probe(self, client: EngineClient, stock: bool, unlike: str) -> Finding:
        """Of one engine; never raises for what an engine does. `unlike`: why a stock one's weights are not known to
        be the checkpoint's, so that it must not load that; empty: they are."""
        try:
            return await (self._stock(client, unlike) if stock else self._nonces(client))
        except OSError as fault:
            return unknown(f"nothing can be written to {self.folder}: {fault.strerror}", client.engine_id)
        except (EngineError, DeadlineExceeded) as fault:
            told = fault.reason if isinstance(fault, EngineError) else str(fault)
            return unknown(told, client.engine_id)

    async def _nonces(self, client: EngineClient) -> Finding:
        """An embedded engine reads ours and writes one that is read here."""
        theirs, mine, nonce = (secrets.token_hex(16) for _ in range(3))
        asked, made = probe_file(self.folder, theirs), probe_file(self.folder, mine)
        try:
            asked.write_text(nonce, encoding="ascii")
            body = {"folder": str(self.folder), "theirs": theirs, "mine": mine}
            row = await client.control("/probe_folder", body, self.deadline_s)
            if row.get("read") != nonce:
                return failed("it reads other content in the file written here", client.engine_id)
            if row.get("written") is None:
                how = (
                    f"it read a nonce written here; it can't write there ({row.get('reason')}), nor needs to"
                )
                return proved(how, client.engine_id)
            if await self._appears(made) != row["written"]:
                return failed(
                    "it read a nonce written here, but its own does not show here", client.engine_id
                )
        except EngineRefused as fault:
            known = "answered 400" in fault.reason
            return (failed if known else unknown)(fault.reason, client.engine_id)
        finally:
            for path in (asked, made):
                path.unlink(missing_ok=True)
        return proved("a nonce both ways", client.engine_id)

    async def _appears(self, path: Path) -> str:
        """What stands in a file that may show late; empty where it does not show."""
        end = self.clock.now() + LATE_S
        while not path.exists() and self.clock.now() < end:
            await self.clock.sleep(POLL_S)
        return path.read_text(encoding="ascii") if path.exists() else ""

    async def _stock(self, client: EngineClient, unlike: str) -> Finding:
        """A stock engine has no call that reads a file, but it says of an empty folder something else than of none.
        Neither is loaded: it looks for files before it touches its weights."""
        running, waiting, _ = await client.load_report(self.deadline_s)
        if running or waiting:
            return unknown(
                f"{running + waiting} requests are on it, which a probe would hold up", client.engine_id
            )
        with self._empty() as folder:
            there, absent = [
                await self._said(client, path) for path in (folder, folder.with_name("absent-" + folder.name))
            ]
        if SEEN in there and SEEN not in absent:
            how = "it tells a folder that was made here from one that was not"
            if self.checkpoint is not None and unlike:
                return unknown(f"{how}; it was not made to load the checkpoint: {unlike}", client.engine_id)
            if self.checkpoint is not None:
                return await self._deep(client, self.checkpoint)
            return proved(how, client.engine_id)
        if there and SEEN not in there:
            return failed(f"it does not see a folder made here: {there[:200]}", client.engine_id)
        return unknown(
            f"it answers alike for a folder that is there and for none: {there[:100]!r}", client.engine_id
        )

    async def _said(self, client: EngineClient, path: Path) -> str:
        """Why the engine does not load a path."""
        try:
            await client.load_from_disk(str(path), client.version, self.deadline_s, flush=False)
        except EngineDead:
            raise
        except EngineError as fault:
            return fault.reason
        return ""

    @contextlib.contextmanager
    def _empty(self) -> Iterator[Path]:
        folder = probe_file(self.folder, secrets.token_hex(16))
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    async def _deep(self, client: EngineClient, checkpoint: Path) -> Finding:
        """The engine loads its own weights from links in the folder; its checksums stay what they were."""
        before = await client.attest(self.deadline_s)
        with self._empty() as folder:
            for path in checkpoint.iterdir():
                _linked(path, folder / path.name)
            await client.load_from_disk(str(folder), before.label, self.deadline_s)
        after = await client.attest(self.deadline_s)
        if after.checksums != before.checksums:
            return failed(
                "its checksums changed when it loaded the checkpoint from the folder", client.engine_id
            )
        if not after.checksums:
            return unknown("it loaded the checkpoint from there and tells no checksums", client.engine_id)
        how = f"it loaded its own checkpoint from there, and {len(after.checksums)} checksums stayed"
        return proved(how, client.engine_id)


def _linked(source: Path, target: Path) -> None:
    """A hard link, or a copy where the folder is of another file system."""
    if not source.is_file():
        return
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
