"""A training script as a user starts it: ``python script.py``, no environment variable, Lightning starts the
other rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("train_script.py")


def start(*arguments: str, timeout: float = 240.0) -> str:
    """Run the script in a process group of its own, which is killed as a whole when it takes too long."""
    variables = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")
    environment = {key: value for key, value in os.environ.items() if key not in variables}
    environment["OMP_NUM_THREADS"] = "1"
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"the script was not done after {timeout:.0f} s:\n{output}")
    assert process.returncode == 0, output
    return output


@pytest.mark.parametrize(("strategy", "devices"), [("object", 2), ("request_zero_1", 1)])
def test_script(tmp_path: Path, strategy: str, devices: int) -> None:
    """Four requests of 2, 6, 4 and 2 items, two to an update: means of 2 ones and 6 twos, of 4 threes and 2 fours."""
    start(strategy, str(devices), str(tmp_path))
    weight = -(7 / 4 + 10 / 3)
    assert len(list(tmp_path.glob("rank*.txt"))) == devices
    for rank in range(devices):
        world_size, updates, rest = (tmp_path / f"rank{rank}.txt").read_text().split(maxsplit=2)
        assert (world_size, updates) == (str(devices), "2")
        assert [float(value) for value in rest.strip("[]").split(",")] == pytest.approx([weight] * 3)
    logged = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    column = logged[0].split(",").index("grad_norm")
    norms = [float(row.split(",")[column]) for row in logged[1:]]
    assert norms == pytest.approx([7 / 4 * 3**0.5, 10 / 3 * 3**0.5])
