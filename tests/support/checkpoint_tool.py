"""The checkpoint tool, as tests call it on a rank."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any


def command(*arguments: str) -> tuple[int, str, str]:
    """Run the command; its exit status, standard output and standard error."""
    from requestzero.checkpoint.__main__ import main

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        status = main(list(arguments))
    return status, out.getvalue(), error.getvalue()


def inspected(path: str) -> tuple[Any, ...]:
    """Front end, stage, ranks and updates of a checkpoint, and whether it is whole."""
    from requestzero.checkpoint.contents import read_contents
    from requestzero.checkpoint.location import locate

    found = read_contents(locate(Path(path)))
    return found.written_by, found.stage, found.ranks, found.applied_updates, found.is_whole
