"""What processes and files really hold in memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys

from turnout.placement.footprint import enough, file_bytes, pss_bytes, resident_bytes_at, tree, tree_bytes

TAKES = """
import subprocess, sys
held = bytearray(b"x" * (32 << 20))
if len(sys.argv) > 1:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    child.stdout.readline()
print("ready", flush=True)
sys.stdin.readline()
"""


def test_memory_that_is_only_parked_is_no_release(tmp_path):
    """Pages that are not written yet, and files of a tmpfs, are held."""
    with (tmp_path / "file").open("wb") as file:
        file.write(bytes(8 << 20))
        file.flush()
        assert file_bytes(file.fileno()) >= 8 << 20
        os.fdatasync(file.fileno())
        assert file_bytes(file.fileno()) == 0
    name = f"/dev/shm/turnout-test-{os.getpid()}"
    with open(name, "wb") as file:  # noqa: PTH123
        os.unlink(name)  # noqa: PTH108
        file.write(bytes(1 << 20))
        file.flush()
        assert file_bytes(file.fileno()) == 1 << 20
    assert not enough(100 << 20, 50 << 20) and enough(100 << 20, 90 << 20)


def test_pages_that_were_never_touched_are_not_there() -> None:
    size = 64 * mmap.PAGESIZE
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in range(0, 64, 8):
        memory[page * mmap.PAGESIZE] = 1
    assert resident_bytes_at(address, size) == 8 * mmap.PAGESIZE


def test_children_count_with_the_process_that_has_them() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TAKES, TAKES], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert len(tree(process.pid)) == 2
        assert tree_bytes(process.pid) > pss_bytes(process.pid) + (32 << 20) > 2 * (32 << 20)
    assert tree_bytes(process.pid) == 0, "a process that is gone holds nothing"
    assert pss_bytes(os.getpid()) > 0
