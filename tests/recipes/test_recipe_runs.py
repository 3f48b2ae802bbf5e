"""The recipe as a user starts it: a command, its ranks, its output, and what it leaves behind."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from support.preloaded import executable
from support.recipe_configs import TINY

ONE_RANK = ["trainer.devices=1", "trainer.accelerator=cpu"]


@contextmanager
def started(directory: Path, *overrides: str, python: str | None = None) -> Iterator[subprocess.Popen[str]]:
    """The command in a process group of its own, of which nothing is left afterwards."""
    command = [python or executable(), "-m", "requestzero.recipes.lightning_sft", *overrides]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=directory, text=True, start_new_session=True, **pipes) as process:
        try:
            yield process
        finally:
            if ranks_alive(process):
                os.killpg(process.pid, signal.SIGKILL)


def ranks_alive(process: subprocess.Popen[str]) -> bool:
    """Return true while a process of the command's group is left, zombies aside."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(group) == process.pid and state != "Z":
                return True
    return False


def all_ended(process: subprocess.Popen[str], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while ranks_alive(process) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not ranks_alive(process)


def run(directory: Path, *overrides: str, code: int = 0) -> str:
    """The output of the command, which must end with ``code``."""
    with started(directory, *overrides) as process:
        output, _ = process.communicate(timeout=240)
    assert process.returncode == code, output
    return output


def table(output: str) -> dict[str, str]:
    """The rows of the table at the end."""
    return dict(re.findall(r"^│ (.+?)\s+│ (.+?)\s+│$", output, flags=re.MULTILINE))


def logged(run_dir: Path, name: str = "loss") -> list[str]:
    with (run_dir / "csv" / "metrics.csv").open() as file:
        return [row[name] for row in csv.DictReader(file)]


def test_the_demo_in_short(tmp_path: Path) -> None:
    """On as many ranks as ``make demo`` takes, in a directory with a space."""
    output = run(tmp_path, "trainer.max_steps=4", 'hydra.run.dir="a run/x=1"')
    rows = table(output)
    first, last = float(rows["loss, first"]), float(rows["loss, last"])
    assert math.isfinite(first)
    assert last < first - 0.5
    assert (rows["updates applied"], rows["updates skipped"], rows["requests"]) == ("4", "0", "16")
    assert 16 <= int(rows["micro-batches per rank"]) <= 16 * 6
    real, total, naive = re.search(
        r"^([\d,]+) of ([\d,]+) micro-batches on all ranks \(naive: ([\d,]+) of", rows["fillers"]
    ).groups()  # type: ignore[union-attr]
    assert int(real) <= int(naive)
    assert int(total) % int(rows["micro-batches per rank"]) == 0
    for name in ("padding", "imbalance"):
        ours, naive = map(float, re.findall(r"([\d.]+)%", rows[name]))
        assert ours < naive, name
    assert float(rows["tokens per second"].replace(",", "")) > 0
    assert rows["gradient partition between requests"] == "0 bytes", "released at every request's end"
    assert int(rows["gradient partition at peak"].removesuffix(" bytes").replace(",", "")) > 0
    assert (tmp_path / rows["checkpoint"] / "checkpoint").is_dir()
    run_dir = tmp_path / "a run" / "x=1"
    assert rows["logs"] == "a run/x=1"
    assert len(logged(run_dir)) == 4
    assert float(logged(run_dir, "grad_norm")[0]) > 0
    assert float(logged(run_dir, "requests")[-1]) == 16
    assert rows["requests dropped"] == "0"
    for name, value in (("skipped_updates", 0), ("consecutive", 0), ("dropped_requests", 0), ("loss_scale", 1)):
        assert [float(each) for each in logged(run_dir, f"overflow/{name}")] == [value] * 4
    assert list((run_dir / "tensorboard").glob("events.*"))
    assert output.count("update 4/4  requests 16  loss") == 1, "progress is shown by one rank"
    assert not (tmp_path / "outputs").exists(), "the other rank writes into the first one's directory"


@pytest.mark.slow
def test_a_run_that_is_ended_says_why(tmp_path: Path) -> None:
    """A learning rate that makes everything after the first update NaN: reported once, by one of two ranks."""
    limits = ["overflow=stop_after_skips", "overflow.max_consecutive_skips=2", "hydra.run.dir=a"]
    output = run(tmp_path, *TINY, "optimizer.lr=1e30", *limits, "trainer.max_steps=10", code=1)
    assert output.count("The run was ended:") == 1
    assert output.count("2 updates in a row were skipped for gradients that are not finite") == 1
    assert "Traceback" not in output
    assert "skipped 1  dropped 0" in output
    assert [float(each) for each in logged(tmp_path / "a", "overflow/skipped_updates")] == [0, 1]


def write_requests(path: Path) -> Path:
    """Seven requests of 1 to 7 texts: windows of two leave one over at the end of an epoch."""
    lines = [{"id": f"r{n}", "texts": [f"request {n}, text {item}" for item in range(n + 1)]} for n in range(7)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.slow
def test_a_resumed_run_continues_exactly(tmp_path: Path) -> None:
    data = write_requests(tmp_path / "requests.jsonl")
    overrides = [*TINY, *ONE_RANK, "data=jsonl", f"data.path={data}", "data.requests_per_update=2"]
    whole = run(tmp_path, *overrides, "trainer.max_steps=8", "trainer.checkpoint_every_n_steps=5", "hydra.run.dir=a")
    resume = "trainer.resume_from=a/checkpoints/update-5.ckpt"
    resumed = run(tmp_path, *overrides, "trainer.max_steps=8", resume, "data.num_workers=2", "hydra.run.dir=b")
    for name in ("loss", "grad_norm", "lr", "requests", "micro_batches", "tokens"):
        assert logged(tmp_path / "b", name) == logged(tmp_path / "a", name)[5:], name
    for row in (
        "loss, first",
        "loss, last",
        "updates applied",
        "requests",
        "micro-batches per rank",
        "tokens",
        "imbalance",
    ):
        assert table(resumed)[row] == table(whole)[row], row
    assert table(whole)["requests"] == "14", "two epochs, each with a window of a single request at its end"


@pytest.mark.slow
def test_a_hugging_face_model_learns_from_chats(tmp_path: Path, hugging_face_model: Path) -> None:
    chat = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "answer"}]
    lines = [json.dumps({"id": number, "messages": chat}) for number in range(3)]
    (tmp_path / "chats.jsonl").write_text("\n".join([*lines, "no json", lines[0]]))
    model = ["model=hugging_face", f"model.path='{hugging_face_model}'", "data.layout=packed", "data.num_workers=1"]
    data = ["data=jsonl", "data.path=chats.jsonl", "data.on_bad_line=skip", "data.requests_per_update=3"]
    output = run(tmp_path, *model, *data, *ONE_RANK, "trainer.max_steps=5", "optimizer.lr=0.01")
    assert float(table(output)["loss, last"]) < float(table(output)["loss, first"])
    assert table(output)["padding"].startswith("0.0% of the tokens computed (naive: "), "packed"
    assert "left out: chats.jsonl:4: is not JSON" in output
    assert "left out: chats.jsonl:5: id 0 was already used on line 1" in output
    assert "2 lines or texts of the data were left out" in output


