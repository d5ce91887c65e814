"""What an engine releases goes back to the system in every cycle, from the thread that computes."""

from __future__ import annotations

import json
import subprocess
import sys

CYCLES = """
import json, os, threading, torch
from turnout.engine.attention import KvCache
from turnout.placement.footprint import give_back, pss_bytes

def cycles():
    cache = KvCache(4096, 2, 32, 2, torch.bfloat16)
    for _ in range(5):
        before = pss_bytes(os.getpid())
        freed = cache.release()
        give_back()
        print(json.dumps([freed, before - pss_bytes(os.getpid())]), flush=True)
        cache.allocate()
        scratch = [torch.empty(300_000) for _ in range(20)]  # as a step has, above the cache in the arena
        del scratch

thread = threading.Thread(target=cycles)
thread.start()
thread.join()
"""


def test_mem_01_a_cache_is_gone_whichever_arena_it_came_from() -> None:
    """Tensors below 32 MiB come from the thread's own arena once glibc has seen one freed, and stay there after
    malloc_trim. In a process of its own: what an arena keeps depends on what it had before."""
    told = subprocess.run(
        [sys.executable, "-c", CYCLES], capture_output=True, text=True, timeout=120, check=True
    )
    fell = [json.loads(line) for line in told.stdout.splitlines()]
    assert len(fell) == 5 and all(gone >= 0.9 * freed > 25 << 20 for freed, gone in fell), fell
