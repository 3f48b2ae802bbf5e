"""``RequestZeROTrainingArguments`` mixed into a class that changes defaults of ``TrainingArguments``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from requestzero.transformers import RequestZeROTrainingArguments
from support.accelerate_state import reset

CONFIG = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}


@dataclasses.dataclass
class Changed(TrainingArguments):
    """As TRL's: other defaults, a field of its own, and a constructor of its own."""

    learning_rate: float = dataclasses.field(default=1e-6)
    remove_unused_columns: bool = dataclasses.field(default=False)
    longest: int = dataclasses.field(default=7)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.constructed = True


class First(RequestZeROTrainingArguments, Changed):
    pass


class Last(Changed, RequestZeROTrainingArguments):
    pass


class Between(RequestZeROTrainingArguments):
    pass


class OwnWord(Between, Changed):
    pass


@dataclasses.dataclass
class Decorated(RequestZeROTrainingArguments, Changed):
    more: int = 3
    weight_decay: float = 0.25


@dataclasses.dataclass
class DecoratedLast(Changed, RequestZeROTrainingArguments):
    more: int = 3
    weight_decay: float = 0.25


@pytest.fixture(autouse=True)
def _no_state() -> Any:
    reset()
    yield
    reset()


@pytest.mark.parametrize("cls", [First, Last, OwnWord, Decorated, DecoratedLast])
def test_defaults_are_those_of_the_other_class(cls: Any, tmp_path: Path) -> None:
    expected = {field.name: field.default for field in dataclasses.fields(Changed)}
    found = {field.name: field.default for field in dataclasses.fields(cls)}
    added = {"more": 3, "weight_decay": 0.25} if cls in (Decorated, DecoratedLast) else {}
    assert found == {**expected, **added}
    args = cls(output_dir=str(tmp_path), longest=8, deepspeed=CONFIG)
    assert (args.longest, args.learning_rate, args.remove_unused_columns, args.constructed) == (8, 1e-6, False, True)
    assert type(args.deepspeed_plugin).__name__ == "RequestZeROPlugin"
    assert isinstance(args, RequestZeROTrainingArguments)
    assert isinstance(args, Changed)


def test_by_itself_it_has_the_fields_of_training_arguments() -> None:
    names = [field.name for field in dataclasses.fields(RequestZeROTrainingArguments)]
    assert names == [field.name for field in dataclasses.fields(TrainingArguments)]
