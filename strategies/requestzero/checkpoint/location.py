"""Where a checkpoint lies: the folder that a front end loads, and DeepSpeed's own folder in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from requestzero.zero.checkpoint.files import find_tag


@dataclass(frozen=True)
class Location:
    """One checkpoint of an engine, or of a front end that keeps files of its own beside it."""

    root: Path
    """What is loaded: the folder that holds the tag's."""
    tag: str

    @property
    def folder(self) -> Path:
        """The tag's folder, in which DeepSpeed's files are."""
        return self.root / self.tag

    def model_files(self) -> list[Path]:
        """Return the files of module and counters: one, or at stage 3 one a rank."""
        return model_files(self.folder)


def model_files(folder: Path) -> list[Path]:
    """Return DeepSpeed's files of module and counters in a tag's folder, that of rank 0 first."""
    return sorted(folder.glob("*mp_rank_*model_states.pt"), key=lambda path: (len(path.name), path.name))


def locate(path: Path, tag: str | None = None) -> Location:
    """Return the checkpoint at ``path``.

    Args:
        path: a folder of checkpoints (of an engine, Lightning, Accelerate or Trainer), or a tag's own folder.
        tag: the tag; by default what the file ``latest`` names.

    Raises:
        FileNotFoundError: there is none.
    """
    path = path.resolve()
    if tag is None and model_files(path):
        return Location(path.parent, path.name)
    tag = tag or find_tag(path) or find_tag(path, universal=True)
    if tag is None:
        raise FileNotFoundError(
            f"{path} is no checkpoint of DeepSpeed: it has neither a file 'latest' nor *_model_states.pt. Give the "
            "folder that save_checkpoint, ModelCheckpoint, save_state or Trainer has written."
        )
    found = Location(path, tag)
    if not found.model_files():
        raise FileNotFoundError(f"{found.folder} has no *_model_states.pt, so that it is no checkpoint of DeepSpeed.")
    return found
