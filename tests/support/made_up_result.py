"""A result that nobody measured: what tables, files, figures and the page are made of."""

from __future__ import annotations

from requestzero.environment.machine import Machine
from requestzero.probe.columns import COLUMNS
from requestzero.probe.grid import Configuration, Engine
from requestzero.probe.models import Shape
from requestzero.probe.reference import add_references
from requestzero.probe.result import Result, Row
from requestzero.probe.timing import PARTS

OFFLOAD = Configuration(2, True, "bf16", "fp32")
SHAPE = Shape(parameters=1024, tensors=8)
PARTITION = 2048  # bytes on each of two ranks


def made_up_rows() -> list[Row]:
    rows = []
    for engine in OFFLOAD.engines():
        held = 0 if engine == Engine(True, False) else PARTITION
        values = {
            "updates": 60,
            "wrong_updates": 0 if engine.requestzero else 27,
            "precision": 0.0,
            "memory": [PARTITION, held, PARTITION, PARTITION, held, held],
            "bytes_between_requests": held,
            "bytes_at_peak": 3 * PARTITION,
            "host_reads_backward": 0 if engine.requestzero else 4,
            "host_reads_step": 1 if engine.requestzero else 7,
            "operators_backward": 99,
            "operators_step": 1234,
            "copies_to_host": 1,
            "bytes_to_host": PARTITION,
            "copies_from_host": 0,
            "bytes_from_host": 0,
        }
        if engine.requestzero:
            for part in PARTS:
                values |= {f"{part}_ratio": 0.5, f"{part}_ratio_low": 0.4, f"{part}_ratio_high": 0.7}
        rows.append(Row(OFFLOAD, engine, values))
    failed = Row(Configuration(1, False, "bf16", "fp32"), Engine(False), note="BF16_Optimizer")
    failed.errors = dict.fromkeys(("updates", "precision", "memory", "costs", "times"), "TypeError: no <such> thing")
    rows.append(failed)
    for row in rows:
        row.values |= vars(SHAPE)
        add_references(row, SHAPE, ranks=2, device="cpu")
    return rows


def made_up_result(columns: list[str] | None = None) -> Result:
    versions = {"Python": "3.11", "torch": None, "deepspeed": "0.19.8"}
    machine = Machine(versions, "cpu", "A <fast> one", "gloo", "A <fast> one", 2, ranks=2)
    options = {"columns": columns or list(COLUMNS), "requests": 3, "windows": 12, "ranks": 2, "device": "cpu"}
    return Result(options, machine, made_up_rows())
