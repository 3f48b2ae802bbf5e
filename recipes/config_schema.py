"""The typed schema of the recipes' configuration: every key with its type, default, meaning and limits.

The keys of ``zero`` and ``overflow`` follow from :mod:`requestzero.config.options`, which owns them. The YAML files in
``requestzero.configs`` are small deltas on this schema.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from requestzero.config.option_record import FrontEnd, option, options_of
from requestzero.config.options import OverflowSettings, RequestZeROSettings
from requestzero.config.precision import PRECISIONS
from requestzero.config.validation import Choice, Number, Rule
from requestzero.planning.budget import LAYOUTS


def _config_of(settings: type, name: str) -> type:
    """Return a dataclass with the recipes' options of a settings class, not frozen, so that OmegaConf may change it."""
    options = options_of(settings)
    made = [
        (item.name, options[item.name].type, field(default=item.default, metadata=item.metadata))
        for item in dataclasses.fields(settings)
        if item.name in options and FrontEnd.RECIPES in options[item.name].front_ends
    ]
    return dataclasses.make_dataclass(name, made, namespace={"__module__": __name__})


def limited(default: Any, rule: Rule) -> Any:
    """Return a field that only the recipes have, with a rule for its values."""
    return option(default, rule, front_ends=(FrontEnd.RECIPES,))


def words(*values: str) -> Choice:
    """Return the rule for one of a few words."""
    return Choice(values, quoted=False)


ZeroConfig = _config_of(RequestZeROSettings, "ZeroConfig")
OverflowConfig = _config_of(OverflowSettings, "OverflowConfig")


@dataclass
class PrecisionConfig:
    """Precision of the model."""

    mode: str = limited("bf16-true", words(*PRECISIONS))
    """Lightning's name of the precision. ``bf16-true``: a bf16 model with fp32 masters."""
    matmuls: str = limited("auto", words("auto", "model", "fp32"))
    """Computation of a 16-bit model's matrix products on the CPU: in the ``model``'s dtype, or in ``fp32`` with results
    and gradients rounded to the model's dtype. ``auto`` measures which is faster, and says so. GPUs use the model's."""


@dataclass
class ModelConfig:
    """The recipe's own byte-level decoder, or a local Hugging Face causal LM."""

    path: str | None = None
    """Directory of a saved Hugging Face causal LM with its tokenizer; ``null``: the byte-level decoder."""
    width: int | None = limited(None, Number(lowest=1))
    """Byte-level decoder: size of a token's vector; a multiple of ``heads``."""
    layers: int | None = limited(None, Number(lowest=1))
    """Byte-level decoder: number of blocks."""
    heads: int | None = limited(None, Number(lowest=1))
    """Byte-level decoder: attention heads per block."""


@dataclass
class DataConfig:
    """Source of the requests, how they are cut, and how they are planned over the ranks."""

    path: str | None = None
    """JSONL file with one request a line; ``null``: the embedded text, Python's language reference."""
    longest_request: int | None = limited(None, Number(lowest=1))
    """Embedded text: it is cut into requests of 1 to about this many micro-batches of the longest sequences."""
    on_bad_line: str = limited("stop", words("stop", "skip"))
    """JSONL: ``stop`` names all bad lines and ends; ``skip`` leaves them out and lists them at the end."""
    sequence_length: int = limited(128, Number(lowest=2))
    """Maximum number of tokens per sequence."""
    on_long_text: str = limited("cut", words("cut", "truncate", "skip", "stop"))
    """A text with more tokens than that: ``cut`` makes several sequences of it; ``truncate`` keeps its beginning;
    ``skip`` leaves it out and lists it at the end; ``stop`` names all of them and ends."""
    tokens_per_micro_batch: int = limited(512, Number(lowest=2))
    """Maximum number of tokens that a rank computes in a micro-batch, padding included."""
    micro_batch_size: int | None = limited(None, Number(lowest=1))
    """Maximum number of sequences per rank and micro-batch, in addition to the tokens; ``null``: no such limit."""
    layout: str = limited("padded", words(*LAYOUTS))
    """``padded``: a row for each sequence. ``packed``: all in one row, without padding; not every model can."""
    requests_per_update: int | None = limited(None, Number(lowest=1))
    """Requests in an update window; ``null``: 4, unless ``tokens_per_update`` is given."""
    tokens_per_update: int | None = limited(None, Number(lowest=1))
    """An update window ends with the request that makes it so many tokens, over all ranks."""
    num_workers: int = limited(0, Number(lowest=0))
    """Worker processes per rank that make micro-batches; 0: the training process makes them."""
    shuffle: bool = True
    """Shuffle the requests in each epoch."""


@dataclass
class OptimizerConfig:
    """AdamW and its learning rate."""

    name: str = limited("adamw", words("adamw", "cpu_adam"))
    """``adamw``: PyTorch's. ``cpu_adam``: DeepSpeed's, for CPU offload; it needs a C++ compiler and ninja."""
    lr: float = limited(1e-3, Number(above=0))
    """Learning rate after the warm-up."""
    weight_decay: float = limited(0.01, Number(lowest=0))
    """Decoupled weight decay."""
    warmup_steps: int = limited(0, Number(lowest=0))
    """Applied updates over which the learning rate rises linearly to ``lr``."""


@dataclass
class TrainerConfig:
    """Length of the run, its devices, and what it keeps."""

    max_steps: int = limited(100, Number(lowest=1))
    """Updates; the training data is repeated as often as needed."""
    accelerator: str = limited("auto", words("auto", "cpu", "gpu"))
    """``auto``: GPUs where there are any."""
    devices: int | None = limited(None, Number(lowest=1))
    """Ranks per machine; ``null``: all GPUs, or two CPU ranks."""
    num_nodes: int = limited(1, Number(lowest=1))
    """Machines."""
    gradient_clip_val: float | None = limited(None, Number(above=0))
    """Largest norm of the window's mean gradient; ``null``: not clipped."""
    log_every_n_steps: int = limited(1, Number(lowest=1))
    """Updates between two lines of the CSV and TensorBoard logs."""
    checkpoint_every_n_steps: int | None = limited(None, Number(lowest=1))
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
    seed: int = limited(0, Number(lowest=0))
    """Seed of the initial weights and of the order of the requests."""


def register_schema() -> None:
    """Register the schema with Hydra, as ``schema`` in a configuration's defaults list."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=RecipeConfig, provider="requestzero")
