"""The window driver by itself: what it tells an engine, here a recorder, of batches, steps and epochs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from requestzero import MicroBatch
from requestzero.config.options import RequestZeROSettings
from requestzero.lightning.window_driver import WindowDriver, driver_of
from requestzero.zero.common.next_step_clipping import NextStepClipping


class Recorder:
    """An engine that writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.update_window = SimpleNamespace(request_open=False, is_open=False, micro_batches=2, requests=1)
        self.next_step_clipping = NextStepClipping()

    @property
    def has_pending_gradients(self) -> bool:
        return bool(self.update_window.is_open)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, *args, *kwargs.values()))


def build(automatic: bool = True, training: bool = True, accumulate: int = 2, **settings: Any) -> Any:
    """A driver, whose owner is a stand-in for a strategy with a Trainer."""
    trainer = SimpleNamespace(training=training, accumulate_grad_batches=accumulate, current_epoch=3, global_step=7)
    module = SimpleNamespace(automatic_optimization=automatic, trainer=trainer)
    owner: Any = SimpleNamespace(
        engine=Recorder(), settings=RequestZeROSettings(**settings), lightning_module=module, lr_scheduler_configs=[]
    )
    owner.window_driver = WindowDriver(owner)
    trainer.strategy = owner
    return owner.window_driver


def test_it_is_found_on_the_trainer() -> None:
    driver = build()
    assert driver_of(driver.trainer) is driver


def test_requests_are_announced_with_their_ends() -> None:
    driver = build()
    assert [driver.begin_batch(batch) for batch in ("a", "b")] == ["a", "b"]
    assert driver.engine.calls == [("begin_request", None, 1, False), ("begin_request", None, 1, True)]
    manual = build(automatic=False)
    manual.begin_batch(MicroBatch("a", request_id="r"))
    assert manual.engine.calls == [("begin_request", "r", None, None)]


def test_evaluation_only_unwraps() -> None:
    driver = build(training=False)
    assert driver.begin_batch(MicroBatch("a", weight=2)) == "a"
    assert driver.engine.calls == []
    assert driver.marks.weight is None


def test_the_weight_of_a_batch_is_used_once() -> None:
    driver = build(normalization="token")
    driver.begin_batch(MicroBatch("a", weight=3))
    with pytest.raises(ValueError, match=r"add_weight\(1\) for a batch that has the weight 3 already"):
        driver.add_weight(1)
    driver.engine.calls.clear()
    driver.before_backward()
    assert driver.engine.calls == [("set_gradient_accumulation_boundary", True), ("add_weight", 3)]
    with pytest.raises(ValueError, match="has no weight, by which normalization='token' divides"):
        driver.before_backward()


def test_the_end_of_data_and_a_failure_are_told_once() -> None:
    driver = build()
    error = RuntimeError()
    for _ in range(2):
        driver.end_data()
        driver.fail(error)
    assert driver.engine.calls == [("end_data",), ("fail", error)]
    driver.end_epoch()
    driver.end_data()
    assert driver.engine.calls[2:] == [("end_data",)]
    driver.begin_fit()
    driver.fail(error)
    assert driver.engine.calls[3:] == [("fail", error)]


def test_an_open_window_is_discarded_with_a_warning() -> None:
    driver = build(automatic=False)
    driver.begin_batch("a")
    driver.discard_window("nothing is open")
    driver.engine.calls.clear()
    driver.engine.update_window.is_open = True
    assert not driver.is_complete
    text = r"discards an open update window of 2 micro-batches, 1 ended requests \(epoch 3, after update 7\): why"
    with pytest.warns(UserWarning, match=text):
        driver.discard_window("why")
    assert driver.engine.calls == [("zero_grad",)]
    driver.engine.update_window.is_open = False
    assert not driver.is_complete  # in manual optimization: the batch has made no update


def test_schedulers_wait_from_the_first_batch_on() -> None:
    driver = build()
    assert not driver.holds_schedulers
    driver.begin_batch(None)
    assert driver.holds_schedulers


def test_without_an_engine_nothing_is_told() -> None:
    driver = build()
    driver._owner.engine = None
    driver.end_request()
    driver.end_epoch()
    driver.fail(RuntimeError())
    assert not driver.is_open


def test_a_clip_without_norms_is_an_error() -> None:
    driver = build()
    driver.engine.optimizer = SimpleNamespace(compute_grad_norm=False)
    with pytest.raises(ValueError, match=r"^self.clip_gradients and zero_optimization.compute_grad_norm=false"):
        driver.clip(1.0)
