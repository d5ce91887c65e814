"""KV over shared memory between two engines of one host: an anonymous file whose descriptor is handed over.

Promises: nothing has a name in the file system, so nothing is left behind however either process ends (the kernel
frees the memory with the last descriptor); that both are on one host, of one user, is proved by the hand-over
itself, never guessed from names; what was handed over can neither shrink nor change.

Linux only: elsewhere `Counter.open` gives None and KV travels over TCP.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import secrets
import socket
import struct
import sys

from turnout.protocol.pd import LinkError

TICKET_BYTES = 16
STEP_DEADLINE_S = 10.0
CALLERS_MAX = 64
ACK, SENT = b"+", b"K"
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE if sys.platform == "linux" else 0
PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Segment:
    """Anonymous shared memory being written: fill `view`, then `sealed` gives the descriptor. Another thread may
    still write to the view of a segment that was closed: the memory goes with the last reference to it."""

    def __init__(self, size: int) -> None:
        self._fd = os.memfd_create("turnout-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, size)
            self._map = mmap.mmap(self._fd, size)
        except OSError:
            os.close(self._fd)
            raise
        self.view = memoryview(self._map)

    def sealed(self) -> int:
        """No more writing: the descriptor, which stays the segment's own."""
        self.view.release()
        self._map.close()
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
        return self._fd

    def close(self) -> None:
        os.close(self._fd)


class Counter:
    """Where decode engines of this host come for shared memory: they show a ticket from an offer. The socket is in
    the abstract namespace; who it lets in must be of this process's user."""

    def __init__(self, server: socket.socket, name: str) -> None:
        self.name = name
        self._server = server
        self._tickets: dict[bytes, asyncio.Future[socket.socket]] = {}
        self._callers: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._accept())

    @staticmethod
    def open() -> Counter | None:
        """None where this system has no such sockets."""
        if sys.platform != "linux":
            return None
        name = f"turnout-pd-{secrets.token_hex(8)}"
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        server.bind(f"\0{name}")
        server.listen(CALLERS_MAX)
        return Counter(server, name)

    def ticket(self) -> tuple[str, asyncio.Future[socket.socket]]:
        """A new ticket, and what will be the socket of whoever shows it; `forget` it afterwards."""
        text = secrets.token_hex(TICKET_BYTES)
        future: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        self._tickets[bytes.fromhex(text)] = future
        return text, future

    def forget(self, ticket: str) -> None:
        future = self._tickets.pop(bytes.fromhex(ticket), None)
        if future is not None and not future.cancel() and not future.cancelled():
            future.result().close()

    async def close(self) -> None:
        tasks = [self._task, *self._callers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._server.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            caller, _ = await loop.sock_accept(self._server)
            if len(self._callers) >= CALLERS_MAX or _uid(caller) != os.getuid():
                caller.close()
                continue
            task = asyncio.create_task(self._serve(caller))
            self._callers.add(task)
            task.add_done_callback(self._callers.discard)

    async def _serve(self, caller: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        kept = False
        try:
            async with asyncio.timeout(STEP_DEADLINE_S):
                shown = b""
                while len(shown) < TICKET_BYTES:
                    part = await loop.sock_recv(caller, TICKET_BYTES - len(shown))
                    if not part:
                        return
                    shown += part
                future = self._tickets.get(shown)
                if future is None or future.done():
                    return
                await loop.sock_sendall(caller, ACK)
                if not future.done():
                    future.set_result(caller)
                    kept = True
        except (OSError, TimeoutError):
            return
        finally:
            if not kept:
                caller.close()


def hand_over(caller: socket.socket, fd: int) -> None:
    """Sends the descriptor; it is one small message, so this doesn't wait. Raises OSError."""
    socket.send_fds(caller, [SENT], [fd])


def show_ticket(name: str, ticket: str) -> socket.socket | None:
    """A connection on which a descriptor will come; None where the offering engine isn't reachable on this host or
    is another user's. Blocks for at most STEP_DEADLINE_S a step."""
    if not name or sys.platform != "linux":
        return None
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    caller.settimeout(STEP_DEADLINE_S)
    try:
        caller.connect(f"\0{name}")
        if _uid(caller) == os.getuid():
            caller.sendall(bytes.fromhex(ticket))
            if caller.recv(1) == ACK:
                return caller
    except (OSError, ValueError):
        pass  # another host, another network namespace, or another user: TCP it is
    caller.close()
    return None


def receive(caller: socket.socket, size: int, deadline_s: float) -> memoryview:
    """The memory whose descriptor comes, mapped until the last reference to it goes; blocks. Raises LinkError where
    it isn't sealed or has another size, or nothing came."""
    caller.settimeout(deadline_s)
    fds: list[int] = []
    try:
        _, fds, _, _ = socket.recv_fds(caller, 1, 1)
        if len(fds) != 1:
            raise LinkError("the prefill engine closed the connection for shared memory")
        if fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & SEALS != SEALS or os.fstat(fds[0]).st_size != size:
            raise LinkError(f"the shared memory is not {size} sealed bytes")
        # private: torch wants memory that could be written, and a write seal forbids a shared writable map
        mapped = mmap.mmap(fds[0], size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as fault:
        raise LinkError(f"no shared memory came: {fault}") from fault
    finally:
        for fd in fds:
            os.close(fd)
    return memoryview(mapped)


def _uid(peer: socket.socket) -> int:
    return PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))[1]
