"""Former names of modules, one file each, kept for one release with a ``DeprecationWarning``.

``requestzero.__path__`` includes this folder, so that ``import requestzero.collate`` finds ``collate.py`` here.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module


def moved(former: str, current: str) -> None:
    """Put the module ``current`` in the place of the module ``former`` that is being imported, and warn."""
    warnings.warn(f"{former} has moved: import {current} instead.", DeprecationWarning, stacklevel=3)
    sys.modules[former] = import_module(current)
