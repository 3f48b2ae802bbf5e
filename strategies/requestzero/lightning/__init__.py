"""``Trainer(strategy=RequestZeRO(...))``: update windows of requests in Lightning, with ZeRO 1, 2 and 3.

Importing this module registers the strategy's names with Lightning (``request_zero_1``, ``request_zero_2``,
``request_zero_3``, ``request_zero_1_offload``, ``request_zero_2_offload``, ``request_zero_3_offload``).
DeepSpeed is imported when a strategy is built.

What counts updates, and what counts batches:

- ``trainer.global_step``, ``max_steps``, ``log_every_n_steps``, ``ModelCheckpoint(every_n_train_steps=...)`` and the
  hooks around the optimizer count *attempted* updates: one per window. ``strategy.applied_updates`` leaves out those
  skipped for gradients that are not finite (``skipped_updates``); so do schedulers with ``interval="step"``. A window
  in which every ``training_step`` returned ``None`` has nothing to apply or skip: ``global_step`` counts it, neither of
  the two others does.
- ``batch_idx``, ``limit_train_batches``, ``val_check_interval`` and a scheduler's ``frequency`` count batches
  (micro-batches), as in Lightning. A validation that falls inside a window waits for its end.
- ``trainer.estimated_stepping_batches`` is batches divided by ``accumulate_grad_batches``, so it is wrong for loaders
  whose requests have several micro-batches, or which mark windows themselves.

``outputs["loss"]`` in hooks is the loss that ``training_step`` returned; it is divided by nothing.

In manual optimization each batch is one request too, whatever its number of backwards; ``opt.step()`` applies the
window, divided as ``normalization`` says (so do not divide the loss, or use ``"sum"``), and ``opt.zero_grad()``
discards it (after a step there is nothing to discard). See also ``strategy.end_request()``, ``add_weight()`` and
``window_end``.

A window that is left open at an epoch's end is discarded with a warning, before the epoch's last validation, as is one
that is left early (``trainer.should_stop``, ``on_train_batch_start`` returning -1). A checkpoint holds
an open window too: ``trainer.save_checkpoint`` raises RuntimeError only inside a request, ``strategy.request_open``.
"""

from __future__ import annotations

from requestzero.environment.ranges import require_allowed

require_allowed("lightning")  # first: another version may lack what is imported below

from lightning.pytorch.strategies import StrategyRegistry  # noqa: E402

from requestzero.lightning.strategy import RequestZeRO  # noqa: E402

RequestZeRO.register_strategies(StrategyRegistry)

__all__ = ["RequestZeRO"]
