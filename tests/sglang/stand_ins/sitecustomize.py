"""Two things that a PyTorch without CUDA lacks and SGLang expects, put in place as they are first asked for.

Python imports this module at its start where its folder is on PYTHONPATH. It costs nothing until torch or
torchvision is imported.

- torchvision's compiled part doesn't load beside a CPU build of PyTorch; its Python part only needs the schema of
  `torchvision::nms` to exist. SGLang imports torchvision but calls nothing of it for text models.
- SGLang pins host memory with `torch.cuda.cudart().cudaHostRegister`; without a GPU there is nothing to pin.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any

_kept: list[Any] = []  # a library's schemas live as long as it does


def _before_torchvision() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


class _Cudart:
    cudaHostRegisterPortable = 1

    @staticmethod
    def cudaHostRegister(*_: object) -> int:
        return 0

    @staticmethod
    def cudaHostUnregister(*_: object) -> int:
        return 0


def _after_torch_cuda(module: Any) -> None:
    if not module.is_available():
        module.cudart = _Cudart


class _Hooks(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name == "torchvision":
            sys.meta_path.remove(self)
            _before_torchvision()
        return None


sys.meta_path.insert(0, _Hooks())
