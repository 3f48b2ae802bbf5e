"""Read a DeepSpeed configuration from whatever the user gives: a mapping, an OmegaConf object, a file, encoded text.

The readers of files are loaded where they are needed: importing this module loads the standard library only.
"""

from __future__ import annotations

import base64
import copy
import json
import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from requestzero.config.nested import Config

_PACKAGE_PREFIX = "pkg://"
_COMMENT = " # "


def load_config(config: Any, source: str = "config") -> Config:
    """Return the configuration as a new dictionary that shares nothing with what was given.

    Args:
        config: a mapping, an OmegaConf object, a path to a JSON or YAML file, ``pkg://package/path`` for a file within
            an installed package (text after " # " is a comment), a base64-encoded JSON text (DeepSpeed takes one too),
            or ``None`` (an empty configuration).
        source: how error messages name the argument.

    Raises:
        ValueError: not one of these, a value is missing (``???``), or the file does not hold a mapping.
        FileNotFoundError: the file or the package does not exist, or the path is a directory.
    """
    if config is None:
        return {}
    if is_in_package(config):
        return _load_file(_path_in_package(config, source), source)
    if isinstance(config, (str, os.PathLike)):
        encoded = _decode(config) if isinstance(config, str) and not Path(config).suffix else None
        return _load_file(Path(config), source) if encoded is None else encoded
    if _is_omegaconf(config):
        config = _resolve(config, source)
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    raise ValueError(
        f"{source} is of type {type(config).__name__}: give a dict, an OmegaConf object, or the path of a JSON or "
        "YAML file."
    )


def is_in_package(config: Any) -> bool:
    """Return true for ``pkg://package/path``."""
    return isinstance(config, str) and config.startswith(_PACKAGE_PREFIX)


def _path_in_package(name: str, source: str) -> Path:
    package, _, path = name.removeprefix(_PACKAGE_PREFIX).partition(_COMMENT)[0].partition("/")
    try:
        return Path(str(files(package).joinpath(path)))
    except ModuleNotFoundError:
        raise FileNotFoundError(f"{source} names {name!r}, and there is no package {package!r}.") from None


def _is_omegaconf(config: Any) -> bool:
    return type(config).__module__.split(".")[0] == "omegaconf"


def _resolve(config: Any, source: str) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"{source} cannot be resolved: {error}") from error


def _decode(text: str) -> Config | None:
    """Return the mapping that ``text`` encodes, or ``None`` where it is something else, such as a path."""
    try:
        loaded = json.loads(base64.b64decode(text, altchars=b"-_", validate=True))
    except ValueError:
        return None
    return loaded if isinstance(loaded, dict) else None


def _load_file(path: Path, source: str) -> Config:
    if not path.is_file():
        found = "is no file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"{source} names the file {str(path)!r}, which {found}.")
    try:
        loaded = _load_json(path) if path.suffix == ".json" else _load_yaml(path, source)
    except ValueError as error:
        raise ValueError(f"{source} names the file {str(path)!r}, which cannot be read: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(
            f"{source} names the file {str(path)!r}, which holds {type(loaded).__name__} instead of a mapping."
        )
    return loaded


def _load_json(path: Path) -> Any:
    """Read JSON with comments, as DeepSpeed does; not by the YAML reader, for which JSON's tabs are errors."""
    import hjson

    return hjson.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> Config:
    keys = [key for key, _ in pairs]
    doubled = sorted({key for key in keys if keys.count(key) > 1})
    if doubled:
        raise ValueError(f"the key {doubled[0]!r} stands twice in one object")
    return dict(pairs)


def _load_yaml(path: Path, source: str) -> Any:
    """Read YAML with OmegaConf, which reads 1e-5 as a number and refuses doubled keys, unlike a bare YAML reader."""
    import yaml
    from omegaconf import OmegaConf

    try:
        return _resolve(OmegaConf.load(path), source)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except OSError as error:
        raise ValueError(f"it does not hold a mapping ({error})") from error
