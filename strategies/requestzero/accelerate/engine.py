"""The engine as an ``Accelerator`` drives it: backwards, requests and steps.

Written for Accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.state import GradientState
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper
from typing_extensions import override

from requestzero.accelerate.window_tally import WindowTally
from requestzero.config.rules import UNEQUAL_MEANS
from requestzero.zero.clipping import LoopClipping
from requestzero.zero.engine import RequestZeROEngine
from requestzero.zero.metrics import logged_metrics

DROP_AFTER_DIVISION = (
    "overflow.on_overflow='drop_request' is not possible where the losses are divided before the backward, as "
    "Transformers' Trainer does: a request that is dropped could not be left out of what they were divided by. Use "
    "'skip' or 'raise', or a loop with accelerator.backward(loss)."
)


class RequestZeROEngineWrapper(DeepSpeedEngineWrapper):
    """Stands where Accelerate keeps its ``DeepSpeedEngineWrapper``.

    A backward is a request of its own unless it runs within :class:`~requestzero.accelerate.requests.Requests`. It
    never steps, where Accelerate's does at a window's end.

    At stage 3 such a request is announced before its forward, which gathers weights.

    Args:
        engine: the request-safe engine.
        normalization: ``"mean"``, ``"sum"`` or ``"token"``.
        state: Accelerate's: the current ``gradient_accumulation_steps``, and whether a window ends.
        clipping: the norm that the config clips at; ``None`` where it does not say.
    """

    engine: RequestZeROEngine

    def __init__(
        self, engine: RequestZeROEngine, normalization: str, state: GradientState, clipping: float | None
    ) -> None:
        super().__init__(engine)
        if normalization == "mean" and engine.options.rank_dependent_micro_batches:
            raise ValueError(f"rank_dependent_micro_batches=True and normalization='mean' disagree: {UNEQUAL_MEANS}")
        self.clipping = engine.loop_clipping = LoopClipping(engine, self._prepare_step, clipping)
        """What ``accelerator.clip_grad_norm_`` and PyTorch's functions do."""
        self.request_end: bool | None = None
        """True if the next backward is marked as its request's last, ``None`` if every backward is a request."""
        self.window_end = False
        """True if a step is known to follow the next backward."""
        self.micro_batch_weight: Any = None
        """Weight of the next backward, where a loader has given it."""
        self.backwards = 0
        """Since ``prepare``."""
        self.applied_rates: list[float] | None = None
        """Learning rates of the last update by parameter group, until a scheduler of the config is stepped."""
        self._normalization = normalization
        self._state = state
        self._announced = False
        self._tally = WindowTally(engine.update_window)
        self._unlogged = False
        if engine.zero_optimization_partition_weights():
            engine.register_forward_pre_hook(self._before_forward)

    @property
    def tally(self) -> WindowTally:
        """Tally of the open window, or of the next one."""
        if self._tally.window is not self.engine.update_window:
            self._tally = self._tally.of_next(self.engine.update_window)
        return self._tally

    def resume(self, tally: dict[str, Any] | None) -> None:
        """Go on with the loop's counts of a checkpoint, whose window the engine has loaded.

        Args:
            tally: ``WindowTally.state``; ``None`` where the checkpoint has none.
        """
        self._tally = WindowTally(self.engine.update_window, **(tally or {}))

    @contextmanager
    def marking(self) -> Iterator[None]:
        """Let :attr:`request_end` mark the backwards in the block.

        Raises:
            RuntimeError: they are being marked already.
        """
        if self.request_end is not None:
            raise RuntimeError(
                "The ends of requests are being marked already: finish one request() block or one pass over "
                "micro_batches(...) before the next."
            )
        self.request_end = False
        try:
            yield
        finally:
            self.request_end = self.micro_batch_weight = None
            self.window_end = False

    @override
    def backward(
        self,
        loss: torch.Tensor,
        sync_gradients: bool = True,
        weight: float | torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """Run the engine's backward, and never its step. Collective at stage 2, and at stage 1 where a request ends.

        Args:
            loss: a scalar.
            sync_gradients: true if Accelerate ends the window here, on which ranks agree.
            weight: of this micro-batch, for ``normalization="token"``, where its loader gives none; see
                ``engine.add_weight``.
            **kwargs: for ``engine.backward``; ``scale_wrt_gas=False`` says, as in DeepSpeed, that the losses of the
                window were divided already: the step divides no more.

        Raises:
            ValueError: some losses of the window were divided and others not, or they were and requests may be dropped;
                with ``"token"`` losses were divided, or the micro-batch has no weight or two.
        """
        self._note(divided=not kwargs.pop("scale_wrt_gas", True))
        if self._normalization == "token":
            weight = self._take_weight(weight)
        self.backwards += 1
        self._announce(window_end=sync_gradients)
        self._announced = False
        self.engine.set_gradient_accumulation_boundary(self.request_end is not False, window_end=self.window_end)
        self.engine.backward(loss, scale_wrt_gas=False, weight=weight, **kwargs)

    def _take_weight(self, given: Any) -> Any:
        """Return the weight of the next backward, from the call or the loader, and forget it."""
        loaders, self.micro_batch_weight = self.micro_batch_weight, None
        if given is not None and loaders is not None:
            raise ValueError(
                f"accelerator.backward(weight={given!r}) for a MicroBatch whose loader gives the weight {loaders!r}: "
                "leave one of them out."
            )
        if given is None and loaders is None:
            raise ValueError(
                "accelerator.backward(loss) has no weight, by which normalization='token' divides: give "
                "accelerator.backward(loss, weight=number of trained tokens) with the sum of the losses, or use a "
                "loader of MicroBatch(inputs, weight=...), one backward for each."
            )
        return loaders if given is None else given

    def _announce(self, window_end: bool) -> None:
        """Announce the request, where every backward is one, unless its forward has done so."""
        engine = self.engine
        own = self.request_end is None and not engine.inside_no_sync_ctxt and not engine.update_window.request_open
        if own and not self._announced:
            engine.begin_request(micro_batches=1, window_end=window_end)
            self._announced = True

    def _before_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._announce(window_end=self._state.sync_gradients)

    def _note(self, divided: bool) -> None:
        if divided and self.engine.options.overflow.on_overflow == "drop_request":
            raise ValueError(f"accelerator.backward(scale_wrt_gas=False): {DROP_AFTER_DIVISION}")
        if divided and self._normalization == "token":
            raise ValueError(
                "accelerator.backward(scale_wrt_gas=False) says that the loss was divided already, as Transformers' "
                "Trainer does, which takes the mean over tokens itself (num_items_in_batch): normalization='token' "
                "would divide once more. Leave normalization out."
            )
        self.tally.note(divided, marked=self.request_end is not None)

    def divisor(self) -> float:
        """Return the divisor of the open window's sum; not for ``normalization="token"``."""
        return 1 if self._normalization == "sum" else self.tally.divisor(self._state.num_steps)

    def step(self) -> None:
        """Apply the open window, divided. Collective; nothing without a backward since the last step.

        Raises:
            RuntimeError: inside ``no_sync``, or inside a request.
        """
        arguments = self._prepare_step("optimizer.step()")
        self.engine.set_gradient_accumulation_boundary(True)
        attempted = self.engine.attempted_updates
        self.applied_rates = self.engine.get_lr()
        self.engine.step(**arguments)
        self._unlogged = self._unlogged or self.engine.attempted_updates > attempted

    def metrics(self) -> dict[str, float]:
        """Return the numbers of :func:`~requestzero.zero.metrics.logged_metrics`; waits for a norm on the device."""
        return {name: float(value) for name, value in logged_metrics(self.engine).items()}

    def take_metrics(self) -> dict[str, float]:
        """Return :meth:`metrics` once after each update, else nothing."""
        unlogged, self._unlogged = self._unlogged, False
        return self.metrics() if unlogged else {}

    def _prepare_step(self, call: str) -> dict[str, Any]:
        """End the open request, which may drop it, and return the arguments of the window's step. Collective."""
        self._check_between_requests(call)
        self.engine.end_request()
        return {"normalization": "token"} if self._normalization == "token" else {"divisor": self.divisor()}

    def _check_between_requests(self, call: str) -> None:
        if self.engine.inside_no_sync_ctxt:
            raise RuntimeError(f"{call} inside accelerator.no_sync(): call it after the block.")
        if self.request_end is False and self.engine.update_window.request_open:
            raise RuntimeError(
                f"{call} inside a request: gradients are complete at its end. Call it after the request() block, or "
                "after the request's last micro-batch."
            )
