"""The type check sees DeepSpeed: what the stubs name is there, and what they do not name is an error."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_upstream_contract import overridden

from support.deepspeed_stubs import Entry, entries
from support.stub_differences import difference

CHECKOUT = Path(__file__).parents[1]
ZERO = "deepspeed.runtime.zero.stage_1_and_2"


def test_the_installed_deepspeed_agrees_with_every_entry() -> None:
    found = entries()
    assert len(found) > 100
    assert [f"{entry} {difference(entry)}" for entry in found if difference(entry)] == []


@pytest.mark.parametrize(
    ("stub", "found"),
    [
        ("def reduce_gradients(self): ...", "has the parameters"),
        ("def reduce_gradients(self, pipeline_parallel): ...", "has the parameters"),
        ("@staticmethod\ndef reduce_gradients(self, pipeline_parallel=False): ...", "is a function there"),
        ("def no_such_method(self): ...", "is not defined there"),
        ("no_such_attribute: int", "is assigned nowhere in the class"),
        ("class NoSuchClass: ...", "is not defined there"),
    ],
)
def test_an_entry_that_disagrees_is_seen(stub: str, found: str) -> None:
    node = ast.parse(stub).body[0]
    assert isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AnnAssign)
    name = ast.unparse(node.target) if isinstance(node, ast.AnnAssign) else node.name
    assert str(difference(Entry(ZERO, ("DeepSpeedZeroOptimizer",), name, node))).startswith(found)


def test_every_overridden_method_has_an_entry() -> None:
    ours = {key for key in overridden() if key.startswith("deepspeed.")}
    assert ours - {entry.key for entry in entries()} == set()


def test_every_entry_is_named_in_the_package_or_says_what_is_relied_on() -> None:
    named = set(_named_in_the_package())
    listed = [entry for entry in entries() if not isinstance(entry.node, ast.ClassDef)]
    assert [str(entry) for entry in listed if entry.name not in named and not entry.behaviour] == []


def _named_in_the_package() -> Iterator[str]:
    """Yield every identifier, and every string, since some names are looked up."""
    for path in [*(CHECKOUT / "strategies").rglob("*.py"), *(CHECKOUT / "recipes").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = {ast.Attribute: "attr", ast.Name: "id", ast.FunctionDef: "name", ast.ClassDef: "name"}
            if type(node) in names:
                yield getattr(node, names[type(node)])
            elif isinstance(node, ast.Import | ast.ImportFrom):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


# --- mypy ---------------------------------------------------------------------------------------------------------

PROBE = """
import torch
from deepspeed import comm as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from typing_extensions import override


class Optimizer(DeepSpeedZeroOptimizer):
    @override
    def process_gradients(self, param: torch.Tensor, i: int) -> None:
        if param.numel() > self.reduce_bucket_size:
            super().process_gradients(param, i)


def rank(engine: DeepSpeedEngine) -> float:
    return dist.get_rank() if engine.inside_no_sync_ctxt else engine.global_rank
"""

# One change each, and the error that it brings.
CHANGES = [
    ("def process_gradients", "def process_gradient", "no base method was found"),
    ("self.reduce_bucket_size", "self.reduce_bucket_sizes", '"Optimizer" has no attribute "reduce_bucket_sizes"'),
    ("engine.inside_no_sync_ctxt", "engine.inside_no_sync", '"DeepSpeedEngine" has no attribute "inside_no_sync"'),
    ("dist.get_rank", "dist.get_ranks", 'Module has no attribute "get_ranks"'),
    (
        "runtime.engine import",
        "runtime.engines import",
        '"deepspeed.runtime.engines": module is installed, but missing',
    ),
    ("-> None:", "-> int:", "incompatible with return type"),
]


class Project:
    """A project of single modules, with a copy of the stubs and the settings of mypy that this checkout has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copy(CHECKOUT / "pyproject.toml", folder)
        shutil.copytree(CHECKOUT / "typings", folder / "typings")

    def check(self, *texts: str) -> list[str]:
        """Return the errors that mypy finds in each module."""
        names = [f"module_{number}.py" for number in range(len(texts))]
        for name, text in zip(names, texts, strict=True):
            (self.folder / name).write_text(text)
        # Reading torch takes most of a minute, once for each checkout.
        cache = f"--cache-dir={CHECKOUT / '.pytest_cache' / 'mypy'}"
        command = [sys.executable, "-m", "mypy", "--no-error-summary", cache, *names]
        environment = {key: value for key, value in os.environ.items() if key != "MYPYPATH"}
        run = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300)
        assert run.returncode in (0, 1), run.stdout + run.stderr
        lines = run.stdout.splitlines()
        assert all(line.startswith(tuple(names)) for line in lines), run.stdout
        return ["\n".join(line for line in lines if line.startswith(name)) for name in names]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("typed"))


@pytest.mark.slow
def test_what_deepspeed_does_not_have_fails_the_type_check(project: Project) -> None:
    assert [PROBE.count(before) for before, _, _ in CHANGES] == [1] * len(CHANGES)
    unchanged, *changed = project.check(PROBE, *(PROBE.replace(before, after) for before, after, _ in CHANGES))
    assert unchanged == ""
    for (_, after, error), found in zip(CHANGES, changed, strict=True):
        assert error in found, after


def test_an_override_fails_where_its_counterpart_is_gone(project: Project) -> None:
    stub = project.folder / "typings" / "deepspeed" / "runtime" / "zero" / "stage_1_and_2.pyi"
    whole = stub.read_text()
    stub.write_text(whole.replace("def process_gradients(", "def renamed_upstream("))
    assert "no base method was found" in project.check(PROBE)[0]
    stub.write_text(whole)
    assert project.check(PROBE) == [""]
