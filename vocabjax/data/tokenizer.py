"""Tokenizers: byte-level BPE trained here, or any `tokenizers` JSON file.

Text is always encoded as text: a document that spells out the end-of-text string does not produce
the end-of-text token, and nothing is truncated, padded or wrapped in a template.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from vocabjax.errors import UserError
from vocabjax.files import write_atomic

_BYTES = 256
_ENCODE_BATCH = 512
_LONGEST_RUN = 1000  # bytes


class EncodingError(UserError):
    """A text that a tokenizer cannot encode."""


def train_bpe(documents: Iterable[str], size: int, end_of_text: str) -> Tokenizer:
    """Byte-level BPE with at most `size` ids: `end_of_text`, the 256 bytes, then merges.

    Deterministic in the documents and their order. A small text runs out of merges early: read the
    size really got with `size(tokenizer)`.

    Raises:
        UserError: `size` leaves no room for the bytes and the special token.
    """
    if size < _BYTES + 1:
        raise UserError(
            f"vocab_size {size} is too small for byte-level BPE: it needs 256 bytes and "
            f"{end_of_text!r}, 257 ids"
        )
    tokenizer = Tokenizer(models.BPE())
    by_word = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # Training takes time that is quadratic in a "word", such as a text without spaces.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [by_word, pre_tokenizers.FixedLength(_LONGEST_RUN)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[end_of_text],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.pre_tokenizer = by_word
    return for_text(tokenizer)


def for_text(tokenizer: Tokenizer) -> Tokenizer:
    """A copy for whole documents: no truncation, no padding, no special tokens read from text."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.no_truncation()
    copy.no_padding()
    copy.encode_special_tokens = True  # a property of the object: the JSON does not carry it
    return copy


def load(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in a `tokenizers` JSON file, ready for text.

    Raises:
        UserError: the file is missing, unreadable, truncated, or not a tokenizer.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read the tokenizer {path}: {error}; give a `tokenizers` JSON file, or 'bpe'"
        ) from error
    try:
        return for_text(Tokenizer.from_str(text))
    except Exception as error:  # the library raises bare Exception
        raise UserError(
            f"{path} is not a `tokenizers` JSON file, or is truncated: {error}"
        ) from error


def save(tokenizer: Tokenizer, path: str | os.PathLike[str]) -> None:
    """Writes the JSON file at once or not at all: a killed writer leaves the old file.

    Raises:
        OSError: the directory cannot be written.
    """
    write_atomic(Path(path), tokenizer.to_str())


def size(tokenizer: Tokenizer) -> int:
    """The V that holds every id: for sparse ids the largest + 1, more than the tokens there are."""
    return max(
        tokenizer.get_vocab_size(with_added_tokens=True),
        max(tokenizer.get_vocab(True).values(), default=-1) + 1,
    )


def with_end_of_text(tokenizer: Tokenizer, end_of_text: str) -> tuple[Tokenizer, int]:
    """A copy ready for text in which `end_of_text` is special, and its id.

    Raises:
        UserError: the token is absent; the message lists tokens that may be meant.
    """
    end = tokenizer.token_to_id(end_of_text)
    if end is None:
        likely = ", ".join(repr(token) for token in _likely_special(tokenizer)) or "none found"
        raise UserError(
            f"the tokenizer has no token {end_of_text!r}; set end_of_text to one it has, such as: "
            f"{likely}"
        )
    copy = for_text(tokenizer)
    # An ordinary added token would be matched inside text. Its id stays the same.
    copy.add_special_tokens([end_of_text])
    return copy, end


def encode_documents(documents: Sequence[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The ids of each document, in order; no special tokens are added.

    Raises:
        EncodingError: the tokenizer has no ids for a text, not even an unknown token.
    """
    for start in range(0, len(documents), _ENCODE_BATCH):
        batch = list(documents[start : start + _ENCODE_BATCH])
        try:
            encodings = tokenizer.encode_batch(batch, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise EncodingError(f"cannot encode the text: {error}") from error
        for encoding in encodings:
            yield encoding.ids


def decode(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of ids without special tokens; an id that the tokenizer does not have is shown as `<id>`."""
    return "".join(
        tokenizer.decode(list(run)) if known else "".join(f"<{token}>" for token in run)
        for known, run in groupby(ids, lambda token: tokenizer.id_to_token(token) is not None)
    )


def texts(tokenizer: Tokenizer) -> list[str]:
    """What each id spells, for a `Lexicon`: NUL and its stored form where that is no text (a part of a character)."""
    spelled = []
    for token in range(size(tokenizer)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if not text or "\ufffd" in text:
            stored = tokenizer.id_to_token(token)
            text = f"\0{token if stored is None else stored}"
        spelled.append(text)
    return spelled


def _likely_special(tokenizer: Tokenizer) -> list[str]:
    """At most ten tokens that look special: those declared so, then those written in brackets."""
    declared = [
        token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
    ]
    bracketed = [
        token
        for token in sorted(tokenizer.get_vocab(True))
        if token[:1] + token[-1:] in ("<>", "[]") and len(token) > 2
    ]
    return list(dict.fromkeys(declared + bracketed))[:10]
