"""Check the command line as a whole before Hydra starts anything.

Hydra stops at the first wrong override, names no near key, and lets ``+key=value`` add to a typed
configuration. Here every override is looked at by itself, then the configuration that the good ones make.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from requestzero.config.suggestion import closest
from requestzero.recipes.config_check import config_problems
from requestzero.recipes.config_schema import register_schema
from requestzero.recipes.devices import choose_devices

CONFIGS = "pkg://requestzero.configs"

# Names of the kinds of values, in messages.
_KINDS = {
    "IntegerNode": "a whole number",
    "FloatNode": "a number",
    "BooleanNode": "true or false",
    "StringNode": "text",
    "DictConfig": "a section: set its keys one by one",
    "ListConfig": "a list",
}


def command_problems(arguments: Sequence[str], config_name: str) -> list[str]:
    """Return all problems of a command line; empty if it can be run.

    Args:
        arguments: of the program, after its name: overrides, and Hydra's own flags.
        config_name: The recipe's configuration, where the flags do not name another.
    """
    # Hydra has no public parser of its own flags.
    from hydra._internal.utils import get_args_parser
    from hydra.errors import HydraException

    args = get_args_parser().parse_args(list(arguments))
    register_schema()
    if args.help or args.hydra_help or args.info or args.shell_completion or args.experimental_rerun:
        return []
    if args.config_dir and not os.path.isdir(args.config_dir):
        return [f"--config-dir {args.config_dir} is not allowed: use a directory that exists."]
    try:
        with _hydra(args.config_dir):
            return _Command(args, config_name).problems()
    except (HydraException, OmegaConfBaseException) as error:
        return [_reason(error)]


@contextmanager
def _hydra(config_dir: str | None) -> Iterator[None]:
    """Set Hydra up as ``hydra.main`` does: the public ``initialize`` knows no second directory."""
    from hydra import version
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path
    from hydra.core.global_hydra import GlobalHydra

    version.setbase("1.3")
    search_path = create_config_search_path(CONFIGS)
    if config_dir:
        search_path.prepend("command-line", f"file://{os.path.abspath(config_dir)}")
    Hydra.create_main_hydra2("override_check", search_path)
    try:
        yield
    finally:
        GlobalHydra.instance().clear()


class _Command:
    """A parsed command line, and the configuration that it starts from."""

    def __init__(self, args: Any, config_name: str) -> None:
        self.multirun = args.multirun or "hydra.mode=MULTIRUN" in args.overrides
        self.overrides: list[str] = args.overrides
        self.config_name = args.config_name or config_name
        self.base = self._compose([])
        self.keys = sorted(_keys(self.base))

    def problems(self) -> list[str]:
        found: list[str] = []
        good: list[list[str]] = []
        for text in self.overrides:
            problems, values = self._override(text)
            found += problems
            if not problems:
                good.append(values)
        for job in itertools.product(*good):
            found += self._job(list(job))
        return list(dict.fromkeys(found))

    def _compose(self, overrides: list[str]) -> DictConfig:
        from hydra import compose

        return compose(self.config_name, overrides=overrides, return_hydra_config=True)

    def _job(self, overrides: list[str]) -> list[str]:
        """Return the problems of one run's configuration as a whole."""
        from hydra.errors import HydraException

        try:
            cfg = self._compose(overrides)
        except (HydraException, OmegaConfBaseException) as error:
            return [_reason(error)]
        return config_problems(without_hydra(cfg)) + list(self._sweep_problems(cfg))

    def _sweep_problems(self, cfg: DictConfig) -> Iterator[str]:
        ranks = choose_devices(cfg.trainer).world_size
        if ranks > 1 and self.multirun:
            yield (
                f"--multirun is not allowed with {ranks} ranks, each of which would repeat the whole sweep: "
                "use trainer.devices=1, or start one run for each value."
            )

    def _override(self, text: str) -> tuple[list[str], list[str]]:
        """Return the problems of one override, and the overrides that it stands for: several if it is a sweep."""
        from hydra.core.global_hydra import GlobalHydra
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

        try:
            override = OverridesParser.create(GlobalHydra.instance().config_loader()).parse_override(text)
        except HydraException:
            return [f"{text!r} cannot be read: use key=value, with quotes around special characters."], []
        if override.is_delete():
            return [f"{text!r} is not allowed: no key can be removed. Use key=value."], []
        if override.is_sweep_override():
            if not self.multirun:
                return [f"{text!r} is a sweep: use one value, or --multirun on one rank."], []
            texts = [f"{text.split('=', 1)[0]}={value}" for value in override.sweep_string_iterator()]
            return [problem for single in texts for problem in self._override(single)[0]], texts
        return list(self._single(override, text)), [text]

    def _single(self, override: Any, text: str) -> Iterator[str]:
        key: str = override.key_or_group
        value: Any = override.value()
        options = self._options(key)
        if options:
            if value not in options:
                nearest = _nearest(str(value), options)
                yield f"{key}={_shown(value)} is not allowed: use one of {', '.join(options)}.{nearest}"
        elif key not in self.keys:
            yield f"{text!r} is not allowed: there is no key {key!r}.{_nearest(key, self.keys)}"
        elif override.is_add() and not override.is_force_add():
            yield f"{text!r} is not allowed: {key!r} exists and cannot be added. Leave out the +."
        else:
            yield from self._value(key, value)

    def _options(self, group: str) -> list[str]:
        from hydra.core.global_hydra import GlobalHydra

        return GlobalHydra.instance().config_loader().get_group_options(group) if "." not in group else []

    def _value(self, key: str, value: Any) -> Iterator[str]:
        try:
            OmegaConf.update(self.base.copy(), key, value)
        except OmegaConfBaseException:
            yield f"{key}={_shown(value)} is not allowed: use {_kind(self.base, key)}."


def without_hydra(cfg: DictConfig) -> DictConfig:
    """Return the recipe's own part of a configuration composed with Hydra's."""
    own = cfg.copy()
    OmegaConf.set_readonly(own, False)
    OmegaConf.set_struct(own, False)
    own.pop("hydra", None)
    return own


def _keys(cfg: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yield all keys that exist, of sections and of values."""
    for name in map(str, cfg):
        yield f"{prefix}{name}"
        node = cfg._get_node(name)
        if isinstance(node, DictConfig) and not node._is_none():
            yield from _keys(node, f"{prefix}{name}.")


def _kind(cfg: DictConfig, key: str) -> str:
    section, _, name = key.rpartition(".")
    node: Any = (OmegaConf.select(cfg, section) if section else cfg)._get_node(name)
    kind = _KINDS.get(type(node).__name__, type(node).__name__)
    return f"{kind}, or null" if node._is_optional() and not isinstance(node, DictConfig) else kind


def _nearest(given: str, known: Sequence[str]) -> str:
    """Return a hint at the known name that is most like ``given``, for the end of a message."""
    found = closest(given, known)
    return "" if found is None else f" Nearest: {found}."


def _shown(value: Any) -> str:
    """Return a value as it is written on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _reason(error: BaseException) -> str:
    """Return the message of an error and of what caused it, on one line."""
    texts = [str(error)] if error.__cause__ is None else [str(error), str(error.__cause__)]
    return " ".join(" ".join(texts).split())
