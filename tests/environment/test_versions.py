"""The gate: a DeepSpeed is accepted for what it is and not for its number, and that the version facts agree."""

from __future__ import annotations

import ast
import gc
import re
import time
import warnings
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import pytest

import requestzero
from requestzero.environment import versions
from requestzero.environment.proved_sources import STAGE_3, differences, path_of, proved_sources
from requestzero.environment.versions import UNPROVED, __version__, require_supported_deepspeed
from support.installed import CHANGED_STEP, ENGINE, pretend_deepspeed, pretend_installed, without_deepspeed
from support.paths import ROOT

STEP = f"{ENGINE}:DeepSpeedEngine.step"
PIP_LINE = r'pip install "deepspeed==0\.19\.8"'
DECORATED = "def backward(self, loss, retain_graph=False, scale_wrt_gas=True):"


@pytest.mark.parametrize("version", ["0.19.8", "0.19.8+cu128", "0.19.9", "0.20.0.dev0+abc"])
def test_the_proved_sources_are_accepted_under_any_number(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pretend_installed(monkeypatch, "deepspeed", version)
    require_supported_deepspeed()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", "# Another file, with every definition as it was.\n"),
        (DECORATED, f"# a comment\n    {DECORATED}"),
        (DECORATED, DECORATED + "\n        # a comment\n"),
        ("def log_level(self):", "def log_level(self, more=None):"),
    ],
)
def test_what_is_not_relied_on_may_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, old: str, new: str) -> None:
    pretend_deepspeed(monkeypatch, tmp_path, {ENGINE: (old, new)})
    if not old:
        path = path_of(tmp_path, ENGINE)
        path.write_text(new + path.read_text())
    require_supported_deepspeed()


def test_a_change_is_named_with_the_ways_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_installed(monkeypatch, "deepspeed", "0.20.0")
    pretend_deepspeed(monkeypatch, tmp_path, CHANGED_STEP)
    with pytest.raises(ImportError) as raised:
        require_supported_deepspeed()
    text = str(raised.value)
    assert f"installed 0.20.0 ({tmp_path}) 1 of the {len(proved_sources().definitions)} definitions" in text
    assert text.count("deepspeed.runtime.engine.DeepSpeedEngine.step") == 1
    for part in (f"proved with DeepSpeed {versions.proved_range()}", "doctor --verify", f"{UNPROVED}=1"):
        assert part in text
    assert re.search(PIP_LINE, text)


def test_a_change_inside_a_decorated_function_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_deepspeed(monkeypatch, tmp_path, {ENGINE: (DECORATED, DECORATED + "\n        pass")})
    assert differences(tmp_path) == (f"{ENGINE}:DeepSpeedEngine.backward",)


def test_what_is_gone_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_deepspeed(monkeypatch, tmp_path, {})
    path_of(tmp_path, "deepspeed.runtime.zero.utils").unlink()
    gone = ("assert_ints_same_as_other_ranks", "get_norm_dtype")
    assert differences(tmp_path) == tuple(f"deepspeed.runtime.zero.utils:{name}" for name in gone)


