"""Padded and packed inputs: what they look like, and that they train the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DataCollatorWithFlattening, LlamaForCausalLM

from requestzero.data.collate import PackedCollate, PaddedCollate
from requestzero.data.labels import count_trained
from requestzero.data.packing import check_texts_stay_apart
from requestzero.recipes.model import ByteDecoder
from support.tiny_llama import tiny_llama

TEXTS = [
    {"input_ids": [5, 6, 7, 8, 9], "labels": [5, 6, -100, 8, 9]},
    {"input_ids": [3], "labels": [3]},
    {"input_ids": [11, 12, 13], "labels": [11, 12, 13]},
]


def test_packed_inputs_are_those_of_transformers() -> None:
    ours = PackedCollate()(TEXTS)
    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True)([dict(text) for text in TEXTS])
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == ours[name].dtype, name
            assert torch.equal(value.flatten(), ours[name].flatten()), name
        else:
            assert value == ours[name], name
    assert ours["labels"].tolist() == [[-100, 6, -100, 8, 9, -100, -100, 12, 13]]
    assert count_trained(ours) == count_trained(PaddedCollate()(TEXTS)) == 5


def test_padded_inputs_are_padded_on_the_right() -> None:
    inputs = PaddedCollate(pad_id=99)([{"input_ids": torch.tensor([1, 2])}, {"input_ids": [3]}])
    assert inputs["input_ids"].tolist() == [[1, 2], [3, 99]]
    assert inputs["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert inputs["labels"].tolist() == [[-100, 2], [-100, -100]]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ([1, 2], TypeError, "A text is a list without 'input_ids'"),
        ({"input_ids": [1, 2], "labels": [1]}, ValueError, "A text has 2 input_ids and 1 labels"),
        ({"input_ids": []}, ValueError, "A text has 0 input_ids and 0 labels"),
    ],
)
def test_bad_texts_are_refused(text: Any, error: type[Exception], message: str) -> None:
    for collate in (PaddedCollate(), PackedCollate()):
        with pytest.raises(error, match=message):
            collate([text])


def llama(attention: str = "sdpa") -> LlamaForCausalLM:
    torch.manual_seed(0)
    return tiny_llama(num_hidden_layers=2, attn_implementation=attention, use_cache=False)


def byte_decoder() -> ByteDecoder:
    torch.manual_seed(0)
    return ByteDecoder(32, 16, 2, 2, longest=16)


def gradients(model: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    labels = inputs.pop("labels")
    logits = model(**inputs).logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("make", [llama, lambda: llama("eager"), byte_decoder], ids=["sdpa", "eager", "bytes"])
def test_packed_and_padded_texts_give_the_same_gradients(make: Any) -> None:
    """Within fp32 rounding, and neither with a label that a text gives away to the one before."""
    padded, packed = (gradients(make(), collate(TEXTS)) for collate in (PaddedCollate(), PackedCollate()))
    for one, other in zip(padded, packed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert any(bool(gradient.any()) for gradient in padded)


def test_a_model_that_attends_across_texts_is_refused() -> None:
    check_texts_stay_apart(llama())
    check_texts_stay_apart(byte_decoder())
    cached = llama()
    cached.config.use_cache = True
    with pytest.raises(ValueError, match=r"LlamaForCausalLM attends across packed texts: .*use_cache = False"):
        check_texts_stay_apart(cached)

    class Unbounded(torch.nn.Module):
        """Takes the names, and leaves the boundaries out."""

        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def forward(self, input_ids: torch.Tensor, **boundaries: Any) -> SimpleNamespace:
            return self.model(input_ids=input_ids)

    model = Unbounded().train()
    with pytest.raises(ValueError, match="Unbounded attends across packed texts"):
        check_texts_stay_apart(model)
    assert model.training
