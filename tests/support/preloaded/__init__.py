"""``python`` for programs of the tests, without the seconds in which each of their processes would import DeepSpeed.

:mod:`support.preloaded.server` imports once and forks; the command that :func:`executable` returns is a small client of
it, and takes the arguments, files, environment and signals of ``python``. What a program starts with ``sys.executable``
(the ranks of a launcher, spawned workers) is forked as well.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from support.preloaded import client, server


@functools.cache
def executable() -> str:
    """Return the command; the server ends with this process. With GPUs it is ``python``: a fork cannot use them."""
    if torch.cuda.is_available():
        return sys.executable
    folder = Path(_folder().name)
    subprocess.Popen(
        [sys.executable, server.__file__, str(folder / "socket"), str(folder / "python")],
        stdin=subprocess.PIPE,  # whose end tells the server that this process has ended
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    command = folder / "python"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -SEs "{client.__file__}" "{folder / "socket"}" "$@"\n')
    command.chmod(0o755)
    return str(command)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="preloaded-")
