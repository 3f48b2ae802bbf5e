"""A Llama of random weights, small enough for a test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def tiny_llama(vocab_size: int = 32, longest: int = 64, **options: Any) -> LlamaForCausalLM:
    """Return the model; the caller seeds its random weights.

    Args:
        vocab_size: number of tokens.
        longest: longest text, in tokens.
        options: more fields of its config, or other sizes.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=vocab_size, max_position_embeddings=longest, **{**SIZES, **options})
    return LlamaForCausalLM(config)
