"""Text and chats as token ids: bytes for the recipe's own model, a Hugging Face tokenizer for others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from requestzero.recipes.errors import BadLineError

Chat = list[dict[str, str]]
"""Messages with a ``"role"`` and a ``"content"`` each; turns of the role ``"assistant"`` are trained on."""


@dataclass
class Tokens:
    """Token ids of a text or a chat, and for each of them true if it is trained on."""

    ids: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)

    def add(self, ids: list[int], trained: bool) -> None:
        self.ids += ids
        self.trained += [trained] * len(ids)


class TextTokenizer(Protocol):
    """Interface of the tokenizers."""

    pad_id: int

    def encode_text(self, text: str) -> Tokens:
        """Encode all of ``text`` and an end token, trained on."""
        ...

    def encode_chat(self, messages: Chat) -> Tokens:
        """Encode a chat up to its last assistant turn; the assistant's turns are trained on, with their end.

        Raises:
            BadLineError: the chat cannot be written in this model's form.
        """
        ...


class ByteTokenizer:
    """UTF-8 bytes, an end token (256) and a padding token (257)."""

    end_id = 256
    pad_id = 257
    vocabulary = 258

    def encode_text(self, text: str) -> Tokens:
        ids = [*text.encode(), self.end_id]
        return Tokens(ids, [True] * len(ids))

    def encode_chat(self, messages: Chat) -> Tokens:
        return _encode_plain_chat(messages, lambda text: list(text.encode()), [self.end_id])


class HuggingFaceTokenizer:
    """The tokenizer of a local Hugging Face model, with its chat template where it has one."""

    def __init__(self, path: str) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        self.end_ids = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        # Padding is masked and not trained on, so that any id of the vocabulary serves.
        self.pad_id = 0 if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id

    def encode_text(self, text: str) -> Tokens:
        ids = self._encode(text) + self.end_ids
        return Tokens(ids, [True] * len(ids))

    def encode_chat(self, messages: Chat) -> Tokens:
        if self.tokenizer.chat_template is None:
            return _encode_plain_chat(messages, self._encode, self.end_ids)
        tokens, written = Tokens(), ""
        for position, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = self._written(messages[:position], True)
                answered = self._written(messages[: position + 1], False)
                if not (prompt.startswith(written) and answered.startswith(prompt)):
                    raise BadLineError(
                        f"the model's chat template writes the turns before message {position} "
                        "differently once later ones follow, so answers cannot be told from prompts; split it"
                    )
                tokens.add(self._encode(prompt[len(written) :]), False)
                tokens.add(self._encode(answered[len(prompt) :]), True)
                written = answered
        return tokens

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _written(self, messages: Chat, prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        except TemplateError as error:
            raise BadLineError(f"the model's chat template refuses this chat: {error}") from None


def _encode_plain_chat(messages: Chat, encode: Callable[[str], list[int]], end_ids: list[int]) -> Tokens:
    """Encode every turn as ``"role: content"`` and an end token."""
    tokens = Tokens()
    for message in messages:
        tokens.add(encode(f"{message['role']}: "), False)
        tokens.add(encode(message["content"]) + end_ids, message["role"] == "assistant")
    return tokens
