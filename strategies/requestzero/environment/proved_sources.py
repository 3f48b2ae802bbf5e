"""The sources of DeepSpeed that this package was proved with, and how an installed one differs from them.

``proved_deepspeed.json`` has, for every definition of DeepSpeed that is overridden or relied on, the fingerprints of
the variants that were proved, and the releases that have each. An installed DeepSpeed whose definitions are all among
them is as good as these releases, whatever its number. ``tests/matrix/record.py`` writes the file.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

from requestzero.environment.definitions import Source
from requestzero.environment.excerpts import Excerpts

RECORD = Path(__file__).with_name("proved_deepspeed.json")
STAGE_3 = (
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.partition_parameters",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.partitioned_param_coordinator",
)
"""Modules that only ZeRO 3 relies on."""
ABSENT = "absent"
"""In the place of a fingerprint: the definition does not exist, and is not needed."""


@dataclass(frozen=True)
class ProvedSources:
    """The record."""

    versions: list[str]
    """Releases that were proved, oldest first."""
    modules: dict[str, list[str]]
    """Hashes of whole files in these releases, by module: equal files need not be read."""
    definitions: dict[str, dict[str, list[str]]]
    """Releases by fingerprint, by definition: ``"module:Class.method"``. A property's accessors are parts of it."""


@cache
def proved_sources() -> ProvedSources:
    """Return the record of this installation."""
    return ProvedSources(**json.loads(RECORD.read_text(encoding="utf-8")))


@cache
def differences(package: Path, stage_3: bool = False) -> tuple[str, ...]:
    """Return the definitions of the DeepSpeed in the folder ``package`` that are none of their proved variants.

    Whole files are compared first, which takes a few milliseconds, then, of other files, definitions that are cut out
    by indentation. Only files in which one of these is not a proved variant are parsed.

    Args:
        package: folder of the package.
        stage_3: of those that only ZeRO 3 relies on; else of the others.
    """
    proved = proved_sources()
    modules = {name: hashes for name, hashes in proved.modules.items() if (name in STAGE_3) == stage_3}
    changed = {name for name, hashes in modules.items() if file_hash(path_of(package, name)) not in hashes}
    suspect = [name for name in proved.definitions if _module(name) in changed]
    with _without_collections():
        suspect = [*_not_proved_as_cut_out(package, suspect)]
        found = fingerprints(package, suspect)
    return tuple(name for name in suspect if found[name] not in proved.definitions[name])


def _not_proved_as_cut_out(package: Path, names: list[str]) -> Iterator[str]:
    definitions = proved_sources().definitions
    for text, inside in _by_module(package, names):
        excerpts = Excerpts(text)
        yield from (name for name in inside if _cut_out(excerpts, _qualname(name)) not in definitions[name])


def _cut_out(excerpts: Excerpts, qualname: str) -> str | None:
    """Return the fingerprint of a definition, ``None`` where only the whole module can tell."""
    if excerpts.is_nowhere(qualname):
        return ABSENT
    try:
        found = _fingerprint(Source(excerpts.of(qualname)), qualname)
    except SyntaxError:  # it was cut in the middle of a string
        return None
    return None if found == ABSENT else found


@contextmanager
def _without_collections() -> Iterator[None]:
    """Collect no garbage in the block: each collection would visit the syntax trees, which are large, anew."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def fingerprints(package: Path, names: list[str]) -> Mapping[str, str]:
    """Return the fingerprint of each definition in the DeepSpeed in the folder ``package``, or :data:`ABSENT`."""
    return dict(_fingerprints(package, names))


def _fingerprints(package: Path, names: list[str]) -> Iterator[tuple[str, str]]:
    for text, inside in _by_module(package, names):
        source = Source(text)
        yield from ((name, _fingerprint(source, _qualname(name))) for name in inside)


def _by_module(package: Path, names: list[str]) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield the text of each module, empty without one, and those of the names that are in it."""
    for module, inside in groupby(sorted(names), key=_module):
        path = path_of(package, module)
        yield path.read_text(encoding="utf-8") if path.exists() else "", inside


def _module(name: str) -> str:
    return name.partition(":")[0]


def _qualname(name: str) -> str:
    return name.partition(":")[2]


def _fingerprint(source: Source, qualname: str) -> str:
    return "+".join(each.fingerprint for each in source.find(qualname).values()) or ABSENT


def path_of(package: Path, module: str) -> Path:
    """Return the file of a module of the package in the folder ``package``."""
    inside = package.joinpath(*module.split(".")[1:])
    return inside / "__init__.py" if inside.is_dir() else inside.with_suffix(".py")


def file_hash(path: Path) -> str:
    """Return the hash of a file, ``ABSENT`` without one."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ABSENT
