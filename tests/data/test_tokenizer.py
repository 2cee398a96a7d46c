"""Tokenizers: lossless, deterministic, of honest size; special tokens are never read from text."""

import json
import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from vocabjax.data import tokenizer as tokenizing
from vocabjax.errors import UserError

END = "<|endoftext|>"
TEXTS = [
    "the cat sat on the mat",
    "naïve café — 日本語 🙂",
    "  tabs\tand\r\nlines \x7f ",
    f"a{END}b",
]


def words(vocabulary):
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_decode_of_encode_is_lossless(text):
    tokenizer = tokenizing.train_bpe(["the cat sat"] * 3, 270, END)
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_end_of_text_written_in_text_is_text(tmp_path):
    trained = tokenizing.train_bpe(TEXTS * 3, 300, END)
    tokenizing.save(trained, tmp_path / "t.json")
    for tokenizer in (trained, tokenizing.load(tmp_path / "t.json")):
        ready, end = tokenizing.with_end_of_text(tokenizer, END)
        (ids,) = tokenizing.encode_documents([f"a{END}b"], ready)
        assert end == ready.token_to_id(END)
        assert end not in ids
        assert ready.decode(ids, skip_special_tokens=False) == f"a{END}b"


def test_end_of_text_that_is_an_ordinary_added_token_is_not_read_from_text():
    tokenizer = tokenizing.train_bpe(["x y z"], 300, "<pad>")
    tokenizer.add_tokens([AddedToken("</s>", special=False)])
    before = tokenizer.token_to_id("</s>")
    assert before in tokenizer.encode("a</s>b").ids  # the trap
    ready, end = tokenizing.with_end_of_text(tokenizer, "</s>")
    (ids,) = tokenizing.encode_documents(["a</s>b"], ready)
    assert end == before
    assert end not in ids


def test_training_is_deterministic():
    documents = [f"word{i % 7} other{i % 11} thing{i % 13} again" for i in range(200)]
    first, second = (tokenizing.train_bpe(documents, 400, END).to_str() for _ in range(2))
    assert first == second


def plain_bpe(documents, size):
    """Byte-level BPE whose training sees words of any length."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_words_of_ordinary_length_are_trained_on_whole():
    documents = [*TEXTS, "the cat " * 9, "x" * 900, " " * 900 + "y", "cats and mats", "语" * 300]
    trained = tokenizing.train_bpe(documents, 400, END)
    assert trained.to_str() == plain_bpe(documents, 400).to_str()


@pytest.mark.timeout(60)
def test_a_text_without_spaces_trains_in_time():
    text = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=2_000_000))
    tokenizer = tokenizing.train_bpe([text], 500, END)
    assert tokenizing.size(tokenizer) == 500
    ids = tokenizer.encode(text).ids
    assert len(ids) < len(text)
    assert tokenizer.decode(ids) == text


def test_ids_without_a_token_are_shown():
    tokenizer = tokenizing.train_bpe(["naïve"], 270, END)
    ids = tokenizer.encode("naï").ids
    assert tokenizing.decode([*ids, 9999, 5000, *ids], tokenizer) == "naï<9999><5000>naï"
    assert tokenizing.decode([*ids, tokenizer.token_to_id(END)], tokenizer) == "naï"


def test_small_text_gives_fewer_ids_than_asked():
    tokenizer = tokenizing.train_bpe(["ab"], 4096, END)
    assert tokenizing.size(tokenizer) == 256 + 1 + 1  # bytes, the special token, the merge of a, b


def test_sparse_ids_need_the_largest_plus_one():
    tokenizer = words({"?": 0, **{f"w{i}": i + 11 for i in range(1, 20)}})
    assert tokenizer.get_vocab_size() == 20
    assert tokenizing.size(tokenizer) == 31


def test_vocab_size_below_the_bytes_is_refused():
    with pytest.raises(UserError, match="257"):
        tokenizing.train_bpe(["ab"], 256, END)


def test_missing_end_of_text_lists_likely_tokens():
    tokenizer = words({"?": 0, "a": 1, "</s>": 2})
    tokenizer.add_special_tokens(["[SEP]"])
    with pytest.raises(UserError, match=r"'\[SEP\]', '</s>'"):
        tokenizing.with_end_of_text(tokenizer, END)


def test_truncation_and_padding_of_a_loaded_tokenizer_are_off(tmp_path):
    tokenizer = words({"?": 0, "a": 1, "b": 2})
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    (tmp_path / "t.json").write_text(tokenizer.to_str())
    loaded = tokenizing.load(tmp_path / "t.json")
    assert list(tokenizing.encode_documents(["a b a b", "b"], loaded)) == [[1, 2, 1, 2], [2]]


@pytest.mark.parametrize("content", ["", "not json", "{}", json.dumps({"model": None}), None])
def test_unusable_file_is_named(tmp_path, content):
    path = tmp_path / "t.json"
    if content is None:
        path.write_text(words({"?": 0}).to_str()[:-20])
    else:
        path.write_text(content)
    with pytest.raises(UserError, match=r"t\.json"):
        tokenizing.load(path)


def test_missing_and_binary_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.json"):
        tokenizing.load(tmp_path / "none.json")
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"b\.json"):
        tokenizing.load(tmp_path / "b.json")


def test_save_leaves_no_temporary_file(tmp_path):
    tokenizing.save(words({"?": 0}), tmp_path / "t.json")
    tokenizing.save(words({"?": 0, "a": 1}), tmp_path / "t.json")
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    assert tokenizing.load(tmp_path / "t.json").get_vocab_size() == 2
