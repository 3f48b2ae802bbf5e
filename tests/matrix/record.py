"""Write down the sources of DeepSpeed that were proved.

    python tests/matrix/record.py                          # again, for the releases that are recorded
    python tests/matrix/record.py 0.19.9 path/to/deepspeed # and one more, once `doctor --verify` and the tests pass

The definitions are those of ``upstream_contract.json``. Releases without a path are fetched from the package index.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import asdict
from pathlib import Path

from packaging.version import Version

from requestzero.environment.proved_sources import (
    RECORD,
    STAGE_3,
    ProvedSources,
    file_hash,
    fingerprints,
    path_of,
    proved_sources,
)

NOT_PROVED = {"0.19.6": STAGE_3, "0.19.7": STAGE_3}
"""Modules in which a release was not proved."""
CONTRACT = Path(__file__).parents[1] / "upstream_contract.json"


def definitions() -> list[str]:
    """Return the definitions of DeepSpeed that are overridden or relied on."""
    return [name for name in json.loads(CONTRACT.read_text()) if name.startswith(("deepspeed.", "deepspeed:"))]


def record_of(packages: dict[str, Path]) -> ProvedSources:
    """Return the record of releases, by version the folder of the package."""
    names = definitions()
    versions = sorted(packages, key=Version)
    modules: dict[str, list[str]] = {name.partition(":")[0]: [] for name in sorted(names)}
    variants: dict[str, dict[str, list[str]]] = {name: {} for name in sorted(names)}
    for version in versions:
        left_out = NOT_PROVED.get(version, ())
        for module in modules.keys() - set(left_out):
            found = file_hash(path_of(packages[version], module))
            modules[module].extend([found] if found not in modules[module] else [])
        proved = [name for name in names if name.partition(":")[0] not in left_out]
        for name, fingerprint in fingerprints(packages[version], proved).items():
            variants[name].setdefault(fingerprint, []).append(version)
    return ProvedSources(versions, modules, variants)


def fetch(version: str, folder: Path) -> Path:
    """Return the folder of the package in the release's source distribution."""
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-q"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(folder), f"deepspeed=={version}"]
    subprocess.run(command, check=True)
    with tarfile.open(folder / f"deepspeed-{version}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / f"deepspeed-{version}" / "deepspeed"


def main(arguments: list[str]) -> None:
    given = dict(zip(arguments[::2], map(Path, arguments[1::2]), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        others = {
            version: fetch(version, Path(folder)) for version in proved_sources().versions if version not in given
        }
        record = record_of(others | given)
    RECORD.write_text(json.dumps(asdict(record), indent=1) + "\n")
    print(f"{', '.join(record.versions)}: {len(record.definitions)} definitions")


if __name__ == "__main__":
    main(sys.argv[1:])
