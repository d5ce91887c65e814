"""What memory processes of this host really hold, and having it given back.

A footprint is what the system could not use for something else: the PSS of processes (proc(5), smaps_rollup)
without pages of files, which it drops as it needs to and which weigh more when another process that maps them ends;
what of a file lies in memory because it is a tmpfs's; and pages of it that are not on the disk yet. Promises: what
is parked in shared memory or in unwritten pages is not counted as freed; where the system does not say (no Linux),
a count is 0.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import sys
from pathlib import Path

ENOUGH = 0.9  # of the bytes that a release is asked for must have come back
SLACK_BYTES = 8 << 20  # what a process may take meanwhile for other things
_CACHESTAT = 451  # cachestat(2), Linux 6.5
_PAGE = os.sysconf("SC_PAGE_SIZE")


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Cached(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def enough(asked: int, fell: int) -> bool:
    """Whether a release that should free `asked` bytes did: the footprint fell by at least ENOUGH of them."""
    return fell >= ENOUGH * asked - SLACK_BYTES


def pss_bytes(pid: int) -> int:
    """Proportional set size of one process, anonymous and shared memory; 0 where it is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return 0
    lines = (line.split() for line in text.splitlines())
    return sum(int(words[1]) * 1024 for words in lines if words[0] in ("Pss_Anon:", "Pss_Shmem:"))


def tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for one in found:  # grows while it is walked
        for tasks in Path(f"/proc/{one}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, tasks.read_text().split())
    return found


def tree_bytes(pid: int) -> int:
    """As pss_bytes, of a process and all that descend from it."""
    return sum(map(pss_bytes, tree(pid)))


def file_bytes(file: int) -> int:
    """What of an open file is held in memory: all of it on a tmpfs, else what is not on the disk yet."""
    stat = os.fstat(file)
    if _on_tmpfs(stat.st_dev):
        return stat.st_blocks * 512
    whole, counts = _Range(0, 0), _Cached()
    pointers = (ctypes.byref(whole), ctypes.byref(counts))
    if sys.platform != "linux" or ctypes.CDLL(None).syscall(_CACHESTAT, file, *pointers, 0):
        return 0
    return (counts.dirty + counts.writeback) * _PAGE


def resident_bytes_at(address: int, size: int) -> int:
    """How much of anonymous memory of this process was ever touched, in whole pages (mincore(2)); `size` where the
    system does not say."""
    first = address // _PAGE * _PAGE
    pages = -(-(address + size - first) // _PAGE)
    found = (ctypes.c_ubyte * pages)()
    if sys.platform != "linux" or ctypes.CDLL(None).mincore(
        ctypes.c_void_p(first), ctypes.c_size_t(pages * _PAGE), found
    ):
        return size
    return min(size, sum(page & 1 for page in bytes(found)) * _PAGE)


def drop_pages(address: int, size: int) -> None:
    """Gives whole pages of memory that nobody reads any more back to the system, before it is freed: glibc keeps up
    to 64 MiB of what a thread's arena freed last, and malloc_trim leaves that there."""
    first = -(-address // _PAGE) * _PAGE
    whole = (address + size) // _PAGE * _PAGE - first
    if whole > 0 and sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(whole), mmap.MADV_DONTNEED)


def give_back() -> None:
    """Has the allocator return free pages: glibc keeps those of blocks below its mmap threshold (32 MiB)."""
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another libc: its own way of freeing must do
            ctypes.CDLL(None).malloc_trim(0)


def _on_tmpfs(device: int) -> bool:
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    rows = ((line.split()[2], line.partition(" - ")[2].split()[0]) for line in lines)
    return any(where == number and kind in ("tmpfs", "ramfs") for where, kind in rows)
