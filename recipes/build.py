"""Tokenizer, data and model from the configuration: plain arguments go in, no configuration object."""

from __future__ import annotations

from typing import Any

from requestzero import RequestLoader
from requestzero.labels import count_trained
from requestzero.recipes.collate import make_collate
from requestzero.recipes.data import RequestData, load_requests
from requestzero.recipes.model import ByteDecoder, load_hugging_face
from requestzero.recipes.tokenizer import ByteTokenizer, HuggingFaceTokenizer, TextTokenizer


def build_tokenizer(model: Any) -> TextTokenizer:
    """The tokenizer that goes with the ``model`` section."""
    return ByteTokenizer() if model.path is None else HuggingFaceTokenizer(model.path)


def build_data(cfg: Any, tokenizer: TextTokenizer, world_size: int) -> RequestData:
    """The requests of the ``data`` section.

    Raises:
        UsageError: see :func:`~requestzero.recipes.data.load_requests`.
    """
    sequences_per_round = cfg.data.micro_batch_size * world_size
    return load_requests(
        cfg.data.path,
        tokenizer,
        sequence_length=cfg.data.sequence_length,
        longest_request=(cfg.data.longest_request or 0) * sequences_per_round,
        skip_bad_lines=cfg.data.on_bad_line == "skip",
    )


def build_loader(cfg: Any, data: RequestData, tokenizer: TextTokenizer) -> RequestLoader:
    """The micro-batches of ``data``, for this rank."""
    return RequestLoader(
        data.requests,
        make_collate(tokenizer.pad_id),
        ids=data.ids,
        micro_batch_size=cfg.data.micro_batch_size,
        weight=count_trained,
        shuffle=cfg.data.shuffle,
        seed=cfg.seed,
    )


def build_model(cfg: Any) -> Any:
    """The model of the ``model`` section, in fp32 and with the current random seed."""
    model = cfg.model
    if model.path is not None:
        return load_hugging_face(model.path)
    return ByteDecoder(
        ByteTokenizer.vocabulary, model.width, model.layers, model.heads, longest=cfg.data.sequence_length
    )
