"""Requests from JSONL and from the embedded text, and how texts become labelled tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from requestzero.data.labels import IGNORED_LABEL
from requestzero.recipes.collate import make_collate
from requestzero.recipes.data import (
    RequestData,
    TokenSequence,
    cut,
    embedded_requests,
    load_requests,
    read_jsonl,
)
from requestzero.recipes.errors import BadLineError, UsageError
from requestzero.recipes.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokens

BYTES = ByteTokenizer()
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(path: Path, *lines: Any, skip: bool = False) -> RequestData:
    return read_jsonl(write(path, *lines), BYTES, sequence_length=8, skip_bad_lines=skip)


def test_texts_are_cut_and_trained_on_as_a_whole(tmp_path: Path) -> None:
    data = read(tmp_path / "d.jsonl", {"id": "a", "texts": ["0123456789", "xy"]}, "", {"id": 7, "texts": ["é"]})
    assert data.ids == ["a", 7]
    assert [[len(sequence.input_ids) for sequence in request] for request in data.requests] == [
        [8, 3, 3],
        [3],
    ]
    first = data.requests[0][0]
    assert first.input_ids == list(b"01234567")
    assert first.labels == [IGNORED_LABEL, *b"1234567"], "nothing precedes the first token"
    assert data.requests[0][1].input_ids == [*b"89", BYTES.end_id]


def test_of_chats_only_what_the_assistant_says_is_trained_on(tmp_path: Path) -> None:
    tokens = BYTES.encode_chat(CHAT)
    assert bytes(token for token in tokens.ids if token < 256) == b"user: hiassistant: yo"
    trained = [token for token, mark in zip(tokens.ids, tokens.trained, strict=True) if mark]
    assert trained == [*b"yo", BYTES.end_id]
    data = read(tmp_path / "d.jsonl", {"id": 1, "messages": CHAT})
    labels = [label for sequence in data.requests[0] for label in sequence.labels if label != IGNORED_LABEL]
    assert set(labels) <= {*b"yo", BYTES.end_id}
    assert labels


def test_pieces_without_a_trained_token_are_left_out() -> None:
    tokens = Tokens(list(range(6)), [False, False, True, False, False, True])
    assert list(cut(tokens, 2)) == [TokenSequence([4, 5], [IGNORED_LABEL, 5])]


BAD_LINES = [
    ("nonsense", "is not JSON"),
    ('"\\ud800', "is not JSON"),
    ([1], "has a list; allowed are"),
    ({"id": 1}, r"has the keys \['id'\]; allowed are"),
    ({"id": 1, "texts": ["a"], "messages": []}, "has the keys"),
    ({"id": None, "texts": ["a"]}, '"id" is None; allowed is a string or a whole number'),
    ({"id": True, "texts": ["a"]}, '"id" is True'),
    ({"id": 1, "texts": "a"}, "\"texts\" is 'a'; allowed is a list"),
    ({"id": 1, "texts": []}, r'"texts" is \[\]'),
    ({"id": 1, "texts": ["a", ""]}, r"\"texts\"\[1\] is ''; allowed is a string that is not empty"),
    ({"id": 1, "texts": ["a\ud83d"]}, r"has '\\ud83d' alone, half of a character"),
    ({"id": 1, "messages": [{"role": "assistant", "content": "\ud83d"}]}, r"has '\\ud83d' alone"),
    ({"id": 1, "messages": []}, r'"messages" is \[\]'),
    ({"id": 1, "messages": [{"role": "user"}]}, r'"messages"\[0\] is .*; allowed is'),
    ({"id": 1, "messages": [CHAT[0]]}, 'no turn of the role "assistant"'),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(UsageError, match=rf"d\.jsonl:2: .*{message}"):
        read(tmp_path / "d.jsonl", {"id": "good", "texts": ["ab"]}, line)


def test_all_bad_lines_are_told_at_once_or_skipped(tmp_path: Path) -> None:
    lines = [{"id": 0, "texts": ["ab"]}, "x", {"id": 0, "texts": ["cd"]}, {"id": 1, "texts": ["ef"]}]
    with pytest.raises(UsageError, match=r"data\.on_bad_line=skip") as caught:
        read(tmp_path / "d.jsonl", *lines)
    assert len(caught.value.problems) == 3
    assert "d.jsonl:3: id 0 was already used on line 1" in caught.value.problems[1]
    data = read(tmp_path / "d.jsonl", *lines, skip=True)
    assert data.ids == [0, 1]
    assert len(data.skipped_lines) == 2


def test_long_texts_are_cut_truncated_skipped_or_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"id": "a", "texts": ["0123456789", "xy"]}, {"id": "b", "texts": ["9876543210"]})

    def lengths(on_long_text: str) -> list[list[int]]:
        data = read_jsonl(path, BYTES, 8, on_long_text=on_long_text)
        assert len(data.skipped_lines) == (2 if on_long_text == "skip" else 0)
        return [[len(sequence.input_ids) for sequence in request] for request in data.requests]

    assert lengths("cut") == [[8, 3, 3], [8, 3]]
    assert lengths("truncate") == [[8, 3], [8]]
    assert lengths("skip") == [[3]]
    with pytest.raises(UsageError, match=r"data\.on_long_text") as caught:
        read_jsonl(path, BYTES, 8, on_long_text="stop")
    assert [problem.split(": ", 1)[1] for problem in caught.value.problems[:2]] == [
        "text 0 has 11 tokens, more than data.sequence_length=8"
    ] * 2
    assert len(caught.value.problems) == 3


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"id": 1, "texts": ["\xff"]}\n')
    with pytest.raises(UsageError, match=r"d\.jsonl:1: is not JSON"):
        read_jsonl(path, BYTES, 8)


def test_a_text_of_one_token_has_nothing_to_train_on() -> None:
    class OneToken(ByteTokenizer):
        def encode_text(self, text: str) -> Tokens:
            return Tokens([1], [True])

    assert list(cut(OneToken().encode_text("a"), 8)) == []


def test_a_request_without_trained_tokens_is_a_bad_line(tmp_path: Path) -> None:
    class Silent(ByteTokenizer):
        def encode_text(self, text: str) -> Tokens:
            return Tokens([1, 2], [False, False])

    with pytest.raises(UsageError, match="has no token to train on"):
        read_jsonl(write(tmp_path / "d.jsonl", {"id": 1, "texts": ["a"]}), Silent(), 8)


def test_a_file_without_requests_or_without_access_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no request"):
        read(tmp_path / "empty.jsonl", "")
    with pytest.raises(UsageError, match="has no request"):
        read(tmp_path / "bad.jsonl", "x", skip=True)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        load_requests(str(tmp_path / "none.jsonl"), BYTES, 8, 1, False)


def test_the_embedded_text_is_cut_the_same_every_time_and_unevenly() -> None:
    data = embedded_requests(BYTES, sequence_length=128, longest_request=48)
    again = embedded_requests(BYTES, sequence_length=128, longest_request=48)
    assert data.requests == again.requests
    lengths = [len(request) for request in data.requests]
    assert min(lengths) >= 1
    assert max(lengths) <= 48
    assert len(set(lengths)) > 20
    assert len(set(data.ids)) == len(data.ids)


def test_collate_packs() -> None:
    sequences = [TokenSequence([1, 2], [IGNORED_LABEL, 2]), TokenSequence([3], [IGNORED_LABEL])]
    inputs = make_collate(9, "packed")(sequences)
    assert inputs["input_ids"].tolist() == [[1, 2, 3]]
    assert inputs["position_ids"].tolist() == [[0, 1, 0]]


def test_collate_pads_on_the_right() -> None:
    inputs = make_collate(9)([TokenSequence([1, 2], [IGNORED_LABEL, 2]), TokenSequence([3], [IGNORED_LABEL])])
    assert inputs["input_ids"].tolist() == [[1, 2], [3, 9]]
    assert inputs["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert inputs["labels"].tolist() == [[IGNORED_LABEL, 2], [IGNORED_LABEL, IGNORED_LABEL]]


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def decode(tokenizer: HuggingFaceTokenizer, tokens: Tokens, trained: bool) -> str:
    return tokenizer.tokenizer.decode(
        [t for t, mark in zip(tokens.ids, tokens.trained, strict=True) if mark is trained]
    )


def test_a_chat_template_tells_answers_from_prompts(hugging_face_model: Path) -> None:
    tokenizer = HuggingFaceTokenizer(str(hugging_face_model))
    assert decode(tokenizer, tokenizer.encode_chat(CHAT), True).replace(" ", "") == "yo</s>"
    tokenizer.tokenizer.chat_template = TEMPLATE
    tokens = tokenizer.encode_chat([*CHAT, *CHAT, CHAT[0]])
    assert decode(tokenizer, tokens, True) == "yo</s>yo</s>"
    assert decode(tokenizer, tokens, False) == "<user>hi</s><assistant><user>hi</s><assistant>"


def test_a_chat_that_the_template_cannot_write_is_a_bad_line(hugging_face_model: Path) -> None:
    tokenizer = HuggingFaceTokenizer(str(hugging_face_model))
    tokenizer.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(BadLineError, match="refuses this chat: roles must alternate"):
        tokenizer.encode_chat(CHAT)
    tokenizer.tokenizer.chat_template = "{{ messages|length }}" + TEMPLATE
    with pytest.raises(BadLineError, match="writes the turns before message 1 differently"):
        tokenizer.encode_chat(CHAT)
