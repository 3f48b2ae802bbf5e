"""Let DeepSpeed find the ``ninja`` that was installed with it."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec


def put_ninja_on_path() -> None:
    """Append the directory of the ``ninja`` package's program to this process's ``PATH`` if it finds none.

    DeepSpeed compiles operators when they are first used (on the CPU as soon as ranks are joined) and starts
    ``ninja`` by name. That fails where an environment's Python is started by its path, without activating the
    environment. Nothing is changed where ``ninja`` is found, or where there is no package to take it from.
    """
    if shutil.which("ninja") is not None or find_spec("ninja") is None:
        return
    import ninja

    os.environ["PATH"] = os.pathsep.join(filter(None, (os.environ.get("PATH"), ninja.BIN_DIR)))
