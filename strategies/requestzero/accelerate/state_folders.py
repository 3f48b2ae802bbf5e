"""Folders of ``Accelerator.save_state``: written as a whole, with the loop's place in an open update window.

Written for Accelerate 1.15.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from requestzero.zero.window_checkpoint.replacing import appearing

if TYPE_CHECKING:
    from accelerate import Accelerator

_TALLY = "requestzero_accelerate.json"
_OF_A_STATE = re.compile(
    r"(pytorch_model|model|optimizer|scheduler|sampler|dl_state_dict|random_states_|custom_checkpoint_|scaler)"
    rf".*|zero_to_fp32\.py|latest|{re.escape(_TALLY)}"
)
"""Names that Accelerate and DeepSpeed write into a folder."""


@contextmanager
def state_folder(accelerator: Accelerator, given: Any) -> Iterator[Path]:
    """Give the folder in which to save a state; it is moved to its place at the block's end. Collective.

    Not where it exists and holds anything else than a state: that is written in place.

    Args:
        accelerator: whose project may name folders itself.
        given: ``output_dir``.

    Raises:
        ValueError: the folder that the project names exists.
    """
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming:
        with appearing(Path(given), accelerator.is_main_process, lambda name: bool(_OF_A_STATE.fullmatch(name))) as it:
            yield it
        return
    parent = Path(str(accelerator.project_dir), "checkpoints")
    path = parent / f"checkpoint_{accelerator.save_iteration}"
    if path.exists():
        raise ValueError(
            f"Checkpoint directory {path} ({accelerator.save_iteration}) already exists: set "
            "project_configuration.iteration to the number to go on with."
        )
    with appearing(path, accelerator.is_main_process) as folder:
        project.automatic_checkpoint_naming = False  # or Accelerate names another folder
        try:
            yield folder
        finally:
            project.automatic_checkpoint_naming = True
    if project.total_limit is not None and accelerator.is_main_process:
        for old in _numbered(parent)[: -project.total_limit]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def newest_folder(accelerator: Accelerator) -> Path | None:
    """Return the newest state of a project that names folders itself; ``None`` where there is none."""
    folders = _numbered(Path(str(accelerator.project_dir), "checkpoints"))
    return folders[-1] if folders else None


def _numbered(parent: Path) -> list[Path]:
    found = [path for path in parent.glob("checkpoint_*") if path.name.removeprefix("checkpoint_").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint_")))


def write_tally(folder: Path, tally: dict[str, Any]) -> None:
    """Keep the loop's counts of the open window."""
    (folder / _TALLY).write_text(json.dumps(tally))


def read_tally(folder: Path) -> dict[str, Any] | None:
    """Return what :func:`write_tally` has written; ``None`` in a state of Accelerate's own."""
    file = folder / _TALLY
    return json.loads(file.read_text()) if file.is_file() else None
