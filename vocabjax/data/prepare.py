"""From a data source to two token streams on disk: `prepare(DataConfig(...))`.

The result is cached under a hash of its content (the text, the tokenizer or how to train it, the
split), so editing a file makes a new entry and moving it does not. An entry appears whole or not at
all.
"""

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from vocabjax.data import corpora
from vocabjax.data import tokenizer as tokenizing
from vocabjax.errors import UserError
from vocabjax.files import cache_folder
from vocabjax.vocab.lexicon import Lexicon

_FORMAT = 1  # part of every key: raise it when the tokens of an entry change
_VERSION = 2  # in every entry: one of another version is made anew, under the same key
_CHUNK = 1 << 22


@dataclass(frozen=True)
class DataConfig:
    """Which text, cut into which tokens.

    Attributes:
        source: wiki, wiki:en+fr+es, gcide, python, files:GLOB, tokens:GLOB or hf:NAME[:CONFIG].
        tokenizer: bpe trains byte-level BPE on the whole training split; else the path of a file
            in the JSON format of `tokenizers`.
        vocab_size: ids asked of BPE training; small texts give fewer, and `Dataset.size` tells.
        end_of_text: the special token between documents; a loaded tokenizer must have it.
        prefix_end: documents begin with a prefix that is read and not predicted, up to and including the first such
            token: that of a line's end, say, where a dictionary's entries begin with a headword. Windows then hold whole
            documents, see `vocabjax.data.windows`. None: every token is predicted.
        length: T, the tokens of a window.
        validation: the share of documents held out (of `tokens:FILE`, and of a lone document: the
            last part).
        max_train_tokens: a fixed subset, whole documents up to this many tokens (the beginning of the first, where
            that alone is longer); a larger limit holds a smaller one's.
        max_validation_tokens: the same for validation.
        seed: draws the split and the subsets, not the order of batches.
    """

    source: str = "wiki"
    tokenizer: str = "bpe"
    vocab_size: int = 4096
    end_of_text: str = "<|endoftext|>"
    prefix_end: str | None = None
    length: int = 128
    validation: float = 0.1
    max_train_tokens: int | None = None
    max_validation_tokens: int | None = None
    seed: int = 0

    def check(self) -> None:
        """Raises UserError for settings that cannot work, whatever the text."""
        if not 0 < self.validation < 1:
            raise UserError(
                f"data.validation = {self.validation} must lie between 0 and 1: it is a share of "
                "the documents"
            )
        for field, least in (
            ("length", 1),
            ("seed", 0),
            ("max_train_tokens", 2),
            ("max_validation_tokens", 2),
            ("vocab_size", 1),
        ):
            value = getattr(self, field)
            if value is not None and not least <= value < 2**31:
                raise UserError(f"data.{field} = {value} must be at least {least} and below 2^31")
        if not self.end_of_text:
            raise UserError("data.end_of_text must not be empty")
        if self.prefix_end == self.end_of_text:
            raise UserError(
                "data.prefix_end is data.end_of_text, which opens each document: its prefix would end before it begins"
            )
        if self.prefix_end is not None and self.source.startswith("tokens:"):
            raise UserError(
                "data.prefix_end is a token's text, which a tokens: source does not know: give a text"
            )


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Packed documents `E d1 E d2 … E`.

    Attributes:
        tokens: uint16 or uint32 [N], memory-mapped.
        end_of_text: E, or None when it is not known (a `tokens:` file).
        bytes: UTF-8 bytes of the real text, end-of-text counting 0; None when not known, and when
            the tokens do not decode to exactly the text. For a `tokens:` file that declares its
            bytes: its share of them by tokens, an estimate.
        prefix_end: the id that ends the prefix of each document; None: there are no prefixes.
    """

    tokens: np.ndarray
    end_of_text: int | None
    bytes: int | None
    prefix_end: int | None = None


@dataclass(frozen=True, eq=False)
class Dataset:
    """What `prepare` returns.

    Attributes:
        train: the training split.
        validation: the validation split.
        tokenizer: None for a `tokens:` file.
        size: the V the data need: no smaller than the number of tokens, and above the largest id of
            the vocabulary.
        counts_V: int64 [size], how often each id occurs in the training stream.
        fingerprint: a hash of the text, the tokenizer or its training, and the split.
    """

    train: TokenStream
    validation: TokenStream
    tokenizer: Tokenizer | None
    size: int
    counts_V: np.ndarray
    fingerprint: str

    @property
    def lexicon(self) -> Lexicon:
        """What a vocabulary of these data may be built from."""
        tokenizer = self.tokenizer
        return Lexicon(self.counts_V, None if tokenizer is None else tokenizing.texts(tokenizer))


def prepare(config: DataConfig, tokenizer: Tokenizer | None = None) -> Dataset:
    """Loads, splits and tokenizes the text; keeps the result in `vocabjax.files.cache_folder()`.

    Exact duplicates are dropped first, so none lands in both splits; then documents are permuted by
    `seed`, and the first ones are validation. BPE is trained on the whole training split (not on
    its `max_train_tokens` subset, so that subsets of different size share one tokenizer), never on
    validation text.

    Args:
        config: the settings.
        tokenizer: replaces `config.tokenizer`, such as the one saved with a run; it must have
            `config.end_of_text`.

    Raises:
        UserError: the settings, the source, the tokenizer or the cache cannot be used; the message
            says why.
        IdError: a `tokens:` file holds an id outside its vocabulary.
    """
    config.check()
    kind, _, rest = config.source.partition(":")
    if kind == "tokens" and rest:
        if tokenizer is not None or config.tokenizer != "bpe":
            raise UserError(
                "a tokens: source is tokenized already: leave tokenizer at its default, 'bpe'"
            )
        return _prepare_tokens(config, corpora.read_tokens(rest))
    name = "the tokenizer"
    if tokenizer is None and config.tokenizer != "bpe":
        tokenizer, name = tokenizing.load(config.tokenizer), f"the tokenizer {config.tokenizer}"
    dataset = _prepare_text(config, corpora.load_documents(config.source), tokenizer, name)
    if None in (dataset.train.bytes, dataset.validation.bytes):
        logging.getLogger("vocabjax").warning(
            "%s changes the text (what it decodes to differs): bits per byte are unknown",
            name,
        )
    return dataset if config.prefix_end is None else _with_prefix(dataset, config.prefix_end)


def _with_prefix(dataset: Dataset, text: str) -> Dataset:
    """The streams told which token ends a prefix."""
    assert dataset.tokenizer is not None  # it is of text
    found = dataset.tokenizer.encode(text, add_special_tokens=False)
    if len(found.ids) != 1:
        raise UserError(
            f"data.prefix_end = {text!r} must be one token, but the tokenizer makes {found.tokens} of it"
        )
    (end,) = found.ids
    streams = {
        name: replace(getattr(dataset, name), prefix_end=end) for name in ("train", "validation")
    }
    for name, stream in streams.items():
        if not (stream.tokens == end).any():
            raise UserError(
                f"data.prefix_end = {text!r} occurs nowhere in the {name} split, so nothing would be predicted"
            )
    return replace(dataset, **streams)


def split_documents(
    documents: Sequence[str], share: float, seed: int
) -> tuple[list[str], list[str]]:
    """Training and validation documents, in drawn order; no text is in both.

    A lone document is cut in two instead, at a line's or a word's end.

    Raises:
        UserError: a lone document too short to cut.
    """
    unique = list(dict.fromkeys(documents))
    if len(unique) == 1:
        return _cut(unique[0], share)
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(unique)).tolist()
    held_out = min(max(1, round(share * len(unique))), len(unique) - 1)
    return [unique[i] for i in order[held_out:]], [unique[i] for i in order[:held_out]]


def _cut(document: str, share: float) -> tuple[list[str], list[str]]:
    target = int(len(document) * (1 - share))
    at = document.rfind("\n", 0, target) + 1 or document.rfind(" ", 0, target) + 1 or target
    first, last = document[:at], document[at:]
    if not first.strip() or not last.strip():
        raise UserError(
            "the source holds one document, too short to cut into training and validation: use "
            "more text"
        )
    return [first], [last]


def _prepare_text(
    config: DataConfig, documents: Sequence[str], tokenizer: Tokenizer | None, name: str
) -> Dataset:
    fields = ("end_of_text", "validation", "max_train_tokens", "max_validation_tokens", "seed")
    settings = {field: getattr(config, field) for field in fields}
    if tokenizer is None:
        settings["vocab_size"] = config.vocab_size
    else:
        settings["tokenizer"] = tokenizer.to_str()
    digest = _digest(settings)
    for document in documents:
        data = document.encode("utf-8")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)

    def build(folder: Path) -> dict[str, Any]:
        train, validation = split_documents(documents, config.validation, config.seed)
        trained = tokenizer or tokenizing.train_bpe(train, config.vocab_size, config.end_of_text)
        ready, end = tokenizing.with_end_of_text(trained, config.end_of_text)
        tokenizing.save(ready, folder / "tokenizer.json")
        size = tokenizing.size(ready)
        dtype = token_dtype(size)
        streams = {
            "train": (train, config.max_train_tokens),
            "validation": (validation, config.max_validation_tokens),
        }
        try:
            return {"size": size, "end_of_text": end} | {
                split: _write_documents(folder / f"{split}.bin", texts, ready, end, dtype, limit)
                for split, (texts, limit) in streams.items()
            }
        except tokenizing.EncodingError as error:
            raise UserError(f"{name} {error}") from error

    return _cached(digest.hexdigest(), build)


def _write_documents(
    path: Path,
    documents: Sequence[str],
    tokenizer: Tokenizer,
    end: int,
    dtype: np.dtype[Any],
    limit: int | None,
) -> dict[str, int | None]:
    tokens, size_bytes, is_exact = 1, 0, True
    with path.open("wb") as file:
        file.write(np.array([end], dtype).tobytes())
        encoded = tokenizing.encode_documents(documents, tokenizer)
        for document, ids in zip(documents, encoded, strict=True):
            if end in ids:
                raise UserError(
                    f"end_of_text is id {end}, which ordinary text also produces (in "
                    f"{document[:40]!r}…): choose a special token for end_of_text"
                )
            if limit is not None and tokens + len(ids) + 1 > limit:
                if tokens > 1:
                    break
                # The first one is a book: as much of it as fits is better than nothing.
                document, ids = _shortened(document, ids, tokenizer, limit - 2)
            file.write(np.array([*ids, end], dtype).tobytes())
            tokens += len(ids) + 1
            size_bytes += len(document.encode("utf-8"))
            is_exact = is_exact and tokenizer.decode(ids, skip_special_tokens=False) == document
    return {"tokens": tokens, "bytes": size_bytes if is_exact else None}


def _shortened(
    document: str, ids: list[int], tokenizer: Tokenizer, limit: int
) -> tuple[str, list[int]]:
    """The beginning of a document that makes at most `limit` tokens, and these."""
    size = len(document)
    while len(ids) > limit:
        size = min(size - 1, size * limit // len(ids))
        (ids,) = tokenizing.encode_documents([document[:size]], tokenizer)
    return document[:size], ids


def _prepare_tokens(config: DataConfig, stored: corpora.StoredTokens) -> Dataset:
    fields = ("validation", "max_train_tokens", "max_validation_tokens")
    digest = _digest({field: getattr(config, field) for field in fields})
    for path in stored.paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())

    def build(folder: Path) -> dict[str, Any]:
        tokens, end, total = stored.tokens, stored.end_of_text, len(stored.tokens)
        if total < 4:
            raise UserError(
                f"{stored.paths[0]}: {total} tokens are too few to split into training and "
                "validation"
            )
        cut = min(max(2, total - round(config.validation * total)), total - 2)
        shared = _last_end(tokens, end, 1, cut + 1)
        # The end-of-text at the cut ends one split and starts the other; a cut inside a document
        # shares nothing.
        train_stop, start = (cut, cut) if shared is None else (shared + 1, shared)
        train = _limited(stored, "train", 0, train_stop, config.max_train_tokens)
        validation = _limited(stored, "validation", start, total, config.max_validation_tokens)
        return {"size": stored.size, "end_of_text": end} | {
            "train": _write_tokens(folder / "train.bin", stored, train),
            "validation": _write_tokens(folder / "validation.bin", stored, validation),
        }

    return _cached(digest.hexdigest(), build)


def _last_end(tokens: corpora.Shards, end: int | None, start: int, stop: int) -> int | None:
    """The last position of `end` in [start, stop), found without reading the file whole."""
    while end is not None and stop > start:
        low = max(start, stop - _CHUNK)
        found = np.flatnonzero(tokens[low:stop] == end)
        if len(found):
            return low + int(found[-1])
        stop = low
    return None


def _limited(
    stored: corpora.StoredTokens, name: str, start: int, stop: int, limit: int | None
) -> slice:
    """[start, stop) cut to `limit` tokens, after a whole document where documents are known."""
    if limit is None or stop - start <= limit:
        return slice(start, stop)
    if stored.end_of_text is None:
        return slice(start, start + limit)
    last = _last_end(stored.tokens, stored.end_of_text, start + 1, start + limit)
    if last is None:
        raise UserError(
            f"the first document of {name} is longer than max_{name}_tokens {limit}: raise the "
            "limit"
        )
    return slice(start, last + 1)


def _write_tokens(path: Path, stored: corpora.StoredTokens, part: slice) -> dict[str, int | None]:
    dtype = token_dtype(stored.size)
    with path.open("wb") as file:
        for start in range(part.start, part.stop, _CHUNK):
            chunk = np.asarray(stored.tokens[start : min(start + _CHUNK, part.stop)])
            file.write(chunk.astype(dtype).tobytes())
    tokens = part.stop - part.start
    size_bytes = None if stored.bytes is None else round(stored.bytes * tokens / len(stored.tokens))
    return {"tokens": tokens, "bytes": size_bytes}


def token_dtype(size: int) -> np.dtype[Any]:
    """The stored dtype: uint16 holds ids up to 65535, so V = 65536 fits and 65537 does not."""
    return np.dtype(np.uint16 if size <= 1 << 16 else np.uint32)


def _digest(settings: dict[str, Any]) -> "hashlib._Hash":
    return hashlib.sha256(
        json.dumps({"format": _FORMAT} | settings, sort_keys=True).encode("utf-8")
    )


def _cached(key: str, build: Callable[[Path], dict[str, Any]]) -> Dataset:
    """The entry `key`, built if it is absent or damaged."""
    root = cache_folder()
    found = _open(root / key, key)
    if found is not None:
        return found
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=root, prefix=f".{key[:16]}.", ignore_cleanup_errors=True
        ) as temporary:
            new = Path(temporary) / "new"
            new.mkdir()
            meta = build(new) | {"version": _VERSION}
            train = _memmap(new / "train.bin", meta)
            np.save(new / "counts.npy", _count(train, meta["size"]))
            meta["files"] = {path.name: path.stat().st_size for path in new.iterdir()}
            (new / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
            _install(new, root / key, key)
    except OSError as error:
        raise UserError(
            f"cannot write the data cache {root}: {error.strerror or error}; free it, or choose "
            "another folder with VOCABJAX_CACHE"
        ) from error
    found = _open(root / key, key)
    if found is None:
        raise UserError(
            f"the data cache {root} lost the entry just written: is something else deleting it?"
        )
    return found


def _install(new: Path, entry: Path, key: str) -> None:
    try:
        new.replace(entry)
    except OSError:
        if not entry.exists():
            raise
        # Another process was first, with the same content, unless what stands there is damaged.
        if _open(entry, key) is None:
            entry.replace(new.parent / "damaged")
            new.replace(entry)


def _open(entry: Path, key: str) -> Dataset | None:
    """The data set in a cache entry; None if it is absent, or not as large as it says."""
    try:
        meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
        sizes = meta["files"].items()
        if meta["version"] != _VERSION or any(
            (entry / name).stat().st_size != size for name, size in sizes
        ):
            return None
        streams = {
            name: TokenStream(
                tokens=_memmap(entry / f"{name}.bin", meta),
                end_of_text=meta["end_of_text"],
                bytes=meta[name]["bytes"],
            )
            for name in ("train", "validation")
        }
        saved = entry / "tokenizer.json"
        tokenizer = tokenizing.load(saved) if saved.name in meta["files"] else None
        counts_V = np.load(entry / "counts.npy")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Dataset(streams["train"], streams["validation"], tokenizer, meta["size"], counts_V, key)


def _memmap(path: Path, meta: dict[str, Any]) -> np.ndarray:
    return np.memmap(path, dtype=token_dtype(meta["size"]), mode="r")


def _count(tokens: np.ndarray, size: int) -> np.ndarray:
    counts_V = np.zeros(size, np.int64)
    for start in range(0, len(tokens), _CHUNK):
        counts_V += np.bincount(tokens[start : start + _CHUNK], minlength=size)
    return counts_V
