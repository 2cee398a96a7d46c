"""From source to token streams: the split, the tokenizer, the cache (field reports 17 and 25)."""

import errno
import hashlib
import importlib
import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from vocabjax.config import Config
from vocabjax.data import tokenizer as tokenizing
from vocabjax.data.prepare import DataConfig, prepare, split_documents
from vocabjax.errors import IdError, UserError

# The package gives its function this name too.
module = importlib.import_module("vocabjax.data.prepare")

DOCUMENTS = [f"Document {i}: the naïve cat № {i * i} sat on the mat — again." for i in range(40)]


def write(tmp_path, documents, name="text.jsonl"):
    lines = [json.dumps({"text": document}) for document in documents]
    (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VOCABJAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def config(tmp_path):
    write(tmp_path, DOCUMENTS)
    return DataConfig(source=f"files:{tmp_path}/text.jsonl", vocab_size=300)


def texts_of(stream, tokenizer):
    """The documents of a stream, by splitting at end-of-text in plain Python."""
    ids, documents = stream.tokens.tolist(), []
    assert ids[0] == ids[-1] == stream.end_of_text
    for i in ids:
        if i == stream.end_of_text:
            documents.append([])
        else:
            documents[-1].append(i)
    assert documents.pop() == []
    return [tokenizer.decode(document, skip_special_tokens=False) for document in documents]


def word_tokenizer(count):
    vocabulary = {"<eot>": 0, **{f"w{i}": i for i in range(1, count)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def test_streams_hold_the_text(config):
    dataset = prepare(config)
    train = texts_of(dataset.train, dataset.tokenizer)
    validation = texts_of(dataset.validation, dataset.tokenizer)
    assert sorted(train + validation) == sorted(DOCUMENTS)
    for stream, documents in ((dataset.train, train), (dataset.validation, validation)):
        assert stream.bytes == sum(len(document.encode()) for document in documents)
    assert len(validation) == 4
    counts = Counter(dataset.train.tokens.tolist())
    assert dataset.counts_V.dtype == np.int64
    assert dataset.counts_V.tolist() == [counts[i] for i in range(dataset.size)]
    assert dataset.size == 300


def test_duplicates_never_land_in_both_splits():
    train, validation = split_documents(DOCUMENTS * 3, 0.3, 0)
    assert not set(train) & set(validation)
    assert sorted(train + validation) == sorted(DOCUMENTS)


def test_the_split_follows_the_seed():
    assert split_documents(DOCUMENTS, 0.3, 1) == split_documents(DOCUMENTS, 0.3, 1)
    assert split_documents(DOCUMENTS, 0.3, 1) != split_documents(DOCUMENTS, 0.3, 2)


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_neither_split_is_empty(share):
    assert all(split_documents(["a", "b"], share, 0))


def test_a_lone_document_is_cut_at_a_line():
    text = "".join(f"line {i}\n" for i in range(100))
    (train,), (validation,) = split_documents([text], 0.1, 0)
    assert train + validation == text
    assert train.endswith("\n")
    assert 0.08 < len(validation) / len(text) < 0.12
    with pytest.raises(UserError, match="too short"):
        split_documents(["x"], 0.1, 0)


def test_validation_text_does_not_reach_the_tokenizer(config, tmp_path):
    first = prepare(config)
    held_out = texts_of(first.validation, first.tokenizer)
    secret = "zqxzqxzqx " * 50  # its merges would come first
    changed = [secret + text if text in held_out else text for text in DOCUMENTS]
    write(tmp_path, changed)
    second = prepare(config)
    assert any(secret in text for text in texts_of(second.validation, second.tokenizer))
    assert second.tokenizer.to_str() == first.tokenizer.to_str()
    assert not any("zq" in token for token in second.tokenizer.get_vocab())
    write(tmp_path, [text if text in held_out else secret + text for text in DOCUMENTS])
    assert any("zq" in token for token in prepare(config).tokenizer.get_vocab())  # it can be seen


def test_subsets_are_whole_nested_documents_with_one_tokenizer(config):
    whole = prepare(config)
    everything = texts_of(whole.train, whole.tokenizer)
    previous = 0
    for limit in (150, 400):
        subset = prepare(replace(config, max_train_tokens=limit, max_validation_tokens=100))
        texts = texts_of(subset.train, subset.tokenizer)
        assert previous < len(texts) < len(everything)
        assert texts == everything[: len(texts)]
        assert len(subset.train.tokens) <= limit
        assert subset.train.bytes == sum(len(text.encode()) for text in texts)
        assert len(subset.validation.tokens) <= 100
        assert subset.tokenizer.to_str() == whole.tokenizer.to_str()
        previous = len(texts)


@pytest.mark.parametrize("limit", [3, 50, 400])
def test_a_book_that_comes_first_is_cut_to_the_limit(tmp_path, limit):
    book = "".join(f"Chapter {i}: the naïve cat № {i * i} sat — again.\n" for i in range(400))
    write(tmp_path, [book, book.upper()])
    config = DataConfig(source=f"files:{tmp_path}/text.jsonl", vocab_size=300)
    whole = prepare(replace(config, max_validation_tokens=None))
    cut = prepare(replace(config, max_validation_tokens=limit))
    (text,) = texts_of(cut.validation, cut.tokenizer)
    (full,) = texts_of(whole.validation, whole.tokenizer)
    assert limit * 0.8 - 2 < len(cut.validation.tokens) <= limit
    assert full.startswith(text)
    assert cut.validation.bytes == len(text.encode())
    np.testing.assert_array_equal(cut.train.tokens, whole.train.tokens)


def test_end_of_text_in_the_text_stays_text(config, tmp_path):
    documents = [*DOCUMENTS, "he wrote <|endoftext|> here", "and <|endoftext|><|endoftext|>"]
    write(tmp_path, documents)
    dataset = prepare(config)
    streams = (dataset.train, dataset.validation)
    texts = [text for stream in streams for text in texts_of(stream, dataset.tokenizer)]
    assert sorted(texts) == sorted(documents)


@pytest.mark.parametrize(
    ("size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32), (70_000, np.uint32)]
)
def test_the_stored_type_holds_the_vocabulary(config, tmp_path, size, dtype):
    last = f"w{size - 1}"
    write(tmp_path, [f"w1 {last}", f"{last} w2", f"{last} w65535"])
    wide = replace(config, end_of_text="<eot>", validation=0.3)
    dataset = prepare(wide, word_tokenizer(size))
    assert dataset.size == len(dataset.counts_V) == size
    for stream in (dataset.train, dataset.validation):
        assert stream.tokens.dtype == dtype
        assert size - 1 in stream.tokens.tolist()
    assert dataset.counts_V[size - 1] == 2


def test_a_loaded_tokenizer(config, tmp_path):
    trained = tokenizing.train_bpe(["some other text"], 280, "<eot>")
    tokenizing.save(trained, tmp_path / "mine.json")
    loaded = replace(config, tokenizer=str(tmp_path / "mine.json"), end_of_text="<eot>")
    dataset = prepare(loaded)
    assert dataset.tokenizer.get_vocab() == trained.get_vocab()
    assert prepare(loaded, trained).fingerprint == dataset.fingerprint
    with pytest.raises(UserError, match="'<eot>'"):
        prepare(replace(loaded, end_of_text="<|endoftext|>"))


def lossy(kind):
    """A tokenizer that writes <unk> for most letters, one that drops capitals, one that makes them small."""
    if kind == "unknown":
        scores = [("<eot>", 0.0), ("<unk>", 0.0), ("a", -1.0), ("b", -1.0)]
        return Tokenizer(models.Unigram(scores, unk_id=1, byte_fallback=False))
    letters = ["<eot>", *"abcdefghijklmnopqrstuvwxyz0123456789: "]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.decoder = decoders.Fuse()
    if kind == "lowercase":
        tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


@pytest.mark.parametrize("kind", ["unknown", "dropped", "lowercase"])
def test_a_tokenizer_that_changes_the_text_leaves_its_bytes_unknown(
    kind, config, cache, tmp_path, builds, caplog
):
    write(tmp_path, [f"Document {i}: abc" for i in range(30)])
    tokenizing.save(lossy(kind), tmp_path / "lossy.json")
    config = replace(config, tokenizer=str(tmp_path / "lossy.json"), end_of_text="<eot>")
    for _ in range(2):  # built, and found
        caplog.clear()
        dataset = prepare(config)
        assert (dataset.train.bytes, dataset.validation.bytes) == (None, None)
        (record,) = caplog.records
        assert "lossy.json" in record.getMessage() and "bits per byte" in record.getMessage()
    assert len(builds) == 1
    # An entry of a version that counted the bytes all the same is made anew, under its key.
    meta = cache / dataset.fingerprint / "meta.json"
    older = json.loads(meta.read_text()) | {"train": {"tokens": 9, "bytes": 99}}
    del older["version"]
    meta.write_text(json.dumps(older))
    again = prepare(config)
    assert (again.fingerprint, again.train.bytes, len(builds)) == (dataset.fingerprint, None, 2)


def test_a_split_that_the_tokenizer_keeps_has_its_bytes(config, tmp_path, caplog):
    documents = [f"w{i} w{i + 1}" for i in range(1, 20)]
    write(tmp_path, documents)
    config = replace(config, end_of_text="<eot>")
    kept = prepare(config, word_tokenizer(30))
    assert kept.train.bytes is not None and kept.validation.bytes is not None
    assert caplog.records == []
    held_out = texts_of(kept.validation, kept.tokenizer)
    spaced = [text if text in held_out else text.replace(" ", "  ") for text in documents]
    write(tmp_path, spaced)  # in training alone, two spaces become one
    changed = prepare(config, word_tokenizer(30))
    assert changed.train.bytes is None
    assert changed.validation.bytes == kept.validation.bytes


def test_a_tokenizer_that_cannot_encode_the_text_is_named(config, tmp_path):
    tokenizing.save(word_tokenizer(5), tmp_path / "words.json")  # knows no <unk>
    config = replace(config, tokenizer=str(tmp_path / "words.json"), end_of_text="<eot>")
    with pytest.raises(UserError, match=r"words\.json cannot encode the text: .*UNK"):
        prepare(config)


def test_the_fingerprint_is_that_of_runs_recorded_before(config):
    settings = {
        "format": 1,
        "end_of_text": "<|endoftext|>",
        "max_train_tokens": None,
        "max_validation_tokens": None,
        "seed": 0,
        "validation": 0.1,
        "vocab_size": 300,
    }
    content = json.dumps(settings, sort_keys=True).encode()
    for document in DOCUMENTS:
        content += len(document.encode()).to_bytes(8, "little") + document.encode()
    assert prepare(config).fingerprint == hashlib.sha256(content).hexdigest()


def test_end_of_text_that_is_an_ordinary_word_is_refused(config, tmp_path):
    tokenizer = word_tokenizer(5)
    write(tmp_path, ["w1 w2", "w2 w1", "w2 w3 w1"])
    with pytest.raises(UserError, match="ordinary text also produces"):
        prepare(replace(config, end_of_text="w1"), tokenizer)


# The cache


@pytest.fixture
def builds(monkeypatch):
    """Counts the entries really built."""
    calls = []
    real = module._install
    monkeypatch.setattr(module, "_install", lambda *a: (calls.append(a), real(*a)))
    return calls


def test_the_cache_is_reused_and_follows_the_content(config, tmp_path, builds):
    first = prepare(config)
    again = prepare(replace(config, length=7))
    assert len(builds) == 1
    assert first.fingerprint == again.fingerprint
    np.testing.assert_array_equal(first.train.tokens, again.train.tokens)
    write(tmp_path, DOCUMENTS, "moved.jsonl")
    moved = prepare(replace(config, source=f"files:{tmp_path}/moved.jsonl"))
    assert (moved.fingerprint, len(builds)) == (first.fingerprint, 1)
    write(tmp_path, [*DOCUMENTS[:-1], "edited"])
    assert prepare(config).fingerprint != first.fingerprint
    assert len(builds) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"validation": 0.2},
        {"vocab_size": 299},
        {"end_of_text": "<eot>"},
        {"max_train_tokens": 300},
        {"max_validation_tokens": 100},
    ],
)
def test_every_setting_that_matters_makes_an_entry(config, change):
    assert prepare(config).fingerprint != prepare(replace(config, **change)).fingerprint


def test_moving_a_boundary_between_documents_makes_an_entry(config, tmp_path):
    write(tmp_path, ["ab", "c", "d"])
    first = prepare(config)
    write(tmp_path, ["a", "bc", "d"])
    assert prepare(config).fingerprint != first.fingerprint


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "tokenizer.json", "meta.json"])
@pytest.mark.parametrize("damage", ["truncate", "delete"])
def test_a_damaged_entry_is_rebuilt(config, cache, builds, name, damage):
    first = prepare(config)
    expected = first.train.tokens.tolist()
    file = cache / first.fingerprint / name
    if damage == "delete":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size // 2)
    second = prepare(config)
    assert len(builds) == 2
    assert second.train.tokens.tolist() == expected
    assert [path.name for path in cache.iterdir()] == [first.fingerprint]


