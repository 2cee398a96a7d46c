"""Windows over a token stream, as training and evaluation batches.

A stream `E d1 E d2 … E` is read as windows of T + 1 tokens at stride T. Window i starts at token
iT; its ids are the first T tokens, its targets the last T (position t predicts token t + 1), so
every token but the first is a target exactly once. Windows are random access, which is what gives
one global order for every number of processes.

A stream whose documents begin with a prefix that is read and not predicted (`TokenStream.prefix_end`)
is cut at documents instead: cut inside one, a window would hold targets without what they follow
from. Each window holds as many whole documents as fit; of one longer than T, its first T tokens.
"""

from collections.abc import Sequence
from typing import Any, overload

import grain
import numpy as np

from vocabjax.data.prepare import TokenStream
from vocabjax.errors import UserError
from vocabjax.ids import IGNORE

Batch = dict[str, np.ndarray]
"""`ids`, `targets`, `segment`, `position`: int32 arrays of one shape."""

_READING = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)


def windows_per_pass(stream: TokenStream, length: int) -> int:
    """The number of training windows: steps times batch over this is the number of passes."""
    return len(WindowSource(stream, length))


class WindowSource:
    """Random access to windows: a grain data source.

    Window i is a dict of int32 [T]: `ids`; `targets`; `segment`, the number of end-of-text ids so
    far in the window; `position`, the offset since the segment's start (since the window's, for a
    document the window cuts).

    Args:
        stream: the tokens.
        length: T.
        pad_last: also give the last, partial window: pads have id 0 and label −100, and continue
            its segment. Windows of whole documents are all given, and padded, in any case.
    """

    def __init__(self, stream: TokenStream, length: int, *, pad_last: bool = False) -> None:
        self._stream = stream
        self._length = length
        # Windows of whole documents; None: at stride T.
        self._spans = None if stream.prefix_end is None else _document_spans(stream, length)
        if self._spans is not None:
            self._windows = len(self._spans)
        else:
            targets = max(0, len(stream.tokens) - 1)
            self._windows = -(-targets // length) if pad_last else targets // length

    def __len__(self) -> int:
        return self._windows

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < self._windows:
            raise IndexError(f"window {index} of {self._windows}")
        start, last = index * self._length, (index + 1) * self._length
        if self._spans is not None:
            start, last = self._spans[index]
        stream = self._stream
        window = _window(stream.tokens[start : last + 1], self._length, stream.end_of_text)
        if stream.prefix_end is not None:
            window["targets"][_is_prefix(window, stream.prefix_end)] = IGNORE
        return window

    def __repr__(self) -> str:
        return f"WindowSource(windows={self._windows}, length={self._length})"


def _document_spans(stream: TokenStream, length: int) -> list[tuple[int, int]]:
    """(first token, last target) of each window: as many documents, from where the one before ended, as fit."""
    ends = np.flatnonzero(stream.tokens == stream.end_of_text)  # each opens a document
    last = len(stream.tokens) - 1
    bounds = ends if len(ends) and ends[-1] == last else np.append(ends, last)
    spans, at = [], 0
    while at < len(bounds) - 1:
        start = int(bounds[at])
        fit = int(np.searchsorted(bounds, start + length, side="right")) - 1
        spans.append((start, int(bounds[fit]) if fit > at else start + length))
        at = max(fit, at + 1)
    return spans


def _is_prefix(window: Batch, prefix_end: int) -> np.ndarray:
    """bool [T]: no `prefix_end` yet in the position's document, so that what follows it is still the prefix."""
    index_T = np.arange(len(window["ids"]))
    last_T = np.maximum.accumulate(np.where(window["ids"] == prefix_end, index_T, -1))
    return np.asarray(last_T < index_T - window["position"])


def train_batches(
    stream: TokenStream,
    *,
    length: int,
    batch: int,
    accumulate: int = 1,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.DatasetIterator[Batch]:
    """Endless shuffled batches: dicts of int32 [A, batch / A / process_count, T].

    Every pass holds each full window once, in its own order; batches run on over the end of a pass.
    Which windows make microbatch a of step k depends on `seed`, `batch` and A alone: this process
    gets its contiguous share of the rows, and concatenating the shares along axis 1 gives the
    global [A, batch / A, T].

    `get_state()` is `{"next_index": k}`, the number of batches taken: the same for every process
    and every process count, so a state saved on 4 processes resumes on 2.

    Args:
        stream: the tokens.
        length: T.
        batch: sequences per step over all processes and microbatches.
        accumulate: A, microbatches per step.
        seed: of the order; any non-negative integer.
        process_index: this process.
        process_count: all processes.

    Raises:
        UserError: `batch` does not divide, or the stream has fewer windows than one batch.
    """
    rows = _rows(batch, accumulate, process_index, process_count)
    windows = windows_per_pass(stream, length)
    if windows < batch:
        raise UserError(
            f"{len(stream.tokens)} training tokens make {windows} windows of length {length}, "
            f"fewer than one batch of {batch}: use more text, a shorter length or a smaller batch"
        )
    # Grain shuffles pass p with seed + p: spread seeds, or pass 1 of seed 0 is pass 0 of seed 1.
    spread = int(np.random.SeedSequence(seed).generate_state(1)[0])
    shuffled = grain.MapDataset.source(WindowSource(stream, length)).shuffle(seed=spread).repeat()
    return iter(_Steps(shuffled, rows, batch).to_iter_dataset(_READING))


def evaluation_batches(
    stream: TokenStream, *, length: int, batch: int, process_index: int = 0, process_count: int = 1
) -> "EvaluationBatches":
    """Every target exactly once, in order: dicts of int32 [batch / process_count, T].

    The last window is padded, and the last batch filled with rows whose labels are all −100. Every
    process gets the same number of batches.

    Raises:
        UserError: `batch` does not divide, or the stream has no target.
    """
    rows = _rows(batch, 1, process_index, process_count)[0]
    if len(stream.tokens) < 2:
        raise UserError(
            f"{len(stream.tokens)} tokens are too few to evaluate on: use more validation text"
        )
    return EvaluationBatches(WindowSource(stream, length, pad_last=True), rows, batch, length)


class EvaluationBatches(Sequence[Batch]):
    """See `evaluation_batches`."""

    def __init__(self, windows: WindowSource, rows: np.ndarray, batch: int, length: int) -> None:
        self._windows = windows
        self._rows = rows
        self._batch = batch
        self._filler = _window(np.zeros(1, np.int32), length, None)

    def __len__(self) -> int:
        return (len(self._windows) + self._batch - 1) // self._batch

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> list[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | list[Batch]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        numbers = index * self._batch + self._rows
        return _stack(
            [self._windows[i] if i < len(self._windows) else self._filler for i in numbers.tolist()]
        )


class _Steps(grain.MapDataset[Batch]):  # type: ignore[misc]  # grain has no stubs
    """Step k of one process: of the windows k·batch … (k+1)·batch − 1, those in `rows` [A, b]."""

    def __init__(self, windows: grain.MapDataset[Batch], rows: np.ndarray, batch: int) -> None:
        super().__init__(windows)
        self._rows = rows
        self._batch = batch

    def __len__(self) -> int:
        return len(self._parent) // self._batch

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        numbers = index * self._batch + self._rows
        flat = _stack([self._parent[i] for i in numbers.ravel().tolist()])
        return {name: array.reshape(*numbers.shape, -1) for name, array in flat.items()}


def _window(tokens: np.ndarray, length: int, end_of_text: int | None) -> Batch:
    real = len(tokens) - 1
    ids_T = np.zeros(length, np.int32)
    targets_T = np.full(length, IGNORE, np.int32)
    ids_T[:real] = tokens[:-1]
    targets_T[:real] = tokens[1:]
    starts_T = np.zeros(length, np.bool_)
    if end_of_text is not None:
        starts_T[:real] = tokens[:-1] == end_of_text
    offset_T = np.arange(length, dtype=np.int32)
    segment_T = np.cumsum(starts_T, dtype=np.int32)
    position_T = offset_T - np.maximum.accumulate(np.where(starts_T, offset_T, 0))
    return {
        "ids": ids_T,
        "targets": targets_T,
        "segment": segment_T,
        "position": position_T.astype(np.int32),
    }


def _stack(windows: list[Batch]) -> Batch:
    return {name: np.stack([window[name] for window in windows]) for name in windows[0]}


def _rows(batch: int, accumulate: int, process_index: int, process_count: int) -> np.ndarray:
    """The sequences of a step that this process loads: int [A, batch / A / process_count]."""
    if not 0 <= process_index < process_count:
        raise UserError(f"process {process_index} of {process_count} does not exist")
    unit = accumulate * process_count
    if batch < 1 or batch % unit:
        near = sorted({max(unit, batch // unit * unit), max(unit, (batch // unit + 1) * unit)})
        raise UserError(
            f"batch {batch} does not divide into {accumulate} microbatches on {process_count} "
            f"processes; sizes that would: {' or '.join(map(str, near))}"
        )
    return np.arange(batch).reshape(accumulate, process_count, -1)[:, process_index]
