"""The typed schema of the recipes' configuration: every key with its type, default, meaning and limits.

The keys of ``zero`` and ``overflow`` are those of :mod:`requestzero.config.settings`, which owns them. The
YAML files in ``requestzero.configs`` are small deltas on this schema.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from requestzero.config.precision import PRECISIONS
from requestzero.config.settings import OverflowSettings, RequestZeROSettings
from requestzero.planning.budget import LAYOUTS


def option(default: Any, **limits: Any) -> Any:
    """A field with limits: ``at_least`` (number), ``above`` (number) or ``allowed`` (values)."""
    return field(default=default, metadata=limits)


def _config_of(settings: type, name: str) -> type:
    """A dataclass with the plain options of a settings class, not frozen, so that OmegaConf may change it."""
    hints = get_type_hints(settings)
    plain = [item for item in dataclasses.fields(settings) if item.default is not dataclasses.MISSING]
    options = [(item.name, hints[item.name], field(default=item.default)) for item in plain]
    return dataclasses.make_dataclass(name, options, namespace={"__module__": __name__})


ZeroConfig = _config_of(RequestZeROSettings, "ZeroConfig")
OverflowConfig = _config_of(OverflowSettings, "OverflowConfig")


@dataclass
class PrecisionConfig:
    """What the model computes in."""

    mode: str = option("bf16-true", allowed=tuple(PRECISIONS))
    """Lightning's name of the precision. ``bf16-true``: a bf16 model with fp32 masters."""


@dataclass
class ModelConfig:
    """The recipe's own byte-level decoder, or a local Hugging Face causal LM."""

    path: str | None = None
    """Directory of a saved Hugging Face causal LM with its tokenizer; ``null``: the byte-level decoder."""
    width: int | None = option(None, at_least=1)
    """Byte-level decoder: size of a token's vector; a multiple of ``heads``."""
    layers: int | None = option(None, at_least=1)
    """Byte-level decoder: number of blocks."""
    heads: int | None = option(None, at_least=1)
    """Byte-level decoder: attention heads per block."""


@dataclass
class DataConfig:
    """Where requests come from, how they are cut, and how they are planned over the ranks."""

    path: str | None = None
    """JSONL file with one request a line; ``null``: the embedded text, Python's language reference."""
    longest_request: int | None = option(None, at_least=1)
    """Embedded text: it is cut into requests of 1 to about this many micro-batches of the longest sequences."""
    on_bad_line: str = option("stop", allowed=("stop", "skip"))
    """JSONL: ``stop`` names all bad lines and ends; ``skip`` leaves them out and lists them at the end."""
    sequence_length: int = option(128, at_least=2)
    """Tokens per sequence at most."""
    on_long_text: str = option("cut", allowed=("cut", "truncate", "skip", "stop"))
    """A text with more tokens than that: ``cut`` makes several sequences of it; ``truncate`` keeps its beginning;
    ``skip`` leaves it out and lists it at the end; ``stop`` names all of them and ends."""
    tokens_per_micro_batch: int = option(512, at_least=2)
    """Tokens that a micro-batch has a rank compute at most, padding included."""
    micro_batch_size: int | None = option(None, at_least=1)
    """Sequences per rank and micro-batch at most, too; ``null``: as many as the tokens allow."""
    layout: str = option("padded", allowed=LAYOUTS)
    """``padded``: a row for each sequence. ``packed``: all in one row, without padding; not every model can."""
    requests_per_update: int | None = option(None, at_least=1)
    """Requests in an update window; ``null``: 4, unless ``tokens_per_update`` is given."""
    tokens_per_update: int | None = option(None, at_least=1)
    """An update window ends with the request that makes it so many tokens, over all ranks."""
    num_workers: int = option(0, at_least=0)
    """Processes per rank that make micro-batches; 0: the training process does."""
    shuffle: bool = True
    """Whether the requests are shuffled in each epoch."""


@dataclass
class OptimizerConfig:
    """AdamW and its learning rate."""

    name: str = option("adamw", allowed=("adamw", "cpu_adam"))
    """``adamw``: PyTorch's. ``cpu_adam``: DeepSpeed's, for CPU offload; it needs a C++ compiler and ninja."""
    lr: float = option(1e-3, above=0)
    """Learning rate after the warm-up."""
    weight_decay: float = option(0.01, at_least=0)
    """Decoupled weight decay."""
    warmup_steps: int = option(0, at_least=0)
    """Applied updates over which the learning rate rises linearly to ``lr``."""


@dataclass
class TrainerConfig:
    """How long, where, and what is kept."""

    max_steps: int = option(100, at_least=1)
    """Updates; the training data is repeated as often as needed."""
    accelerator: str = option("auto", allowed=("auto", "cpu", "gpu"))
    """``auto``: GPUs where there are any."""
    devices: int | None = option(None, at_least=1)
    """Ranks per machine; ``null``: all GPUs, or two CPU ranks."""
    num_nodes: int = option(1, at_least=1)
    """Machines."""
    gradient_clip_val: float | None = option(None, above=0)
    """Largest norm of the window's mean gradient; ``null``: not clipped."""
    log_every_n_steps: int = option(1, at_least=1)
    """Updates between two lines of the CSV and TensorBoard logs."""
    checkpoint_every_n_steps: int | None = option(None, at_least=1)
    """Updates between checkpoints; there is always one after the last update."""
    resume_from: str | None = None
    """Checkpoint to continue from."""


@dataclass
class RecipeConfig:
    """The whole configuration."""

    zero: ZeroConfig = field(default_factory=ZeroConfig)  # type: ignore[valid-type]
    overflow: OverflowConfig = field(default_factory=OverflowConfig)  # type: ignore[valid-type]
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    seed: int = option(0, at_least=0)
    """Chooses the initial weights and the order of the requests."""


def register_schema() -> None:
    """Make the schema known to Hydra, as ``schema`` in a configuration's defaults list."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=RecipeConfig, provider="requestzero")
