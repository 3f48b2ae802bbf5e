"""Requests of token sequences, from a JSONL file or from text that Python itself ships."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from requestzero.data.labels import IGNORED_LABEL
from requestzero.recipes.errors import BadLineError, UsageError
from requestzero.recipes.tokenizer import TextTokenizer, Tokens


@dataclass(frozen=True)
class TokenSequence:
    """At most ``sequence_length`` tokens of one text, and as many labels (-100: not trained on)."""

    input_ids: list[int]
    labels: list[int]


@dataclass
class RequestData:
    """Requests in order, their names, and the lines that were left out, with the reasons."""

    requests: list[list[TokenSequence]] = field(default_factory=list)
    ids: list[str | int] = field(default_factory=list)
    skipped_lines: list[str] = field(default_factory=list)

    def add(self, name: str | int, sequences: list[TokenSequence]) -> None:
        self.requests.append(sequences)
        self.ids.append(name)


def load_requests(
    path: str | None,
    tokenizer: TextTokenizer,
    sequence_length: int,
    longest_request: int,
    skip_bad_lines: bool,
    on_long_text: str = "cut",
) -> RequestData:
    """Load the requests of the JSONL file ``path``, or of the embedded text where that is ``None``.

    Raises:
        UsageError: the file cannot be read, has no request, or has bad lines, all of which are named (unless
            ``skip_bad_lines``), or, with ``on_long_text="stop"``, long texts.
    """
    if path is None:
        return embedded_requests(tokenizer, sequence_length, longest_request)
    return read_jsonl(Path(path), tokenizer, sequence_length, skip_bad_lines, on_long_text)


def embedded_requests(tokenizer: TextTokenizer, sequence_length: int, longest_request: int) -> RequestData:
    """Return Python's language reference as requests of 1 to ``longest_request`` sequences, the same every time."""
    from pydoc_data.topics import topics

    sequences = [
        sequence for name in sorted(topics) for sequence in cut(tokenizer.encode_text(topics[name]), sequence_length)
    ]
    lengths = random.Random(0)
    data = RequestData()
    start = 0
    while start < len(sequences):
        end = start + lengths.randint(1, longest_request)
        data.add(f"topics-{len(data.ids)}", sequences[start:end])
        start = end
    return data


def read_jsonl(
    path: Path,
    tokenizer: TextTokenizer,
    sequence_length: int,
    skip_bad_lines: bool = False,
    on_long_text: str = "cut",
) -> RequestData:
    """Read one request a line: ``{"id": ..., "texts": [...]}`` or ``{"id": ..., "messages": [...]}``.

    A text, or a chat, that is longer than ``sequence_length`` tokens is cut into sequences, or what else
    ``on_long_text`` says (see :class:`~requestzero.recipes.config_schema.DataConfig`). Texts are trained on as a
    whole, chats on the assistant's turns. Blank lines are passed over.

    Raises:
        UsageError: see :func:`load_requests`.
    """
    data = RequestData()
    bad_lines: list[str] = []
    long_texts: list[str] = []
    seen: dict[str | int, int] = {}
    for number, line in _numbered_lines(path):
        try:
            name, texts = _parse(line, tokenizer)
            if seen.setdefault(name, number) != number:
                raise BadLineError(f"id {name!r} was already used on line {seen[name]}")
            kept, long = _sort_out(texts, sequence_length, on_long_text)
            long_texts += [f"{path}:{number}: {text}" for text in long]
            if kept:
                data.add(name, _sequences(kept, sequence_length))
        except BadLineError as error:
            bad_lines.append(f"{path}:{number}: {error}")
    _refuse([] if skip_bad_lines else bad_lines, long_texts if on_long_text == "stop" else [])
    if not data.requests:
        raise UsageError([*bad_lines, *long_texts, f"{path} has no request: give a file with at least one."])
    data.skipped_lines = bad_lines + long_texts
    return data