def test_a_killed_writer_leaves_no_entry(config, cache, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(module, "_count", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(config)
    assert list(cache.iterdir()) == []
    (cache / ".0123.left-by-sigkill").mkdir()
    dataset = prepare(config)
    assert len(texts_of(dataset.train, dataset.tokenizer)) == 36


def test_writers_at_once_agree(config, cache):
    with ThreadPoolExecutor(4) as pool:
        datasets = list(pool.map(lambda _: prepare(config), range(4)))
    assert len({dataset.train.tokens.tobytes() for dataset in datasets}) == 1
    assert [path.name for path in cache.iterdir()] == [datasets[0].fingerprint]


def test_a_cache_that_cannot_be_written_is_named(config, cache, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("VOCABJAX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"cannot write the data cache .*file/cache"):
        prepare(config)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("VOCABJAX_CACHE", str(cache))
    monkeypatch.setattr(module.np, "save", full)
    with pytest.raises(UserError, match=r"data cache .*No space left"):
        prepare(config)
    assert list(cache.iterdir()) == []


def test_the_cache_lies_in_the_home_folder_unless_the_environment_says_where(
    config, cache, tmp_path, monkeypatch
):
    here = prepare(config)
    monkeypatch.delenv("VOCABJAX_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prepare(config).fingerprint == here.fingerprint
    for folder in (cache, tmp_path / ".cache" / "vocabjax"):
        assert (folder / here.fingerprint / "meta.json").exists()


# Tokens made elsewhere


def token_file(tmp_path, tokens, **about):
    np.save(tmp_path / "t.npy", np.asarray(tokens))
    (tmp_path / "t.npy.json").write_text(json.dumps(about))
    return DataConfig(source=f"tokens:{tmp_path}/t.npy")


def test_token_file_is_cut_at_an_end_of_text(tmp_path):
    tokens = [0, 5, 6, 0, 7, 8, 9, 0, 4, 4, 4, 0]
    config = replace(token_file(tmp_path, tokens, size=12, end_of_text=0), validation=0.25)
    dataset = prepare(config)
    assert dataset.train.tokens.tolist() == tokens[:8]
    assert dataset.validation.tokens.tolist() == tokens[7:]
    assert (dataset.size, dataset.tokenizer, dataset.train.bytes) == (12, None, None)
    assert dataset.counts_V.tolist() == [3, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0]
    subset = prepare(replace(config, max_train_tokens=7))
    assert subset.train.tokens.tolist() == tokens[:4]
    with pytest.raises(UserError, match="max_validation_tokens 3"):
        prepare(replace(config, max_validation_tokens=3))


def test_token_file_without_end_of_text(tmp_path):
    tokens = [*range(9), 69_999]
    dataset = prepare(replace(token_file(tmp_path, tokens, bytes=40), validation=0.3))
    assert dataset.train.tokens.tolist() == tokens[:7]
    assert dataset.validation.tokens.tolist() == tokens[7:]
    assert (dataset.size, dataset.train.end_of_text) == (70_000, None)
    assert (dataset.train.bytes, dataset.validation.bytes) == (28, 12)
    assert dataset.train.tokens.dtype == np.uint32


def test_cuts_and_counts_do_not_depend_on_the_chunk(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    config = token_file(tmp_path, rng.integers(0, 5, 300), size=5, end_of_text=0)
    whole = prepare(config)
    monkeypatch.setattr(module, "_CHUNK", 7)
    monkeypatch.setenv("VOCABJAX_CACHE", str(tmp_path / "other"))
    pieces = prepare(config)
    for one, other in ((whole.train, pieces.train), (whole.validation, pieces.validation)):
        assert one.tokens.tolist() == other.tokens.tolist()
    assert whole.counts_V.tolist() == pieces.counts_V.tolist()


def test_token_file_errors(tmp_path):
    config = token_file(tmp_path, [1, 2, 3, 9], size=9)
    with pytest.raises(IdError, match="token id 9 at position 3"):
        prepare(config)
    with pytest.raises(UserError, match="too few to split"):
        prepare(token_file(tmp_path, [1, 2, 3], size=9))
    with pytest.raises(UserError, match="tokenized already"):
        prepare(config, word_tokenizer(3))
    with pytest.raises(UserError, match="tokens:FILE"):
        prepare(DataConfig(source="tokens:"))


@pytest.mark.parametrize(
    "settings",
    [
        {"validation": 0.0},
        {"validation": 1.0},
        {"length": 0},
        {"seed": -1},
        {"max_train_tokens": 1},
        {"end_of_text": ""},
    ],
)
def test_settings_are_checked_before_anything_is_read(settings):
    config = DataConfig(source="files:absent", **settings)
    for check in (config.check, Config(data=config).check, lambda: prepare(config)):
        with pytest.raises(UserError, match=rf"^data\.{next(iter(settings))} "):
            check()


def test_the_end_of_a_prefix_is_one_token_that_occurs(config, tmp_path):
    plain = prepare(config)
    dataset = prepare(replace(config, prefix_end=":"))
    (end,) = dataset.tokenizer.encode(":").ids
    assert plain.train.prefix_end is None
    assert (dataset.train.prefix_end, dataset.validation.prefix_end) == (end, end)
    assert dataset.fingerprint == plain.fingerprint  # the same tokens
    np.testing.assert_array_equal(dataset.train.tokens, plain.train.tokens)
    with pytest.raises(UserError, match=r"prefix_end = '::' must be one token.*':', ':'"):
        prepare(replace(config, prefix_end="::"))
    with pytest.raises(UserError, match="prefix_end = '' must be one token"):
        prepare(replace(config, prefix_end=""))
    with pytest.raises(UserError, match=r"prefix_end = '%' occurs nowhere in the train split"):
        prepare(replace(config, prefix_end="%"))
    with pytest.raises(UserError, match=r"prefix_end is data\.end_of_text"):
        prepare(replace(config, prefix_end=config.end_of_text))
    with pytest.raises(UserError, match="a tokens: source does not know"):
        prepare(DataConfig(source="tokens:ids.npy", prefix_end=":"))
