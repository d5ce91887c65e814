"""`POST /probe_folder` (ours): proves to who asks that this engine sees the same folder, by a nonce both ways.

The asker writes a file, the engine answers what stands in it, and writes a file of its own that the asker reads.
Promises: the folder lies under the allowed roots; only files named as `turnout.protocol.folder_probe` says, with
nothing but a nonce in them, are read or written, so the call tells of no other file and changes none; no link is
followed; the asker removes both files.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path
from typing import Any

from aiohttp import web

from turnout.core.errors import Fault, WeightError
from turnout.engine.control import ControlCalls, told
from turnout.engine.requests import BadRequest
from turnout.engine.update_requests import allowed_folder
from turnout.protocol.folder_probe import NONCE, probe_file


class FolderProbe(ControlCalls):
    """The handler; the body is {"folder", "theirs", "mine"}: the folder and the nonces that name the two files."""

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/probe_folder", self.probe)]

    async def probe(self, request: web.Request) -> web.Response:
        return await told(self._probe(await self.row(request)))

    async def _probe(self, row: dict[str, Any]) -> dict[str, Any]:
        folder, theirs, mine = row.get("folder"), row.get("theirs"), row.get("mine")
        if not isinstance(folder, str) or not folder or "\0" in folder:
            raise BadRequest(Fault("folder", str(folder)[:40], "must be a folder"))
        for name, nonce in (("theirs", theirs), ("mine", mine)):
            if not isinstance(nonce, str) or NONCE.fullmatch(nonce) is None:
                raise BadRequest(Fault(name, str(nonce)[:40], "must be 32 hexadecimal digits"))
        if not allowed_folder(Path(folder).resolve(), self.settings):
            raise BadRequest(
                Fault(
                    "folder", folder, "lies outside the folders that updates may read from (--allowed-root)"
                )
            )
        return await asyncio.to_thread(_exchanged, Path(folder), str(theirs), str(mine))


def _exchanged(folder: Path, theirs: str, mine: str) -> dict[str, Any]:
    """`read`: what stands in their file. `written`: what was put into ours, null with `reason` where it can't
    be."""
    try:
        handle = os.open(probe_file(folder, theirs), os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(handle, "rb") as file:
            read = file.read(64).decode("ascii", "replace")
    except OSError as fault:
        raise WeightError(f"{folder}: this engine can't read the file there: {fault.strerror}") from fault
    if NONCE.fullmatch(read) is None:
        raise WeightError(f"{folder}: the file there holds no nonce")
    written = secrets.token_hex(16)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(probe_file(folder, mine), flags, 0o644), "wb") as file:
            file.write(written.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as fault:
        return {"read": read, "written": None, "reason": str(fault.strerror)}
    return {"read": read, "written": written, "reason": ""}
