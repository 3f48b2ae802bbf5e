"""Places in the checkout and in the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIGS = Path(str(files("requestzero.configs")))
ACCELERATE_CONFIGS = CONFIGS / "accelerate"
