"""A rank that fails ends the others and the run."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from requestzero.probe import ranks
from requestzero.probe.__main__ import main


def fails_on_rank_1(rank: int, *_: Any) -> None:
    if rank == 1:
        raise ValueError("of no use")
    time.sleep(3600)  # in a collective, on a rank; longer than a test may take


def test_the_error_is_shown_and_the_exit_code_is_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ranks, "_rank", fails_on_rank_1)
    assert main(["--device", "cpu", "--out", str(tmp_path / "out")]) == 1, "which is said when the other rank has ended"
    assert "ValueError: of no use" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def reports_and_goes_on(rank: int, launch: Any, folder: str, pipe: Connection) -> None:
    pipe.send("imports")
    time.sleep(120)


def test_an_interrupt_leaves_no_rank_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ranks, "_rank", reports_and_goes_on)
    before = set(multiprocessing.active_children())
    with pytest.raises(KeyboardInterrupt):
        ranks.run_ranks(ranks.Launch(print, 2, "cpu"), interrupt)
    assert set(multiprocessing.active_children()) == before