def test_bad_data_stops_the_run_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"id": 1}\nno json\n')
    output = run(tmp_path, "data=jsonl", "data.path=d.jsonl", code=2)
    assert "Nothing was started:" in output
    assert "d.jsonl:1: has the keys" in output
    assert "d.jsonl:2: is not JSON" in output
    assert "Traceback" not in output


def test_a_bad_command_line_ends_at_once(tmp_path: Path) -> None:
    output = run(tmp_path, "trainer.max_step=1", "zero=stage5", code=2)
    assert "Nearest: trainer.max_steps." in output
    assert "zero=stage5 is not allowed" in output
    assert "Traceback" not in output
    assert list(tmp_path.iterdir()) == []


def test_help_lists_the_configuration(tmp_path: Path) -> None:
    assert "zero: default, stage1, stage1_offload, stage2, stage2_offload" in run(tmp_path, "--help")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_sigterm_ends_all_ranks(tmp_path: Path) -> None:
    """Between two batches: one that interrupts a rank's backward would leave the other in a collective."""
    with started(
        tmp_path,
        *TINY,
        *("trainer.max_steps=100000", "trainer.devices=2", "trainer.accelerator=cpu"),
        python=sys.executable,  # all ranks are in the group of the command
    ) as process:
        assert process.stdout is not None
        assert any(line.startswith("update 1/") for line in process.stdout), "training has begun"
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        assert "SIGTERM ended the run after update" in output
        assert process.returncode == 128 + signal.SIGTERM
        assert all_ended(process), "a rank was left alive"


@pytest.mark.slow
def test_a_sweep_on_one_rank_shows_what_retaining_the_partition_costs(tmp_path: Path) -> None:
    sweep = "zero.retain_gpu_grad_partition_until_step=false,true"
    output = run(tmp_path, "--multirun", *TINY, *ONE_RANK, sweep, "trainer.max_steps=2", "hydra.sweep.dir=sweep")
    held = re.findall(r"gradient partition between requests │ ([\d,]+) bytes", output)
    assert held[0] == "0"
    assert held[1] != "0"
    for name in ("loss", "grad_norm"):
        released, retained = (logged(tmp_path / "sweep" / job, name) for job in ("0", "1"))
        assert len(released) == 2
        assert released == retained


@pytest.mark.slow
def test_skipped_updates_are_counted(tmp_path: Path) -> None:
    """The first update of this absurd learning rate leaves weights that give no finite gradient."""
    rate = ["optimizer.lr=1e37", "optimizer.warmup_steps=0", "optimizer.weight_decay=0"]
    output = run(tmp_path, *TINY, *ONE_RANK, *rate, "trainer.max_steps=3", "hydra.run.dir=run")
    rows = table(output)
    assert (rows["updates applied"], rows["updates skipped"]) == ("1", "2")
    assert len(logged(tmp_path / "run")) == 3
