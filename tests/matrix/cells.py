"""The environments that releases are proved in: each end of each range, and what lies between."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cell:
    """One environment: other packages than those of ``constraints.txt``."""

    name: str
    packages: dict[str, str] = field(default_factory=dict)
    """Version by package. They are laid over the environment that runs the script, without their dependencies."""
    python: str | None = None
    """Version of Python; given, the cell is an environment of its own, with all else as pip chooses it."""
    tests: str = "not run"
    """The entry of the table where the script has not run its tests."""


def versions(torch: str, deepspeed: str, lightning: str, accelerate: str, transformers: str) -> dict[str, str]:
    return {
        "torch": torch,
        "deepspeed": deepspeed,
        "lightning": lightning,
        "accelerate": accelerate,
        "transformers": transformers,
    }


CELLS = [
    Cell("pinned", tests="CI runs `make test`"),
    Cell("oldest", versions("2.9.0", "0.19.6", "2.6.0", "1.13.0", "5.18.0"), python="3.10"),
    Cell("between", versions("2.14.1", "0.19.7", "2.6.0", "1.14.0", "5.24.0"), python="3.12"),
    Cell("newest", versions("2.15.0", "0.19.8", "2.6.6", "1.15.0", "5.24.0"), python="3.13"),
    Cell("DeepSpeed 0.19.6", {"deepspeed": "0.19.6"}),
    Cell("DeepSpeed 0.19.7", {"deepspeed": "0.19.7"}),
    Cell("front ends, oldest", {"lightning": "2.6.0", "accelerate": "1.13.0", "transformers": "5.18.0"}),
]
