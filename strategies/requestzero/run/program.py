"""Run a program in the place of the one that runs, as ``python program.py`` and ``python -m program`` do.

``runpy`` has a module of its own for the program, which is ``__main__`` only until the program's last line: what its
threads and exit handlers pickle after that is not found. Here the program's module is ``__main__`` to the end, and has
what ``python`` gives it, by which spawned processes find the program.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any


def run_script(path: str, arguments: list[str]) -> None:
    """Run a file, or the ``__main__`` of a folder or archive.

    Raises:
        SystemExit: there is no such file; and whatever the program raises.
    """
    sys.argv[:] = [path, *arguments]
    finder = None if Path(path).is_file() and not _is_archive(path) else pkgutil.get_importer(os.path.abspath(path))
    # The finder of archives is no subclass of importlib's.
    spec = finder.find_spec("__main__") if finder is not None and hasattr(finder, "find_spec") else None
    if spec is not None:
        _put_first(os.path.abspath(path))
        _execute(_code_of(spec), _main_of_module(spec))
        return
    try:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        told = f"can't open file {os.path.abspath(path)!r}: [Errno {error.errno}] {error.strerror}"
        print(f"{sys.executable}: {told}", file=sys.stderr)
        sys.exit(2)
    _put_first(os.path.dirname(os.path.realpath(path)))
    full = os.path.abspath(path)
    namespace = {"__file__": full, "__loader__": SourceFileLoader("__main__", full), "__package__": None}
    _execute((source, full), {**namespace, "__spec__": None, "__cached__": None})


def run_module(name: str, arguments: list[str]) -> None:
    """Run a module, or the ``__main__`` of a package.

    Raises:
        SystemExit: there is no such module; and whatever the program raises.
    """
    sys.argv[:] = ["-m", *arguments]
    spec = _spec_of(name)
    sys.argv[0] = str(spec.origin)
    _execute(_code_of(spec), _main_of_module(spec))


def _spec_of(name: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        sys.exit(
            f"{sys.executable}: Error while finding module specification for {name!r} ({type(error).__name__}: {error})"
        )
    if spec is None or spec.loader is None:
        sys.exit(f"{sys.executable}: No module named {name}")
    return spec


def _code_of(spec: ModuleSpec) -> CodeType:
    loader: Any = spec.loader
    return loader.get_code(spec.name)


def _main_of_module(spec: ModuleSpec) -> dict[str, Any]:
    return {
        "__file__": spec.origin,
        "__cached__": spec.cached,
        "__loader__": spec.loader,
        "__package__": spec.parent,
        "__spec__": spec,
    }


def _is_archive(path: str) -> bool:
    return pkgutil.get_importer(path) is not None


def _put_first(folder: str) -> None:
    """Put the program's folder where ``python -m requestzero.run`` has the current one."""
    if not getattr(sys.flags, "safe_path", False):  # since Python 3.11
        sys.path[0] = folder


def _execute(code: CodeType | tuple[bytes, str], namespace: dict[str, Any]) -> None:
    """Run the code, compiled or as source and file name, in an emptied ``__main__``."""
    main = vars(sys.modules["__main__"])
    main.clear()
    main.update({"__name__": "__main__", "__doc__": None, "__builtins__": builtins, "__annotations__": {}, **namespace})
    try:
        exec(code if isinstance(code, CodeType) else compile(*code, "exec", dont_inherit=True), main)
    except BaseException as error:
        program = error.__traceback__.tb_next if error.__traceback__ is not None else None
        _show_without_ours(error, program, with_runpy=namespace["__spec__"] is not None)
        raise


def _show_without_ours(error: BaseException, program: TracebackType | None, with_runpy: bool) -> None:
    """Let the error be shown without our own calls.

    Args:
        error: what the program has raised.
        program: its traceback from the program's first line on.
        with_runpy: with the calls of ``runpy`` before that, which a module has as under ``python -m``.
    """
    shows = sys.excepthook

    def excepthook(kind: type[BaseException], value: BaseException, given: TracebackType | None) -> None:
        if value is error:
            given = _after_runpy(given, program) if with_runpy else program
            value = value.with_traceback(given)
        shows(kind, value, given)

    sys.excepthook = excepthook


def _after_runpy(whole: TracebackType | None, program: TracebackType | None) -> TracebackType | None:
    if whole is None or "runpy" not in whole.tb_frame.f_code.co_filename:
        return program
    return TracebackType(_after_runpy(whole.tb_next, program), whole.tb_frame, whole.tb_lasti, whole.tb_lineno)
