"""The recipe's decoder and loss against plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional

from requestzero.recipes.model import ByteDecoder, load_hugging_face, micro_batch_loss, next_token_loss


def inputs_of(ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def test_no_token_sees_a_later_one() -> None:
    torch.manual_seed(0)
    model = ByteDecoder(258, 32, 2, 4, longest=16)
    ids = torch.randint(0, 256, (2, 10))
    changed = ids.clone()
    changed[:, 6:] = 1
    before, after = model(ids).logits, model(changed).logits
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_the_loss_is_the_sum_over_trained_tokens() -> None:
    torch.manual_seed(0)
    model = ByteDecoder(258, 32, 1, 4, longest=16)
    ids = torch.randint(0, 256, (2, 6))
    labels = ids.clone()
    labels[0, :4] = -100
    loss, tokens = next_token_loss(model, inputs_of(ids, labels))
    log_probabilities = functional.log_softmax(model(ids).logits.double(), dim=-1)
    picked = [(0, 4), (0, 5), *((1, place) for place in range(1, 6))]
    expected = -sum(log_probabilities[row, place - 1, ids[row, place]] for row, place in picked)
    assert int(tokens) == len(picked)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    assert micro_batch_loss(loss, tokens, "token") is micro_batch_loss(loss, tokens, "sum") is loss
    assert torch.equal(micro_batch_loss(loss, tokens, "mean"), loss / len(picked))
    assert micro_batch_loss(loss * 0, tokens * 0, "mean") == 0


def test_a_hugging_face_model_has_the_same_loss_as_by_itself(hugging_face_model: Path) -> None:
    model = load_hugging_face(str(hugging_face_model))
    ids = torch.randint(2, 90, (2, 6))
    loss, tokens = next_token_loss(model, inputs_of(ids, ids))
    torch.testing.assert_close(loss / tokens, model(input_ids=ids, labels=ids).loss)
