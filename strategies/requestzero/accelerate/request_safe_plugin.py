"""The interface by which an Accelerator knows a plugin whose engine is request-safe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from requestzero.accelerate.plan import Plan
from requestzero.config.engine_options import EngineOptions, take_engine_options
from requestzero.config.merge import overlay
from requestzero.config.nested import Config
from requestzero.config.options import RequestZeROSettings


class RequestSafePlugin:
    """Base class of the plugin: what an Accelerator reads of it."""

    plan: Plan
    """All places of the configuration, merged."""
    deepspeed_config: Config
    """The DeepSpeed config, without our own keys, since others give it to ``deepspeed.initialize``."""
    is_train_batch_min: bool
    """As in ``DeepSpeedPlugin``."""
    adopted_steps: int | None = None
    """Requests per update that an Accelerator has taken over from the plugin."""
    builds_engine = False
    """True while a request-safe engine is built from the plugin."""

    @property
    def settings(self) -> RequestZeROSettings:
        """The options as all places together have decided them."""
        return self.plan.settings

    @property
    def engine_options(self) -> EngineOptions:
        """Options of the engine beside the DeepSpeed config; complete once the precision is known."""
        return take_engine_options(overlay(self.deepspeed_config, self.plan.own))

    def take_over_changes(self) -> None:
        """Take over what was set in the public config and in attributes since the plugin was built.

        Raises:
            ValueError: it is not allowed, does not apply, or two places say different values.
        """
        raise NotImplementedError

    def again(self, hf_ds_config: Any) -> RequestSafePlugin:
        """Return a new plugin with the same arguments but those that another DeepSpeed config says."""
        raise NotImplementedError

    def note_state(self) -> None:
        """Note the public config and attributes as they are now, which are no changes by the program."""
        raise NotImplementedError

    @contextmanager
    def building_engine(self) -> Iterator[None]:
        """Set :attr:`builds_engine` while the block runs."""
        self.builds_engine = True
        try:
            yield
        finally:
            self.builds_engine = False


def any_request_safe(plugins: Any) -> bool:
    """Return True if ``plugins``, in any of the forms that Accelerate accepts, are or contain one of ours."""
    given = plugins.values() if isinstance(plugins, Mapping) else [plugins]
    return any(isinstance(plugin, RequestSafePlugin) for plugin in given)
