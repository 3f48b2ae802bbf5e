"""The environments that releases are proved in: each end of each range, and what lies between."""

from __future__ import annotations

from dataclasses import dataclass, field

DEEPSPEED = ("tests/zero", "tests/doctor", "tests/environment")
LIGHTNING = ("tests/lightning", "tests/front_ends")
ACCELERATE = ("tests/accelerate", "tests/front_ends")


@dataclass(frozen=True)
class Cell:
    """One environment: other packages than those of ``constraints.txt``, and the tests that concern them."""

    name: str
    packages: dict[str, str] = field(default_factory=dict)
    """Version by package. They are laid over the environment that runs the script, without their dependencies."""
    tests: tuple[str, ...] = ()
    """Folders of tests beside the self-test."""
    python: str | None = None
    """Version of Python; given, the cell is an environment of its own with all packages."""


CELLS = [
    Cell("pinned", tests=("tests",)),
    Cell("DeepSpeed 0.19.7", {"deepspeed": "0.19.7"}, DEEPSPEED),
    Cell("DeepSpeed 0.19.6", {"deepspeed": "0.19.6"}, DEEPSPEED),
    Cell(
        "front ends, oldest",
        {"lightning": "2.6.0", "accelerate": "1.13.0", "transformers": "5.18.0"},
        (
            "tests/accelerate/test_loop.py",
            "tests/accelerate/test_trainer.py",
            "tests/lightning/test_windows.py",
            "tests/lightning/test_parity_with_ddp.py",
        ),
    ),
    Cell("Lightning 2.6.0", {"lightning": "2.6.0"}, LIGHTNING),
    Cell("Accelerate 1.14", {"accelerate": "1.14.0"}, ACCELERATE),
    Cell("Accelerate 1.13", {"accelerate": "1.13.0"}, ACCELERATE),
    Cell("transformers 5.20", {"transformers": "5.20.0"}, ("tests/accelerate/test_trainer.py",)),
    Cell("transformers 5.18", {"transformers": "5.18.0"}, ("tests/accelerate/test_trainer.py",)),
    Cell(
        "oldest",
        {
            "torch": "2.9.0",
            "deepspeed": "0.19.6",
            "lightning": "2.6.0",
            "accelerate": "1.13.0",
            "transformers": "5.20.0",
        },
        ("tests/zero",),
        python="3.10",
    ),
    Cell("Python 3.12", {"torch": "2.14.1", "deepspeed": "0.19.8"}, ("tests/zero",), python="3.12"),
    Cell("newest", {"torch": "2.15.0", "deepspeed": "0.19.8"}, ("tests/zero",), python="3.13"),
]
