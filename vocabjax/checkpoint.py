"""Checkpoints of a run: saved asynchronously and atomically, restored exactly on any mesh.

One step is one Orbax checkpoint: the arrays of the state by path, and a small JSON record with the
logical sizes, the metrics and the state of the data iterator. The record is written once, not once
per process, so a run can resume with another number of processes. Paths alone identify arrays: the
containers (dict, tuple, dataclass, an optimiser's empty states) come from the state asked for.

Padding. A table is stored as it lies on the saving mesh: its logical rows first, then rows of zeros that pad it to a
multiple of the shards. Another mesh pads to another size. So callers give the logical shape of each parameter, the checkpoint
records it, and it must be the same on both sides; a stored dimension may differ from the model's if, and only if, both are padded
from the same logical size. The logical rows are then restored exactly and the padding is zero again. A leaf has the logical shape
of the parameter whose path is the longest suffix of its own path, if their ranks agree: `opt/0/mu/vocab/head/table` has that of
`vocab/head/table`. All else must be equal.

Checksums. The record holds one number per array, summed on the devices over the bits of its logical part, so that it is the same
on any mesh and no array is gathered. A restored array whose number is another has been damaged since, and is refused.
"""

import functools
import json
import logging
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from orbax.checkpoint import v1 as ocp

from vocabjax.errors import UserError
from vocabjax.paths import by_path

PyTree = Any
Shapes = Mapping[str, Sequence[int]]  # path of a parameter → shape without padding

BEST_METRIC = "validation_loss"
UNFINISHED = ".orbax-checkpoint-tmp"  # in a name: a save or a deletion that a kill cut short; Orbax removes it


class DataIterator(Protocol):
    """What is needed of a data iterator; every `grain.DatasetIterator` has it."""

    def get_state(self) -> dict[str, Any]: ...

    def set_state(self, state: dict[str, Any], /) -> None: ...


@dataclass(frozen=True)
class Description:
    """What a checkpoint holds, known without reading an array. Shapes are the padded ones."""

    step: int
    leaves: dict[str, jax.ShapeDtypeStruct]
    logical: dict[str, tuple[int, ...]]
    metrics: dict[str, float]
    iterator: dict[str, Any] | None
    checksums: dict[str, int] = field(default_factory=dict)  # older checkpoints have none


