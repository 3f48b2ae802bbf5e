"""The language models of the recipes: a small decoder over bytes, or a local Hugging Face causal LM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from requestzero.data.labels import IGNORED_LABEL


class ByteDecoder(nn.Module):
    """A pre-norm transformer decoder with learned positions, called as Hugging Face models are.

    Args:
        vocabulary: Number of token ids.
        width: Size of a token's vector; a multiple of ``heads``.
        layers: Number of blocks.
        heads: Attention heads per block.
        longest: Positions, the longest sequence in tokens.
    """

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, longest: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(_initialize)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None, **_: Any
    ) -> SimpleNamespace:
        """Return logits of shape ``[sequences, tokens, vocabulary]`` as ``.logits``.

        ``attention_mask`` is not needed: padding is on the right, where a causal decoder does not look. With
        ``position_ids`` the sequences are packed: each begins at position 0, and none attends to another. The
        cumulative lengths that come with them say the same, and are for flash attention.
        """
        mask = None
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        else:
            mask = _packed_mask(position_ids)
        hidden = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return SimpleNamespace(logits=self.head(self.norm(hidden)))


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = hidden + self._attend(self.attention_norm(hidden), mask)
        return hidden + self.feed_forward(hidden)

    def _attend(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        sequences, tokens, width = hidden.shape
        parts = self.attention_in(hidden).view(sequences, tokens, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
        return self.attention_out(attended.transpose(1, 2).reshape(sequences, tokens, width))


def _packed_mask(position_ids: Tensor) -> Tensor:
    """Return the mask, bool of shape ``[rows, 1, tokens, tokens]``: attend within a sequence, and not ahead."""
    sequence = (position_ids == 0).cumsum(-1)
    return (sequence[:, None, :, None] == sequence[:, None, None, :]).tril()


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def load_hugging_face(path: str) -> Any:
    """Load the causal LM saved in the directory ``path``; nothing is downloaded."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=torch.float32)
    model.config.use_cache = False
    return model.train()


def next_token_loss(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of a micro-batch, summed over its trained tokens (nats), and their number.

    Exactly zero where nothing is trained on, as in a filler, with gradients of zero for every parameter.
    """
    logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
    labels = inputs["labels"][:, 1:]
    total = functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    tokens = (labels != IGNORED_LABEL).sum()
    return total, tokens


def micro_batch_loss(total: Tensor, tokens: Tensor, normalization: str) -> Tensor:
    """Return the loss for ``backward``: the mean over tokens with ``"mean"``, the sum with any other normalization."""
    return total / tokens.clamp(min=1) if normalization == "mean" else total