def test_long_lists_are_cut(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_deepspeed(monkeypatch, tmp_path, {})
    path_of(tmp_path, ENGINE).unlink()
    with pytest.raises(
        ImportError, match=r"DeepSpeedEngine\.\w+ and \d+ more \(.*doctor --json names them\)\. Run: pip"
    ):
        require_supported_deepspeed()


def test_it_runs_with_one_warning_where_that_is_wanted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_deepspeed(monkeypatch, tmp_path, CHANGED_STEP)
    monkeypatch.setenv(UNPROVED, "1")
    with pytest.warns(UserWarning, match=r"DeepSpeedEngine\.step\. It runs since REQUESTZERO_UNPROVED_DEEPSPEED=1"):
        require_supported_deepspeed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_supported_deepspeed()
    monkeypatch.setenv(UNPROVED, "0")
    with pytest.raises(ImportError):
        require_supported_deepspeed()


def test_only_the_first_rank_warns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_deepspeed(monkeypatch, tmp_path, CHANGED_STEP)
    monkeypatch.setenv(UNPROVED, "1")
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_supported_deepspeed()


def test_a_missing_deepspeed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    without_deepspeed(monkeypatch)
    with pytest.raises(ImportError, match=rf"needs DeepSpeed, and none is installed\. Run: {PIP_LINE}"):
        require_supported_deepspeed()


def test_every_first_use_checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_deepspeed(monkeypatch, tmp_path, CHANGED_STEP)
    uses = [
        lambda: requestzero.initialize(model=None, config={}),
        requestzero.RequestZeRO,
        requestzero.RequestZeROPlugin,
    ]
    for use in uses:
        with pytest.raises(ImportError, match=r"DeepSpeedEngine\.step\. Run: pip"):
            use()


def test_the_check_costs_little(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the releases that were proved no file is parsed; the time is only told, since it depends on the machine."""
    started = time.perf_counter()
    differences.cache_clear()
    monkeypatch.setattr("requestzero.environment.definitions.ast.parse", None)
    require_supported_deepspeed()
    print(f"{time.perf_counter() - started:.4f} s")


def test_a_module_whose_definitions_are_proved_is_not_parsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_deepspeed(monkeypatch, tmp_path, {})
    module = path_of(tmp_path, ENGINE)
    module.write_text("# changed\n" + module.read_text())
    parsed: list[str] = []
    parse = ast.parse

    def noted(text: str) -> ast.Module:
        parsed.append(text)
        return parse(text)

    with patch("requestzero.environment.definitions.ast.parse", noted):
        assert differences(tmp_path) == ()
    assert parsed
    assert 10 * max(map(len, parsed)) < len(module.read_text())


def test_syntax_trees_are_built_without_collections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They take a fifth of the time of a check that has to parse everything."""
    pretend_deepspeed(monkeypatch, tmp_path, CHANGED_STEP)
    collecting: list[bool] = []
    parse = ast.parse

    def noted(text: str) -> ast.Module:
        collecting.append(gc.isenabled())
        return parse(text)

    with patch("requestzero.environment.definitions.ast.parse", noted):
        assert len(differences(tmp_path)) == 1
    assert set(collecting) == {False}
    assert gc.isenabled()


def test_pyproject_and_constraints_name_what_was_proved() -> None:
    proved = proved_sources().versions
    assert f'"deepspeed>={proved[0]},<={proved[-1]}"' in (ROOT / "pyproject.toml").read_text()
    assert f"\ndeepspeed=={proved[-1]}\n" in (ROOT / "constraints.txt").read_text()


def test_the_changelog_opens_with_this_version() -> None:
    found = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert found[0] == __version__


def test_zero_3_has_a_check_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    change = {
        "deepspeed.runtime.zero.stage3": ("def step(self, closure=None):", "def step(self, closure=None, more=0):")
    }
    pretend_deepspeed(monkeypatch, tmp_path, change)
    require_supported_deepspeed()
    with pytest.raises(ImportError, match=r"DeepSpeedZeroOptimizer_Stage3\.step\. Run: pip") as raised:
        requestzero.initialize(model=None, config={"zero_optimization": {"stage": 3}})
    assert f"{UNPROVED}=1 python -m requestzero.doctor --verify. " in str(raised.value)
    assert str(raised.value).endswith(f" {UNPROVED}=1 lets it run, with a warning.")


def test_only_the_newest_release_was_proved_for_zero_3() -> None:
    proved = proved_sources()
    of_stage_3 = [found for name, found in proved.definitions.items() if name.partition(":")[0] in STAGE_3]
    assert {version for found in of_stage_3 for versions in found.values() for version in versions} == {"0.19.8"}
    others = [found for name, found in proved.definitions.items() if name.partition(":")[0] not in STAGE_3]
    assert all(sorted(chain(*found.values())) == proved.versions for found in others)
