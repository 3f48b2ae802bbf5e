"""Things that several recipe tests need."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.tiny_llama import tiny_llama


@pytest.fixture(scope="session")
def hugging_face_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny Llama of random weights and a tokenizer of single characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: number for number, token in enumerate(["</s>", "<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    path = tmp_path_factory.mktemp("hugging face model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>").save_pretrained(path)
    tiny_llama(len(vocabulary)).save_pretrained(path)
    return path
