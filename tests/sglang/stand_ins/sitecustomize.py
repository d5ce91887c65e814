"""What a PyTorch without CUDA lacks and SGLang's imports expect, put in place as it is first asked for.

Python imports this module at its start where it lies in site-packages or on PYTHONPATH; that costs nothing until
torchvision is imported. PyPI's torchvision has a compiled part that doesn't load beside a CPU build of PyTorch; its
Python part only needs the schemas of two operators to exist. SGLang imports torchvision, but for text models it
calls nothing of it.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any

_kept: list[Any] = []  # a library's schemas live as long as it does


class BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """Finds nothing itself: defines the schemas, then the real finders go on."""
        if fullname != "torchvision.extension":
            return
        import torch

        sys.meta_path.remove(self)
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)


sys.meta_path.insert(0, BeforeTorchvision())
