"""Clipping of an engine's windows as the loop that drives it asks for it, in every front end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from requestzero.zero.common.clipped_parameters import are_all, without_local

if TYPE_CHECKING:
    from requestzero.zero.engine import RequestZeROEngine


class LoopClipping:
    """Clips the gradient that the next step of a loop would apply, as that step divides it.

    Args:
        engine: whose windows.
        prepare_step: ends the open request and returns what the loop gives to ``engine.step``: a ``divisor``, a
            ``normalization`` or nothing. Called with the name of the call that asks for it. Raises where the loop may
            not step.
        configured: ``gradient_clipping`` of the DeepSpeed config, ``None`` where the loop decides.
    """

    def __init__(
        self,
        engine: RequestZeROEngine,
        prepare_step: Callable[[str], Mapping[str, Any]],
        configured: float | None,
    ) -> None:
        self._engine, self._prepare_step, self._configured = engine, prepare_step, configured

    def by_norm(self, call: str, max_norm: float, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Return the norm of the open window's divided gradient, and let the step clip at ``max_norm``. Collective.

        Args:
            call: the name by which the loop asks for it.
            max_norm: a positive number; infinity only asks for the norm.
            error_if_nonfinite: read the norm, which waits for the device, and check it.

        Returns:
            A scalar tensor on the engine's device, the same on all ranks; 0 without a window. After an earlier call for
            the window the norm that this one leaves, as in PyTorch.

        Raises:
            ValueError: ``max_norm`` is not positive, contradicts the config, or steps compute no norm.
            RuntimeError: the norm is not finite; on all ranks.
        """
        check_max_norm(call, max_norm, self._configured)
        if not math.isinf(max_norm):
            check_norm_is_computed(self._engine, call)
        norm = self._pending_norm(**self._prepare_step(f"{call}()"))
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"{call}: the norm of the window's gradient is {float(norm)}. Give error_if_nonfinite=False to let "
                "the overflow policy decide in the step."
            )
        clipping, window = self._engine.next_step_clipping, self._engine.update_window
        earlier = clipping.asked(window)
        clipping.ask(window, max_norm)
        return norm if earlier is None else norm * (earlier / (norm + 1e-6)).clamp(max=1.0)  # as PyTorch clips

    def _pending_norm(self, divisor: float = 1.0, normalization: str | None = None) -> torch.Tensor:
        if normalization == "token":
            return self._engine.pending_norm(None)
        if normalization == "mean":
            divisor = float(self._engine.update_window.divisor_of_mean() or 1)  # 0 where all requests were dropped
        return self._engine.pending_norm(divisor)

    def of_parameters(
        self,
        call: str,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Clip gradients of the open window as ``torch.nn.utils.clip_grad_norm_`` does. Collective.

        Those of all parameters by their 2-norm as :meth:`by_norm` does, in the step. Others at once, for which every
        rank holds the whole gradient for a moment.

        Args:
            call: the name by which the loop asks for it.
            parameters: of the engine's model, and others with gradients of their own.
            max_norm: as in PyTorch; of all parameters' 2-norm as for :meth:`by_norm`.
            norm_type: as in PyTorch.
            error_if_nonfinite: raise for a norm that is not finite.
            foreach: as in PyTorch, where gradients are clipped at once.

        Returns:
            The norm before clipping, a scalar tensor, the same on all ranks.

        Raises:
            NotImplementedError: of some parameters or by another norm, at stage 3.
            ValueError: see :meth:`by_norm`.
            RuntimeError: the norm is not finite; on all ranks.
        """
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        given = without_local(self._engine, given)
        if norm_type == 2 and not self._engine.shows_gradients and are_all(self._engine, given):
            return self.by_norm(call, float(max_norm), error_if_nonfinite)
        with self.whole_gradients(call):
            return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite, foreach)

    def whole_gradients(self, call: str) -> AbstractContextManager[None]:
        """Return a block in which ``param.grad`` is the window's gradient; see ``full_gradients``. Collective.

        Nothing is left to do within such a block.

        Raises:
            NotImplementedError: at stage 3, where no rank has whole gradients.
        """
        if self._engine.zero_optimization_partition_weights():
            raise NotImplementedError(
                f"{call} is not possible at stage 3, where no rank has whole gradients: clip all parameters together "
                "by their 2-norm, and read the window's sum, which is not divided yet, with "
                "deepspeed.utils.safe_get_full_grad on all ranks."
            )
        if self._engine.shows_gradients:
            return nullcontext()
        from requestzero.zero.full_gradients import full_gradients  # imports DeepSpeed

        return full_gradients(self._engine, **self._prepare_step(call))


def check_max_norm(call: str, max_norm: float, configured: float | None) -> None:
    """Raise ValueError unless the step can clip at ``max_norm``.

    Args:
        call: the name by which a loop asks for it.
        max_norm: as it was given; infinity asks for the norm only.
        configured: ``gradient_clipping`` of the DeepSpeed config, ``None`` where the loop decides.
    """
    if not max_norm > 0:
        raise ValueError(f"{call}(max_norm={max_norm!r}) is not allowed: use a positive number.")
    if not math.isinf(max_norm) and configured not in (None, float(max_norm)):
        raise ValueError(
            f"{call}(max_norm={max_norm!r}) contradicts gradient_clipping={configured!r} of the DeepSpeed config, at "
            "which the step clips: use the same value, or leave it out of the config."
        )


def check_norm_is_computed(engine: RequestZeROEngine, call: str) -> None:
    """Raise ValueError where the engine's steps compute no norm, without which they cannot clip."""
    if not engine.optimizer.compute_grad_norm:
        raise ValueError(
            f"{call} and zero_optimization.compute_grad_norm=false disagree, since a step clips by the norm: leave "
            "that key out of the DeepSpeed config, or do not clip."
        )
