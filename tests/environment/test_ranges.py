"""The ranges of the front ends' packages: what is refused, and when."""

from __future__ import annotations

import pytest

from requestzero.environment import ranges
from requestzero.environment.ranges import require_allowed
from support.installed import pretend_installed
from support.scripts import run_code

# Prints the error of an import, with another version of a package, and whether the package itself was imported.
REFUSED = """
import importlib.metadata as metadata, sys
original = metadata.version
metadata.version = lambda name: "{version}" if name == "{name}" else original(name)
try:
    from {module} import {public}
except ImportError as error:
    print(error, "|", "{name}" in sys.modules)
"""


@pytest.mark.parametrize(
    ("name", "version", "module", "public"),
    [
        ("lightning", "2.5.6", "requestzero", "RequestZeRO"),
        ("accelerate", "1.12.0", "requestzero", "RequestZeROPlugin"),
        ("transformers", "4.57.1", "requestzero.transformers", "RequestZeROTrainingArguments"),
    ],
)
def test_a_front_end_refuses_another_version_before_it_imports_it(
    name: str, version: str, module: str, public: str
) -> None:
    printed = run_code(REFUSED.format(name=name, version=version, module=module, public=public)).stdout
    allowed = f"{name}{ranges.requirements_of(name)[0].specifier}"
    assert f"{name} {version} is installed, and requestzero " in printed
    assert f'allows {allowed}. Run: pip install "{allowed}" | False' in printed


@pytest.mark.parametrize("version", ["2.6.6", "2.6.6+local", None])
def test_what_is_allowed_or_missing_is_not_refused(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    pretend_installed(monkeypatch, "lightning", version)
    require_allowed("lightning")


def test_several_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, "accelerate", "0.34")
    pretend_installed(monkeypatch, "transformers", "6.0")
    with pytest.raises(ImportError, match=r"accelerate 0\.34 is installed and transformers 6\.0 is installed, and"):
        require_allowed("accelerate", "transformers")


def test_without_metadata_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, "lightning", "2.5.6")
    monkeypatch.setattr(ranges, "DISTRIBUTION", "requestzero-is-not-here")
    ranges.requirements.cache_clear()
    require_allowed("lightning")
