"""The window's gradient sum: the accumulators of all parameter groups together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.utils import get_norm_dtype

from requestzero.zero.common.partition_traffic import PartitionTraffic
from requestzero.zero.stage_1_and_2.accumulators.accumulator import Accumulator, SavedSum
from requestzero.zero.stage_1_and_2.accumulators.host_copies import HostCopies
from requestzero.zero.stage_1_and_2.accumulators.offload_base import OffloadAccumulator
from requestzero.zero.stage_1_and_2.accumulators.offload_host_gradient import HostGradientAccumulator
from requestzero.zero.stage_1_and_2.accumulators.offload_partition import PartitionAccumulator
from requestzero.zero.stage_1_and_2.accumulators.retention import Retention
from requestzero.zero.stage_1_and_2.bucket_collective import Reduced
from requestzero.zero.stage_1_and_2.bucket_runs import Piece, runs_of
from requestzero.zero.stage_1_and_2.scatter_plan import Part
from requestzero.zero.window_checkpoint.record import SavedRank
from requestzero.zero.window_checkpoint.sums import OwnedPart, SavedSums


class GradientSums:
    """This rank's part of the window's sum.

    Args:
        accumulators: by parameter group.
        names: of parameters, by id.
        copies: into host gradients.
        retention: of offloaded partitions between requests.
        traffic: of offloaded partitions.
    """

    def __init__(
        self,
        accumulators: Sequence[Accumulator],
        names: Sequence[str],
        copies: HostCopies,
        retention: Retention,
        traffic: PartitionTraffic,
    ) -> None:
        self.accumulators = accumulators
        self.traffic = traffic
        self.peak_device_bytes = 0
        """The most bytes that the sum has occupied on the accelerator at the end of a backward."""
        self._names, self._copies, self._retention = names, copies, retention
        self._offloaded = [each for each in accumulators if isinstance(each, PartitionAccumulator)]

    # --- a backward -------------------------------------------------------------------------------------------------

    def prefetch(self) -> None:
        """Begin to reload partitions that the next reduction adds to."""
        for each in self._offloaded:
            each.prefetch()

    def wait_for_copies(self) -> None:
        """Wait for the copies of earlier backwards, once per backward instead of once per parameter."""
        self._copies.wait()

    def add(self, reduced: Reduced, dtype: torch.dtype, request_ends: bool) -> None:
        """Add what this rank owns of reduced gradients.

        Args:
            reduced: in the dtype of the reduction.
            dtype: of the bucket; a sum of the same dtype adds values that are rounded to it first, as DeepSpeed does.
            request_ends: with this backward.
        """
        for run in runs_of(reduced.values, list(self._owned(reduced.parts))):
            accumulator = self.accumulators[run.group_idx]
            if reduced.values.dtype != dtype == accumulator.dtype:
                run = run.in_dtype(dtype)
            accumulator.add(run, request_ends)

    def _owned(self, parts: Sequence[Part]) -> Iterator[Piece]:
        for part in parts:
            accumulator = self.accumulators[part.group_idx]
            place = accumulator.places.get(part.param_id)
            cut = None if place is None else part.cut(place.start, place.numel)
            if place is not None and cut is not None:
                offset, begun = place.offset + cut.first - place.start, accumulator.has_begun(part.param_id)
                yield Piece(part.param_id, part.group_idx, offset, cut.start, cut.numel, begun)

    def end_backward(self) -> None:
        """Note the bytes on the accelerator, which are most before a release."""
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)

    def end_request(self, undoable: bool = False) -> None:
        """Bring the sums to where they are kept between requests.

        Args:
            undoable: the request may be undone yet: a sum that :attr:`~Accumulator.keeps_last_end` stays, and its norm
                is computed.
        """
        for each in self.accumulators:
            if undoable and each.keeps_last_end:
                each.refresh_norm()
            else:
                each.end_request()
        if not undoable:
            self._release()

    def _release(self) -> None:
        releasable = [each for each in self._offloaded if each.can_release]
        keep = bool(releasable) and self._retention.keeps()
        for each in releasable:
            if keep:
                each.keep()
            else:
                each.release()

    # --- a step -----------------------------------------------------------------------------------------------------

    def refresh_norms(self) -> None:
        """Bring the norms up to date with the sums."""
        for each in self.accumulators:
            each.refresh_norm()

    def replace_norms(self, groups: Sequence[int], norms: Mapping[int, torch.Tensor]) -> None:
        """Put norms, by parameter id, in the place of those of the sums, where updates have replaced sums.

        Args:
            groups: indices of the groups.
            norms: scalars on the accelerator; the owned parameters of these groups that are missing keep theirs.
        """
        for index in groups:
            accumulator = self.accumulators[index]
            if isinstance(accumulator, HostGradientAccumulator):
                accumulator.replace_norms(norms)

    def complete(self) -> None:
        """Make what the step reads the window's sum, and its norm up to date."""
        for each in self.accumulators:
            each.complete()

    def squared_norms(self) -> list[torch.Tensor | None]:
        """Return this rank's squared norm of every group's sum, scalars on the device; ``None`` is zero."""
        return [each.squared_norm() for each in self.accumulators]

    def unused_parameters(self) -> list[str]:
        """Return names of owned parameters without a gradient in this window, under CPU offload."""
        return sorted(self._names[param_id] for each in self.accumulators for param_id in each.unused_parameters())

    def not_finite(self) -> list[str]:
        """Return names of the parameters whose owned sum is not finite as the step reads it. Reads every value."""
        return [
            self._names[param_id]
            for each in self.accumulators
            for param_id in each.group.owned
            if not bool(each.step_fragment(param_id).isfinite().all())
        ]

    def discard(self) -> None:
        """Forget the sums: the window is over."""
        self._copies.wait()  # one under way would land in the next window's sum
        for each in self.accumulators:
            each.discard()

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def owned_parts(self) -> Iterator[OwnedPart]:
        """Yield what this rank owns of every parameter's sum, as views; zero for parameters that were absent."""
        for each in self.accumulators:
            for param_id, place in each.group.owned.items():
                whole = sum(share.numel for share in each.group.shares[param_id])
                yield OwnedPart(self._names[param_id], place.start, whole, each.fragment(param_id))

    @property
    def edited(self) -> bool:
        """True if a user has set a gradient in the window, where that makes a difference."""
        return any(each.edited for each in self.accumulators if isinstance(each, OffloadAccumulator))

    def norms(self) -> dict[str, float]:
        """Return norms of owned parts that were computed in backwards, by the parameter's name. Reads each."""
        on_host = [each for each in self.accumulators if isinstance(each, HostGradientAccumulator)]
        return {self._names[number]: float(norm) for each in on_host for number, norm in each.norms.items()}

    def load(self, sums: SavedSums, rank: SavedRank, unused: Collection[str]) -> None:
        """Begin a window with the sums of a checkpoint, between requests.

        Args:
            sums: of all ranks.
            rank: the record of this rank.
            unused: names of parameters without a gradient in the window.

        Raises:
            ValueError: the checkpoint has not the sums of these parameters.
        """
        saved = SavedSum(
            read_into=lambda target, number, start: sums.read_into(target, self._names[number], start),
            used=frozenset(number for number, name in enumerate(self._names) if name not in unused),
            norms=self._saved_norms(sums, rank),
            edited=rank.edited,
        )
        for each in self.accumulators:
            each.load(saved)
        self.end_request()

    def _saved_norms(self, sums: SavedSums, rank: SavedRank) -> dict[int, torch.Tensor]:
        """Return the saved norms by parameter id, where this rank owns the part of which they are."""
        device, norms = get_accelerator().current_device_name(), {}
        for each in self.accumulators:
            for number, place in each.group.owned.items():
                norm = rank.norms.get(self._names[number])
                if norm is not None and sums.is_own_part(self._names[number], place.start, place.numel):
                    norms[number] = torch.tensor(norm, dtype=get_norm_dtype(), device=device)
        return norms

    # --- users ------------------------------------------------------------------------------------------------------

    def note_edit(self) -> None:
        """Note that a user has set a gradient."""
        for each in self.accumulators:
            each.note_edit()

    def move(self, device: str) -> None:
        """Move what lies on the accelerator to ``device``, or back."""
        for each in self.accumulators:
            each.move(device)

    @property
    def device_bytes(self) -> int:
        """Bytes that the sums occupy on the accelerator now."""
        return sum(each.device_bytes for each in self.accumulators)
