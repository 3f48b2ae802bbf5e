"""``normalization="token"`` under Lightning: weights from the loader or ``training_step``, manual optimization."""

from __future__ import annotations

import pytest

from support.failures import assert_fails
from support.lightning_data import MARKED, batch_value, batch_weight
from support.lightning_reference import weights_after
from support.lightning_runs import train
from support.lightning_spec import Run
from support.ranks import RankGroup

TOKEN = {"normalization": "token"}


def reference(windows: list[list[int]]) -> list[tuple[list[float], float]]:
    """Weights and gradient norm after every update: losses and weights summed over two ranks, then divided once."""
    gradients = []
    for window in windows:
        batches = [(index, rank) for index in window for rank in (0, 1)]
        total = sum(batch_weight(*batch) for batch in batches)
        gradients.append([sum(float(batch_value(*batch)[i]) for batch in batches) / total for i in range(8)])
    norms = [sum(g * g for g in gradient) ** 0.5 for gradient in gradients]
    return list(zip(weights_after(gradients), norms, strict=True))


RUNS = {
    "requests per update": Run(weighted=True, trainer={"accumulate": 3}),
    "marked by the loader": Run(weighted=True, marks=MARKED, batches=7, trainer={"max_epochs": 2}),
    "from training_step": Run(adds_weight=1, trainer={"accumulate": 3}),
    "manual": Run(weighted=True, manual="weighted"),
}


@pytest.mark.parametrize("name", RUNS)
def test_windows_are_divided_by_their_weight(two_ranks: RankGroup, name: str) -> None:
    run = RUNS[name]
    run.schedule = False
    run.options = {**TOKEN, "stage": 1 + len(name) % 2}
    marked = [[0, 1, 2], [3, 4, 5], [6], [7, 8, 9], [10, 11, 12], [13]]
    windows = marked if run.marks else [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    for got in two_ranks.run(train, run):
        assert len(got["updates"]) == got["applied"] == len(windows)
        for row, (weights, norm) in zip(got["updates"], reference(windows), strict=True):
            assert row["weights"] == pytest.approx(weights, rel=1e-6, abs=1e-6)
            assert row["norm"] == pytest.approx(norm, rel=1e-6)


def test_a_window_without_weight_holds_schedule_and_weights(two_ranks: RankGroup) -> None:
    run = Run(weighted=True, options=TOKEN, trainer={"accumulate": 3}, empty_batches=(3, 4, 5))
    for got in two_ranks.run(train, run):
        first, empty, third, _ = got["updates"]
        assert (empty["weights"], empty["lr"], empty["applied"]) == (first["weights"], first["lr"], 1)
        assert third["weights"] != first["weights"]
        assert (got["global_step"], got["applied"], got["skipped"], got["empty"]) == (4, 3, 0, 1)
        assert len([text for text in got["warnings"] if "total weight of zero" in text]) == (got["rank"] == 0)
        assert got["open"] is False


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (Run(options=TOKEN), r"^ValueError: A batch of request None has no weight.*MicroBatch\(inputs, weight="),
        (
            Run(options=TOKEN, weighted=True, adds_weight=1),
            r"add_weight\(tensor\(.\)\) for a batch that has the weight . already",
        ),
        (Run(options=TOKEN, adds_weight=2), "for a batch that has the weight .* already"),
        (Run(options=TOKEN, manual="every_third"), r"^RuntimeError: .*but 6 over all ranks have none or more than one"),
    ],
)
def test_weights_that_are_missing_or_doubled(two_ranks: RankGroup, run: Run, message: str) -> None:
    assert_fails(two_ranks, f"(?s){message}", train, run)
