"""The documentation's Python blocks, run as their marks say."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from support.accelerate_state import fresh
from support.documents import PAGES, Block, blocks_of, python_blocks
from support.preloaded import executable
from support.ranks import RankGroup

# Mark of a script -> how it is started.
STARTED_WITH: dict[str, tuple[str, ...]] = {
    "run: python": (),
    "run: torchrun 1": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
}
RANKS = {f"run: ranks {number}": number for number in (1, 2)}

BLOCKS = python_blocks()
SCRIPTS = [block for block in BLOCKS if block.mark in STARTED_WITH]
WITHIN_RANKS = [block for block in BLOCKS if block.mark in RANKS]


def place(block: Block) -> str:
    return block.place


def last_line(block: Block, folder: Path) -> str:
    """Start the block as a script; return the last line that it prints."""
    script = folder / "train.py"
    script.write_text(block.code, encoding="utf-8")
    scripts = os.path.dirname(sys.executable)  # ninja, for DeepSpeedCPUAdam
    run = subprocess.run(
        [executable(), *STARTED_WITH[str(block.mark)], str(script)],
        cwd=folder,
        env={**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()[-1]


def run_here(code: str) -> None:
    """Run the code on a rank, in an empty folder. The ranks stay joined after it."""
    keep_joined = patch.object(torch.distributed, "destroy_process_group")
    with tempfile.TemporaryDirectory() as folder, fresh(), keep_joined:
        before = os.getcwd()
        os.chdir(folder)
        try:
            exec(compile(code, "block", "exec"), {"__name__": "__main__"})
        finally:
            os.chdir(before)


def test_every_python_block_says_how_it_is_run() -> None:
    unknown = [
        block.place
        for block in BLOCKS
        if block.mark not in (*STARTED_WITH, *RANKS) and not str(block.mark).startswith("not run: ")
    ]
    assert unknown == []
    assert len(SCRIPTS) >= 4
    assert len(WITHIN_RANKS) >= 4
    assert len(BLOCKS) == sum(page.read_text(encoding="utf-8").count("```python\n") for page in PAGES)


def test_marks_are_read() -> None:
    text = "text\n<!-- run: python -->\n```python\na = 1\n```\n\n```python\nb = 2\n```\n"
    assert blocks_of(text, "page") == [Block("page:3", "run: python", "a = 1\n"), Block("page:7", None, "b = 2\n")]


@pytest.mark.parametrize("block", WITHIN_RANKS, ids=place)
def test_a_block_within_ranks(group_of: Callable[[int], RankGroup], block: Block) -> None:
    group_of(RANKS[str(block.mark)]).run(run_here, block.code)


# Page -> what its script prints at last: expected numbers, then the gradient norm of the last update.
PRINTED = {
    "docs/guides/engine.md": ["2", "5"],  # updates, micro-batches of the last one
    "docs/guides/lightning.md": ["6", "6", "0"],  # attempted, applied, skipped
    "docs/guides/accelerate.md": ["5", "0"],  # 18 micro-batches, four to an update, and a last one of two; skipped
}


@pytest.mark.slow
@pytest.mark.parametrize("block", SCRIPTS, ids=place)
def test_a_script(block: Block, tmp_path: Path) -> None:
    page = block.place.split(":")[0]
    *numbers, last = last_line(block, tmp_path).split()
    if page == "docs/guides/trainer.md":
        assert (numbers, last) == (["3"], "RequestZeROOptimizer")
    else:
        assert numbers == PRINTED[page]
        assert float(last) > 0
