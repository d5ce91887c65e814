"""Stands in for SGLang's compiled kernels, which have no build for a CPU.

Promises: it imports, under any submodule name, every attribute exists, and none can be called. So SGLang finds
no kernel of its own (`torch.ops.sgl_kernel` stays empty, also on processors with AMX) and takes its paths in plain
PyTorch; a path that needs a kernel fails with the kernel's name.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import NoReturn

__path__: list[str] = []  # a package, so that submodules can be imported


class Absent:
    """A kernel, or a table of kernels, that isn't there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"{self._name}: this environment has no compiled SGLang kernels")


class Submodule(types.ModuleType):
    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


class Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("sgl_kernel."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Submodule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def __getattr__(name: str) -> Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(f"sgl_kernel.{name}")


sys.meta_path.append(Submodules())
