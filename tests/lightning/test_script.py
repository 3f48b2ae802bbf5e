"""A training script as a user starts it: ``python script.py``, no environment variable, Lightning starts the
other rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import lightning_script
from support.scripts import finish, start

SCRIPT = Path(lightning_script.__file__)


@pytest.mark.parametrize(("strategy", "devices"), [("object", 2), ("request_zero_1", 1)])
def test_script(tmp_path: Path, strategy: str, devices: int) -> None:
    """Four requests of 2, 6, 4 and 2 items, two to an update: means of 2 ones and 6 twos, of 4 threes and 2 fours."""
    finish(start(str(SCRIPT), strategy, str(devices), str(tmp_path)), timeout=240.0)
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
