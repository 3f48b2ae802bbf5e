"""Compiled modules (``trainer.fit(torch.compile(module))``), which the Trainer refuses for ``DeepSpeedStrategy``.

HACK: the Trainer asks for the strategy's type before it calls anything of the strategy. The check is replaced in its
module when a strategy gets its Trainer, and passes every other strategy on to Lightning's own function, so that it can
stay there for the rest of the process. Nothing smaller was found: the check reads the strategy's type, which has to
derive from ``DeepSpeedStrategy``, and that the module is compiled, which ``to_uncompiled`` needs to know; and nothing
of the strategy is called before it in fits and evaluations alike. Written for Lightning 2.6.6.
"""

from __future__ import annotations

import functools
from typing import Any

from lightning.pytorch.trainer import trainer

_INSTALLED = "_requestzero_installed"


def let_compiled_modules_in(strategy_class: type) -> None:
    """Keep the Trainer from refusing a compiled module for this strategy; doing it again changes nothing."""
    original = trainer._verify_strategy_supports_compile
    if hasattr(original, _INSTALLED):
        return

    @functools.wraps(original)
    def verify(model: Any, strategy: Any) -> None:
        if not isinstance(strategy, strategy_class):
            original(model, strategy)

    setattr(verify, _INSTALLED, True)
    trainer._verify_strategy_supports_compile = verify  # type: ignore[attr-defined]