class Checkpoints:
    """The checkpoints in one directory: the last ones and those of lowest validation loss.

    Reading changes nothing on disk and works on any device count, also while the run is training.
    The first save removes what a kill left of a save or a deletion, so only one run may save here. With several processes,
    every process makes the same calls, and process 0 deletes.
    """

    def __init__(self, directory: str | Path, *, keep_last: int = 2, keep_best: int = 1) -> None:
        """`keep_last` is at least 1, `keep_best` at least 0: `TrainConfig.check` sees to it."""
        self._directory = Path(directory).absolute()
        self._keep_last, self._keep_best = keep_last, keep_best
        self._known: dict[int, float] = {}  # the loss of each step that was saved, or could be read
        self._writer: ocp.training.Checkpointer | None = None
        self._saving_step = -1
        self._saving = False
        for logger in ("absl", "asyncio"):
            logging.getLogger(logger).addFilter(_not_from_orbax)

    def save(
        self,
        step: int,
        state: PyTree,
        iterator: DataIterator | None,
        *,
        logical: Shapes,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Save `state`, a pytree of jax.Arrays; return once they may be donated or overwritten.

        `logical` maps parameter paths to shapes without padding, such as {"vocab/input/table": (17, 4)}. Without a finite
        `metrics["validation_loss"]` the checkpoint is never the best. Raises UserError if an array holds inf or NaN, or if this
        save, or the one before it, failed (disk full, no permission, step saved already): earlier
        checkpoints are then intact.
        """
        committed = self.steps()
        if step in committed:
            raise UserError(f"{self._directory / str(step)}: step {step} is already saved")
        arrays = by_path(state)
        checksums, finite = _examine(arrays, logical)
        for name, is_finite in finite.items():
            if not is_finite:
                raise UserError(
                    f"{name} is not finite at step {step}: lower --optim.lr, or lengthen --optim.warmup; "
                    + self.last_saved()
                )
        record = {
            "logical": {path: list(shape) for path, shape in logical.items()},
            "metrics": dict(metrics or {}),
            "iterator": None if iterator is None else iterator.get_state(),
            "checksums": checksums,
        }
        record = json.loads(json.dumps(record))  # a snapshot: the iterator moves on meanwhile
        self._saving_step = step
        with self._failures():
            if self._writer is None:
                self._known = self._losses(committed)
                context = ocp.Context()
                # Replicas share the writing of large arrays only: each share is a program to compile.
                context.array.saving.min_slice_bytes_for_replica_parallel = 2**20
                self._writer = ocp.training.Checkpointer(
                    self._directory, context=context, cleanup_tmp_directories=True
                )
            self._writer.save_checkpointables_async(
                step, {"state": arrays}, force=True, custom_metadata={"vocabjax": record}
            )
            self._known[step] = _loss(record["metrics"])
            self._saving = True

    def steps(self) -> list[int]:
        """The saved steps, ascending, after waiting for a save in progress."""
        self.wait()
        return self._listed()

    def _listed(self) -> list[int]:
        if not self._directory.is_dir():
            return []
        paths = (path for path in self._directory.iterdir() if path.is_dir())
        return sorted(int(path.name) for path in paths if path.name.isdecimal())

    def latest(self) -> int | None:
        """The last saved step, or None."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step of lowest validation loss (the earliest of equals), or None.

        Raises UserError if a checkpoint cannot be read: its loss might be the lowest.
        """
        losses = {}
        for step in self.steps():
            try:
                losses[step] = _loss(self.describe(step).metrics)
            except UserError as error:
                if step in self.steps():  # a run that is training may have deleted it meanwhile
                    raise UserError(
                        f"{error}, or choose --step latest; which one is the best is unknown"
                    ) from error
        return next(iter(_ranked(losses)), None)

    def last_saved(self) -> str:
        """What of the run is safe, as the end of an error message."""
        steps = self.steps()
        return f"the last checkpoint is of step {steps[-1]}" if steps else "no checkpoint was saved"

    def describe(self, step: int | None = None) -> Description:
        """What the checkpoint of `step` (default: the latest) holds, without reading its arrays.

        Raises UserError if there is none or it cannot be read.
        """
        path = self._path(step)
        with _reading(path):
            metadata = ocp.checkpointables_metadata(path)
            record = (metadata.custom_metadata or {}).get("vocabjax")
            arrays = metadata.metadata.get("state")
            if record is None or arrays is None:
                raise ValueError("its metadata are missing or unreadable")
            leaves = {
                name: jax.ShapeDtypeStruct(array.shape, array.dtype)
                for name, array in arrays.items()
            }
            record["logical"] = {name: tuple(shape) for name, shape in record["logical"].items()}
            return Description(int(path.name), leaves, **record)

    def restore(
        self,
        abstract_state: PyTree,
        iterator: DataIterator | None,
        *,
        logical: Shapes,
        step: int | None = None,
        part: str = "",
    ) -> PyTree:
        """The state of `step` (default: the latest), with the structure and shardings asked for.

        `abstract_state` is a pytree of jax.ShapeDtypeStruct with shardings, `logical` maps parameter
        paths to shapes without padding. With a `part`, such as "params/", it is the tree below that path, and nothing else of
        the checkpoint is read or compared. Each device reads its own shard only. The iterator, if given, is set to where it
        was. Raises UserError if a shape, a dtype, the structure or a logical shape differs (it names the array and both
        values), or if the checkpoint is missing or damaged (it names an array whose checksum differs).
        """
        path = self._path(step)
        saved = self.describe(int(path.name))
        wanted = {part + name: leaf for name, leaf in by_path(abstract_state).items()}
        shapes = {name: _logical_shape(name, leaf.shape, logical) for name, leaf in wanted.items()}
        leaves = {name: leaf for name, leaf in saved.leaves.items() if name.startswith(part)}
        _require_match(path, replace(saved, leaves=leaves), wanted, shapes)
        if iterator is not None and saved.iterator is None:
            raise UserError(f"{path}: holds no data position; it cannot resume training")

        context = ocp.Context()
        # Only the sizes that differ by padding get here: _require_match has refused all others.
        context.array.loading.enable_padding_and_truncation = True
        context.pytree.loading.partial_load = bool(part)
        with _reading(path), context:
            arrays = ocp.load_checkpointables(path, {"state": wanted})["state"]
        for name, array in arrays.items():
            if array.shape != saved.leaves[name].shape:
                arrays[name] = _zero_padding(array, shapes[name])
        if saved.checksums:
            for name, checksum in _examine(arrays, logical)[0].items():
                if checksum != saved.checksums.get(name):
                    raise UserError(
                        f"{path}: {name} is not what was saved, the file is damaged; move it away to use an earlier step"
                    )
        if iterator is not None and saved.iterator is not None:
            iterator.set_state(saved.iterator)
        return jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[n] for n in wanted])

    def wait(self) -> None:
        """Block until the save in progress is on disk, and delete what is due; raise UserError if the save failed."""
        if self._writer is None or not self._saving:
            return
        self._saving = False
        with self._failures():
            self._writer.wait()
        if jax.process_index() == 0:
            self._rotate()

    def close(self) -> None:
        """Wait for the save in progress and release the writer; raise UserError if it failed."""
        self.wait()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _path(self, step: int | None) -> Path:
        steps = self.steps()
        if not steps:
            raise UserError(f"{self._directory}: no checkpoint here; check the run's name")
        if step is not None and step not in steps:
            saved = ", ".join(map(str, steps))
            raise UserError(f"{self._directory}: no checkpoint of step {step}; saved: {saved}")
        return self._directory / str(steps[-1] if step is None else step)

    def _losses(self, steps: Sequence[int]) -> dict[int, float]:
        """The validation loss of each step that can be read; infinite if it has none."""
        losses = {}
        for step in steps:
            with suppress(UserError):
                losses[step] = _loss(self.describe(step).metrics)
        return losses

    def _rotate(self) -> None:
        """Deletes what is neither among the last nor the best; never what could not be read.

        Not left to Orbax, which deletes in place: a kill would leave a step that is there by half.
        """
        losses = {step: self._known[step] for step in self._listed() if step in self._known}
        kept = {*sorted(losses)[-self._keep_last :], *_ranked(losses)[: self._keep_best]}
        for step in losses.keys() - kept:
            path = self._directory / str(step)
            with suppress(OSError):  # the next save tries again
                shutil.rmtree(path.rename(path.with_name(f"{step}{UNFINISHED}")))

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Report a failed save as a UserError, and start the next one afresh."""
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            # A new writer removes the unfinished directory.
            writer, self._writer = self._writer, None
            if writer is not None:
                with suppress(Exception):  # the first error is the one to report
                    writer.close()
            raise UserError(
                f"{self._directory}: step {self._saving_step} was not saved ({_reason(error)}); {self.last_saved()}: "
                "make room or mend the cause, then resume"
            ) from error


def _loss(metrics: Mapping[str, float]) -> float:
    loss = metrics.get(BEST_METRIC, math.inf)
    return loss if math.isfinite(loss) else math.inf


def _ranked(losses: Mapping[int, float]) -> list[int]:
    """The steps that have a loss, best first."""
    return sorted((s for s in losses if math.isfinite(losses[s])), key=lambda s: (losses[s], s))


def _logical_shape(name: str, stored: tuple[int, ...], logical: Shapes) -> tuple[int, ...]:
    """The shape of this leaf without padding; its stored one if no parameter's rank and path fit."""
    parts = name.split("/")
    if parts[0] == "current":  # `State.current`: one number for each row of a table
        return tuple(logical["/".join(parts[1:])])[:1]
    suffixes = ("/".join(parts[start:]) for start in range(len(parts)))
    shape = next((tuple(logical[suffix]) for suffix in suffixes if suffix in logical), stored)
    return shape if len(shape) == len(stored) else stored  # such as the factored moments of a table


def _require_match(
    path: Path,
    saved: Description,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    problems = []
    for name, leaf in wanted.items():
        if name not in saved.leaves:
            problems.append(f"{name} {_spell(leaf)} is not in the checkpoint")
            continue
        other, shape = saved.leaves[name], shapes[name]
        recorded = _logical_shape(name, other.shape, saved.logical)
        fits = len(recorded) == len(shape) and all(
            there == here or (there >= size and here >= size and recorded[dim] == size)
            for dim, (there, here, size) in enumerate(
                zip(other.shape, leaf.shape, shape, strict=True)
            )
        )
        if leaf.dtype != other.dtype or recorded != shape or not fits:
            problems.append(
                f"{name} is {_spell(other, recorded)} in the checkpoint, {_spell(leaf, shape)} in the model"
            )
    for name, other in saved.leaves.items():
        if name not in wanted:
            problems.append(f"{name} {_spell(other)} is not in the model")
    if problems:
        more = f" (and {len(problems) - 1} more differences)" if len(problems) > 1 else ""
        raise UserError(f"{path}: {problems[0]}{more}; restore it with the config that saved it")


def _spell(leaf: jax.ShapeDtypeStruct, logical: tuple[int, ...] | None = None) -> str:
    padded = logical is not None and logical != leaf.shape
    stored = f" (stored {','.join(map(str, leaf.shape))})" if padded else ""
    shape = leaf.shape if logical is None else logical
    return f"{leaf.dtype}[{','.join(map(str, shape))}]{stored}"


def _examine(
    arrays: Mapping[str, jax.Array], logical: Shapes
) -> tuple[dict[str, int], dict[str, bool]]:
    """Of each array: a checksum of its logical part, the same on any mesh; and whether it is finite."""
    shapes = tuple(_logical_shape(name, array.shape, logical) for name, array in arrays.items())
    results = jax.device_get(_examine_on_device(tuple(arrays.values()), shapes))
    sums, finite = (dict(zip(arrays, result, strict=True)) for result in zip(*results, strict=True))
    return {name: int(x) for name, x in sums.items()}, {name: bool(x) for name, x in finite.items()}


@functools.partial(jax.jit, static_argnums=1)
def _examine_on_device(
    arrays: tuple[jax.Array, ...], shapes: tuple[tuple[int, ...], ...]
) -> list[tuple[jax.Array, jax.Array]]:
    def examine(array: jax.Array, logical: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        array = _without_padding(array, logical)
        finite = jnp.isfinite(array).all()
        if array.dtype == jnp.bool_:
            array = array.astype(jnp.uint8)
        bits = lax.bitcast_convert_type(array, f"uint{8 * min(array.dtype.itemsize, 4)}")
        # Two rounds of MurmurHash3's finaliser, which maps 0, and so padding, to 0: bits that change in several numbers
        # do not cancel as they would in a plain sum. Integers wrap, so the order of the sum does not matter.
        bits = bits.astype(jnp.uint32)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
        return (bits ^ (bits >> 16)).sum(dtype=jnp.uint32), finite

    return [examine(array, shape) for array, shape in zip(arrays, shapes, strict=True)]


def _zero_padding(array: jax.Array, logical: tuple[int, ...]) -> jax.Array:
    """The array, sharded as it was, with zero outside its logical shape."""

    result: jax.Array = jax.jit(
        _without_padding, static_argnums=1, out_shardings=array.sharding, donate_argnums=0
    )(array, logical)
    return result


def _without_padding(array: jax.Array, logical: tuple[int, ...]) -> jax.Array:
    for dim, size in enumerate(logical):
        if size < array.shape[dim]:
            column = [-1 if axis == dim else 1 for axis in range(array.ndim)]
            is_logical = (jnp.arange(array.shape[dim]) < size).reshape(column)
            array = jnp.where(is_logical, array, jnp.zeros((), array.dtype))
    return array


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Report what Orbax raises on a damaged or foreign checkpoint as a UserError."""
    hook = sys.unraisablehook

    def hook_without_pending_reads(unraisable: Any) -> None:
        ends = ("Event loop is closed", "Encountered error while reading array index")
        if not str(unraisable.exc_value).startswith(ends):
            hook(unraisable)

    # After a failed read Orbax closes its event loop under the reads still pending: each prints a
    # traceback, even after the error has reached us. So the hook stays if a read has failed.
    sys.unraisablehook = hook_without_pending_reads
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError):  # the devices' fault, not the file's
        raise
    except Exception as error:  # Orbax raises any type, bare Exception included
        raise UserError(
            f"{path}: not a checkpoint of this program, or damaged ({_reason(error)}); "
            "move it away to use an earlier step"
        ) from error
    else:
        sys.unraisablehook = hook


def _reason(error: BaseException) -> str:
    """The first cause on one line: the operating system's own words, if it was its."""
    while error.__cause__ is not None:
        error = error.__cause__
    # TensorStore's messages name files of its own, locks and objects before their point.
    if code := re.search(r"os_error_code='(\d+)'|\[Errno (\d+)\]", str(error)):
        return os.strerror(int(code[1] or code[2]))
    lines = str(error).split(" [tensorstore_spec")[0].split(" [os_error_code")[0].splitlines()
    text = lines[0] if lines else ""
    return f"{type(error).__name__}: {text if len(text) <= 200 else '…' + text[-200:]}"


def _not_from_orbax(record: logging.LogRecord) -> bool:
    """Orbax logs, with tracebacks, the errors that it also raises."""
    return "orbax" not in Path(record.pathname).parts and "tensorstore" not in record.getMessage()
