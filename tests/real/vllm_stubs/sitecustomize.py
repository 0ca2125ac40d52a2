"""What vLLM 0.32 with NIXL needs on a machine with few cores. Python imports this module at its start, in each process.

No installed file is changed: a module is mended right after it was imported. NIXL moves KV in a thread that never
sleeps, one for each rank: with four ranks on two cores nothing else gets its turn.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

_DELAY_US = 1000
_MODULE = "nixl_cu12._api"


def _thread_that_sleeps(module: Any) -> None:
    """Its agent takes the delay from the configuration; Python's side always writes 0 there."""
    make = module.nixlBind.nixlAgent

    def make_patient(name: str, config: Any) -> Any:
        config.pthrDelay = _DELAY_US
        return make(name, config)

    module.nixlBind = _Patient(module.nixlBind, make_patient)


class _Patient:
    """NIXL's bindings with another way to make an agent."""

    def __init__(self, bindings: Any, make: Any) -> None:
        self._bindings = bindings
        self.nixlAgent = make

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)


class _Mending(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        _thread_that_sleeps(module)


class _Mender(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name == _MODULE else None
        if spec and spec.loader:
            spec.loader = _Mending(spec.loader)
        return spec


sys.meta_path.insert(0, _Mender())