def cut(tokens: Tokens, sequence_length: int) -> Iterator[TokenSequence]:
    """Cut into pieces of at most ``sequence_length`` tokens; leave those out in which no token is trained on.

    Nothing precedes the first token of a piece, so it cannot be predicted and its label is -100.
    """
    labels = [token if trained else IGNORED_LABEL for token, trained in zip(tokens.ids, tokens.trained, strict=True)]
    for start in range(0, len(labels), sequence_length):
        piece = slice(start, start + sequence_length)
        piece_labels = [IGNORED_LABEL, *labels[piece][1:]]
        if any(label != IGNORED_LABEL for label in piece_labels):
            yield TokenSequence(tokens.ids[piece], piece_labels)


def _refuse(bad_lines: list[str], long_texts: list[str]) -> None:
    hints = []
    if bad_lines:
        hints.append("Mend or remove these lines, or set data.on_bad_line=skip to leave them out.")
    if long_texts:
        hints.append("Set data.on_long_text to cut, truncate or skip, or raise data.sequence_length.")
    if hints:
        raise UsageError([*bad_lines, *long_texts, *hints])


def _sort_out(texts: list[Tokens], sequence_length: int, on_long_text: str) -> tuple[list[Tokens], list[str]]:
    """Return the texts to be cut, and messages about long ones that are left out or not allowed."""
    if on_long_text == "cut":
        return texts, []
    if on_long_text == "truncate":
        return [Tokens(text.ids[:sequence_length], text.trained[:sequence_length]) for text in texts], []
    long = [
        f"text {position} has {len(text.ids):,} tokens, more than data.sequence_length={sequence_length}"
        for position, text in enumerate(texts)
        if len(text.ids) > sequence_length
    ]
    return [text for text in texts if len(text.ids) <= sequence_length], long


def _sequences(texts: list[Tokens], sequence_length: int) -> list[TokenSequence]:
    sequences = [sequence for text in texts for sequence in cut(text, sequence_length)]
    if not sequences:
        raise BadLineError("has no token to train on")
    return sequences


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise UsageError([f"data.path={str(path)!r} cannot be read: {error.strerror}."]) from None


def _parse(line: bytes, tokenizer: TextTokenizer) -> tuple[str | int, list[Tokens]]:
    """Return the request's name and its texts."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise BadLineError(f"is not JSON: {error}") from None
    if b"\\ud" in line.lower():
        _check_characters(record)
    if not isinstance(record, dict) or set(record) not in ({"id", "texts"}, {"id", "messages"}):
        found = f"the keys {sorted(record)}" if isinstance(record, dict) else f"a {type(record).__name__}"
        raise BadLineError(f'has {found}; allowed are "id" with "texts" or "id" with "messages"')
    name = record["id"]
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        raise BadLineError(f'"id" is {name!r}; allowed is a string or a whole number')
    if "texts" in record:
        return name, [tokenizer.encode_text(text) for text in _check_texts(record["texts"])]
    return name, [tokenizer.encode_chat(_check_messages(record["messages"]))]


def _check_characters(record: Any) -> None:
    """Raise for halves of a character, which JSON can contain and which cannot be encoded."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise BadLineError(
            f"has {half!r} alone, half of a character (a surrogate pair); allowed are whole ones"
        ) from None


def _check_texts(texts: Any) -> list[str]:
    if not isinstance(texts, list) or not texts:
        raise BadLineError(f'"texts" is {texts!r}; allowed is a list of one or more strings')
    for position, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            raise BadLineError(f'"texts"[{position}] is {text!r}; allowed is a string that is not empty')
    return texts


def _check_messages(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise BadLineError(f'"messages" is {messages!r}; allowed is a list of one or more messages')
    for position, message in enumerate(messages):
        complete = isinstance(message, dict) and set(message) == {"role", "content"}
        if not complete or not all(isinstance(value, str) and value for value in message.values()):
            raise BadLineError(
                f'"messages"[{position}] is {message!r}; allowed is {{"role": ..., "content": ...}} with '
                "strings that are not empty"
            )
    if all(message["role"] != "assistant" for message in messages):
        raise BadLineError('"messages" has no turn of the role "assistant", so there is nothing to train on')
    return messages
