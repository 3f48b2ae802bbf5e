"""Folders of checkpoints: what others have put there, files without checksums, ranks that name different ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.engines import build
from support.failures import assert_fails
from support.ranks import RankGroup
from support.setup import Setup
from support.windows import ALL, Micro, backward


def trained() -> Any:
    engine = build(Setup())
    backward(engine, Micro(ALL, 1))
    engine.step()
    return engine


def save(folder: str, tag: str) -> None:
    engine = trained()
    engine.save_checkpoint(folder, tag=tag)
    engine.destroy()


def test_what_others_have_put_into_a_tag_stays(two_ranks: RankGroup, tmp_path: Path) -> None:
    best = tmp_path / "best"
    (best / "tokenizer").mkdir(parents=True)
    (best / "tokenizer" / "vocabulary.txt").write_text("a b c")
    (best / "notes.txt").write_text("mine")
    (best / "requestzero_window.json").write_text("of an earlier checkpoint")
    two_ranks.run(save, str(tmp_path), "best")
    assert (best / "notes.txt").read_text() == "mine"
    assert (best / "tokenizer" / "vocabulary.txt").read_text() == "a b c"
    assert not (best / "requestzero_window.json").exists()
    assert len(list(best.glob("*optim_states.pt"))) == 2
    assert not list(tmp_path.glob(".requestzero*"))


def test_what_a_killed_writer_has_left_goes(two_ranks: RankGroup, tmp_path: Path) -> None:
    left = tmp_path / ".requestzero_writing" / "another tag"
    left.mkdir(parents=True)
    (left / "part").write_text("")
    two_ranks.run(save, str(tmp_path), "saved")
    assert not left.parent.exists()


def without_checksums(folder: str) -> bool:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        save(folder, "saved")
    finally:
        torch.serialization.set_crc32_options(before)
    engine = build(Setup())
    loaded = engine.load_checkpoint(folder)[0] is not None
    engine.destroy()
    return loaded


def test_files_without_checksums_are_loaded(two_ranks: RankGroup, tmp_path: Path) -> None:
    assert two_ranks.run(without_checksums, str(tmp_path)) == [True, True]


def save_under_two_names(folder: str) -> None:
    save(folder, f"of rank {torch.distributed.get_rank()}")


def test_ranks_that_name_different_tags(tmp_path: Path) -> None:
    ranks = RankGroup(2)
    try:
        assert_fails(
            ranks,
            r"^RankDisagreementError: (.|\n)*tag 'of rank 0'(.|\n)*tag 'of rank 1'",
            save_under_two_names,
            str(tmp_path),
        )
    finally:
        ranks.stop()
    assert list(tmp_path.iterdir()) == []


def announced_and_saved(folder: str) -> None:
    """A request that was announced before the step has not been applied by it."""
    engine = build(Setup())
    engine.begin_request("a", once=True)
    backward(engine, Micro(ALL, 1))
    engine.begin_request("b", once=True)
    engine.step()
    engine.save_checkpoint(folder, tag="saved")
    engine.destroy()
    resumed = build(Setup())
    resumed.load_checkpoint(folder)
    resumed.begin_request("b", once=True)
    with pytest.raises(ValueError, match="'a'"):
        resumed.begin_request("a", once=True)
    resumed.destroy()


def test_an_announced_request_is_not_applied(two_ranks: RankGroup, tmp_path: Path) -> None:
    two_ranks.run(announced_and_saved, str(tmp_path))
