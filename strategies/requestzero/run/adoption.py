"""What becomes request-safe in an unchanged program: every ``DeepSpeedPlugin``, and ``deepspeed.initialize``.

HACK: neither Accelerate nor DeepSpeed asks anybody which class to use. The constructor of ``DeepSpeedPlugin`` ends with
a method that gives the object another class, so that whoever builds one, or a subclass, gets a request-safe one and
``isinstance`` holds; the class itself and its fields stay. Written for Accelerate 1.15 and DeepSpeed 0.19.8.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from requestzero.config.files import load_config
from requestzero.config.nested import look_up, put
from requestzero.config.supported import check_supported
from requestzero.config.translation import AUTO
from requestzero.run.after_import import AfterImport

_STAGE = "zero_optimization.stage"
_DEVICES = ("offload_optimizer_device", "offload_param_device")


class Adoption:
    """Makes what the program builds request-safe, and tells what stays DeepSpeed's own.

    Args:
        initialize: also where the program calls ``deepspeed.initialize`` itself.
    """

    def __init__(self, initialize: bool = True) -> None:
        self._initialize = initialize
        self._count = 0
        self._told: set[str] = set()

    def install(self) -> None:
        """Act on Accelerate and DeepSpeed as soon as the program imports them."""
        actions: dict[str, Callable[[ModuleType], None]] = {"accelerate": self._adopt_accelerate}
        if self._initialize:
            actions["deepspeed"] = self._adopt_deepspeed
        AfterImport(actions).install()

    def report(self) -> None:
        """Say so if nothing was adopted."""
        if self._count == 0 and not self._told:
            self._tell(
                "nothing became request-safe: the program has built no DeepSpeedPlugin and has not called "
                "deepspeed.initialize. Is DeepSpeed turned on (accelerate launch --config_file ..., "
                "TrainingArguments(deepspeed=...))?"
            )

    def _adopt_accelerate(self, accelerate: ModuleType) -> None:
        from requestzero.run.cpu_ranks import join_on_cpu

        plugin, accelerator = accelerate.DeepSpeedPlugin, accelerate.Accelerator
        join_on_cpu(accelerate.PartialState)
        post_init, init = plugin.__post_init__, accelerator.__init__

        @functools.wraps(post_init)
        def __post_init__(self_: Any) -> None:
            self._build_plugin(self_, post_init)

        @functools.wraps(init)
        def __init__(self_: Any, *args: Any, **kwargs: Any) -> None:
            init(self_, *args, **kwargs)
            if self._count:
                from requestzero.accelerate.patch import become_if_ours

                become_if_ours(self_)

        plugin.__post_init__, accelerator.__init__ = __post_init__, __init__

    def _build_plugin(self, plugin: Any, post_init: Callable[[Any], None]) -> None:
        from requestzero.accelerate.plugin import RequestZeROPlugin

        if isinstance(plugin, RequestZeROPlugin):
            post_init(plugin)
            self._count += 1
            return
        config = _config_of(plugin)
        if not self._is_adopted(config):
            post_init(plugin)
            return
        cls = type(plugin)
        stock = cls.__module__.startswith("accelerate.")
        plugin.__class__ = RequestZeROPlugin if stock else type(cls.__name__, (cls, RequestZeROPlugin), {})
        RequestZeROPlugin.__post_init__(plugin)

    def _adopt_deepspeed(self, deepspeed: ModuleType) -> None:
        original = deepspeed.initialize

        @functools.wraps(original)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            from requestzero.zero.patch import is_replaced

            given = inspect.signature(original).bind(*args, **kwargs).arguments
            if is_replaced(deepspeed, "DeepSpeedEngine") or not self._adopts_call(given):
                return original(*args, **kwargs)
            import requestzero

            self._count += 1
            built = requestzero.initialize(*args, **kwargs)
            _serve_clipping(built[0])
            return built

        deepspeed.initialize = initialize  # type: ignore[attr-defined]

    def _adopts_call(self, given: Mapping[str, Any]) -> bool:
        try:
            config = _config_given(given)
        except (ValueError, OSError) as error:
            self._tell(f"an engine stays DeepSpeed's own. {error}")
            return False
        return self._is_adopted(config, given)

    def _is_adopted(self, config: Mapping[str, Any], given: Mapping[str, Any] | None = None) -> bool:
        if given is not None and given.get("optimizer") is None and "optimizer" not in config:
            return False  # nothing is trained, as with the reference model of TRL
        reason = reason_to_stay_stock(config, (given or {}).get("model"))
        if reason is not None:
            self._tell(f"an engine stays DeepSpeed's own. {reason}")
        return reason is None

    def _tell(self, text: str) -> None:
        """Print the text once, on one rank."""
        if text not in self._told and os.environ.get("RANK", "0") == "0":
            print(f"requestzero.run: {text}", file=sys.stderr, flush=True)
        self._told.add(text)


def _serve_clipping(engine: Any) -> None:
    """Let PyTorch's functions clip: the program calls ``engine.step()``, which divides by nothing."""
    from requestzero.zero.clipping import LoopClipping

    def prepare_step(call: str) -> dict[str, float]:
        counts = engine.managed_gradient_accumulation()  # else every step() is at a boundary
        if engine.inside_no_sync_ctxt or (counts and not engine.is_gradient_accumulation_boundary()):
            raise RuntimeError(
                f"{call} after a micro-batch that is not the last of gradient_accumulation_steps: the step clips the "
                "gradient of all of them. Set gradient_clipping in the DeepSpeed config."
            )
        engine.end_request()
        return {}

    engine.loop_clipping = LoopClipping(engine, prepare_step, float(engine.optimizer.clip_grad) or None)


