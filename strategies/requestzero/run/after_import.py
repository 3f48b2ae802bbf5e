"""Act when a module has been imported, whoever imports it, and not before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class AfterImport(MetaPathFinder):
    """Calls an action with a module once its code has run.

    A program may set environment variables before its imports, so that none of them may come earlier.

    Args:
        actions: what to call, by the module's full name.
    """

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._actions = actions

    def install(self) -> None:
        """Watch imports from now on; what is imported already is acted on at once."""
        for name in [*self._actions]:
            if name in sys.modules:
                self._actions.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders give, with a loader that acts afterwards."""
        if fullname not in self._actions:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._act_after(spec.loader, fullname)
        return spec

    def _act_after(self, loader: Any, name: str) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # of the instance: the loader is what it was
            action = self._actions.pop(name)  # not earlier: a spec may be looked up without an import
            execute(module)
            action(module)

        loader.exec_module = exec_module
