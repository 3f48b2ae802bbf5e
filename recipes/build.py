"""Build tokenizer, data and model from the configuration: plain arguments go in, no configuration object."""

from __future__ import annotations

from typing import Any

from requestzero import PlannedLoader
from requestzero.data.packing import check_texts_stay_apart
from requestzero.recipes.collate import make_collate
from requestzero.recipes.data import RequestData, load_requests
from requestzero.recipes.errors import UsageError
from requestzero.recipes.model import ByteDecoder, load_hugging_face
from requestzero.recipes.tokenizer import ByteTokenizer, HuggingFaceTokenizer, TextTokenizer


def build_tokenizer(model: Any) -> TextTokenizer:
    """Return the tokenizer that goes with the ``model`` section."""
    return ByteTokenizer() if model.path is None else HuggingFaceTokenizer(model.path)


def build_data(cfg: Any, tokenizer: TextTokenizer, world_size: int) -> RequestData:
    """Return the requests of the ``data`` section.

    Raises:
        UsageError: see :func:`~requestzero.recipes.data.load_requests`.
    """
    sequences_per_round = sequences_that_always_fit(cfg.data) * world_size
    return load_requests(
        cfg.data.path,
        tokenizer,
        sequence_length=cfg.data.sequence_length,
        longest_request=(cfg.data.longest_request or 0) * sequences_per_round,
        skip_bad_lines=cfg.data.on_bad_line == "skip",
        on_long_text=cfg.data.on_long_text,
    )


def sequences_that_always_fit(data: Any) -> int:
    """Return the number of sequences that fit into a micro-batch whatever their lengths are."""
    return data.micro_batch_size or data.tokens_per_micro_batch // data.sequence_length


def requests_per_update(data: Any) -> int | None:
    """Return the requests in an update window, or ``None`` where they are counted in tokens."""
    return None if data.tokens_per_update is not None else data.requests_per_update or 4


def build_loader(cfg: Any, data: RequestData, tokenizer: TextTokenizer) -> PlannedLoader:
    """Return the loader of ``data``: micro-batches for this rank, with the ends of update windows marked."""
    return PlannedLoader(
        data.requests,
        make_collate(tokenizer.pad_id, cfg.data.layout),
        lengths=lambda request: [len(sequence.input_ids) for sequence in data.requests[request]],
        ids=data.ids,
        tokens_per_micro_batch=cfg.data.tokens_per_micro_batch,
        max_sequences=cfg.data.micro_batch_size,
        requests_per_update=requests_per_update(cfg.data),
        tokens_per_update=cfg.data.tokens_per_update,
        naive_sequences=sequences_that_always_fit(cfg.data),
        shuffle=cfg.data.shuffle,
        seed=cfg.seed,
        **({"num_workers": cfg.data.num_workers} if cfg.data.num_workers else {}),
    )


def build_model(cfg: Any) -> Any:
    """Return the model of the ``model`` section, in fp32 and with the current random seed.

    Raises:
        UsageError: the sequences are to be packed, and the model would attend from one to another.
    """
    model = cfg.model
    if model.path is not None:
        return _checked(load_hugging_face(model.path), cfg.data.layout)
    return ByteDecoder(
        ByteTokenizer.vocabulary, model.width, model.layers, model.heads, longest=cfg.data.sequence_length
    )


def _checked(model: Any, layout: str) -> Any:
    if layout == "packed":
        try:
            check_texts_stay_apart(model)
        except ValueError as error:
            raise UsageError([f"data.layout='packed' is not allowed with this model: {error}"]) from None
    return model