def reason_to_stay_stock(config: Mapping[str, Any], model: Any = None) -> str | None:
    """Return the reason why an engine of this config is not made request-safe, or ``None`` if it is.

    Args:
        config: a DeepSpeed config with its stage.
        model: the module to train, where it is known.
    """
    try:
        check_supported(config, model)
    except ValueError as error:
        return str(error)
    return None


def _config_of(plugin: Any) -> dict[str, Any]:
    """Return the DeepSpeed config of a plugin that is being built, with what Accelerate would add to it."""
    from requestzero.accelerate.launch import FILE, NONE, VARIABLES
    from requestzero.accelerate.options import load_deepspeed_config

    given = plugin.hf_ds_config if plugin.hf_ds_config is not None else os.environ.get(FILE, NONE)
    config = load_deepspeed_config(given)
    if look_up(config, _STAGE, AUTO) == AUTO:
        stage = plugin.zero_stage
        if stage is None:
            stage = int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2))
        config["zero_optimization"] = {**config.get("zero_optimization", {}), "stage": stage}
    for name, variable in VARIABLES.items():
        if variable.option in _DEVICES and look_up(config, variable.key, AUTO) == AUTO:
            device = getattr(plugin, variable.option)
            put(config, variable.key, os.environ.get(name, NONE) if device is None else device)
    return config


def _config_given(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config among the arguments of ``deepspeed.initialize``.

    Raises:
        ValueError: there is not one of them, or it is not in a place that is read, or it cannot be read.
        FileNotFoundError: it names no file.
    """
    args = given.get("args")
    if getattr(args, "deepscale_config", None) is not None:
        raise ValueError("Its config is in args.deepscale_config, which is not read: call it args.deepspeed_config.")
    places = {
        "config": given.get("config"),
        "config_params": given.get("config_params"),
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    found = {name: place for name, place in places.items() if place is not None}
    if len(found) != 1:
        where = "in " + " and in ".join(found) if found else "nowhere"
        raise ValueError(f"Its config is given {where}: give one, as deepspeed.initialize(config=...).")
    ((name, place),) = found.items()
    return load_config(place, name)
