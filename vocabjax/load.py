"""A trained model, out of its run directory."""

import contextlib
import functools
from dataclasses import dataclass, replace
from typing import Literal

import jax

from vocabjax.checkpoint import Checkpoints
from vocabjax.data import Dataset, prepare
from vocabjax.errors import UserError
from vocabjax.mesh import Layout
from vocabjax.model import Blueprint, Params
from vocabjax.optim import make_optimizer
from vocabjax.param import Role
from vocabjax.paths import by_path
from vocabjax.runs import Run
from vocabjax.sparse import Sparse
from vocabjax.state import abstract_state

Step = int | Literal["best", "latest"]


@dataclass(frozen=True)
class Loaded:
    """The parameters of one checkpoint, and what they belong to."""

    run: Run
    blueprint: Blueprint
    params: Params
    step: int


def saved_step(run: Run, step: Step = "best") -> int:
    """A saved step: the one given, the latest, or the best by validation loss (the latest where none was validated).

    Raises:
      UserError: the run has no checkpoint.
    """
    checkpoints = Checkpoints(run.checkpoints)
    found = checkpoints.best() if step == "best" else None if step == "latest" else step
    found = checkpoints.latest() if found is None else found
    if found is None:
        raise UserError(f"run {run.name!r} has no checkpoint yet")
    return found


def load_run(
    run: Run, layout: Layout, step: Step = "best", *, multiple: int | None = None
) -> Loaded:
    """Restores the parameters of a checkpoint on any layout, whatever the run trained on; changes nothing on disk.

    Args:
      step: see `saved_step`.
      multiple: pads the tables to this `vocab.multiple`, instead of the run's own.

    Raises:
      UserError: no such checkpoint, or one that is damaged or of another config.
    """
    config = run.config()
    vocab = config.vocab if multiple is None else replace(config.vocab, multiple=multiple)
    step = saved_step(run, step)
    with jax.set_mesh(layout.mesh):
        blueprint = Blueprint(vocab, config.trunk, layout, run.lexicon())
        sparse = Sparse(config.optim, blueprint, config.train.steps)
        restore = functools.partial(
            Checkpoints(run.checkpoints).restore, logical=blueprint.logical_shapes(), step=step
        )
        if sparse.catch_up:  # a run that was told to stop has left rows behind
            optimizer = make_optimizer(config.optim, blueprint.infos.values(), config.train.steps)
            state = restore(abstract_state(blueprint, optimizer, sparse.catch_up), None)
            params = sparse.flush(state).params
        else:
            params = restore(blueprint.abstract(), None, part="params/")
    return Loaded(run, blueprint, params, step)


def adopt(blueprint: Blueprint, source: Loaded) -> Params:
    """A run's parameters as a start for this model; load them on the same layout, with the same `vocab.multiple`.

    Tied and untied must agree with what is there. A head equal to the input table may become tied; a tied table never becomes
    two silently.

    Raises:
      UserError: parameters that are missing, left over, or of another shape (padding apart), or rows that stand for other
        ids; names the first.
    """
    where = f"run {source.run.name!r}"
    theirs = by_path(source.params)
    ours_tied, their_tied = (_with_role("tied", b) for b in (blueprint, source.blueprint))
    our_heads, their_heads = (_with_role("head", b) for b in (blueprint, source.blueprint))
    if their_tied and our_heads:
        raise UserError(
            f"{where} is tied and has no {our_heads[0]}, which this untied config needs; use a tied config"
        )
    if ours_tied and their_heads:
        tables = _with_role("embed", source.blueprint)
        if not _equal([theirs[path] for path in (*their_heads, *tables)]):
            raise UserError(
                f"{where} has a head of its own ({their_heads[0]}), different from its input: this config is tied and would "
                "lose it; use an untied config"
            )
        for path in their_heads:
            del theirs[path]
    for path, info in blueprint.infos.items():
        there = source.blueprint.infos.get(path)
        if there is None or there.logical != info.logical:
            shown = "absent" if there is None else f"of shape {there.logical}"
            raise UserError(f"{path} is {shown} in {where}, of shape {info.logical} in this config")
    for path, constant in blueprint.constants.items():
        if source.blueprint.constants.get(path, constant) != constant:
            raise UserError(
                f"{path} differs in {where}, so its rows stand for other ids: give it the data and the settings of that run"
            )
    for path in theirs.keys() - blueprint.infos.keys():
        raise UserError(f"{where} holds {path}, which this config has no place for")
    abstract = blueprint.abstract()
    return jax.tree.unflatten(
        jax.tree.structure(abstract), [theirs[path] for path in by_path(abstract)]
    )


def _with_role(role: Role, blueprint: Blueprint) -> list[str]:
    return [info.path for info in blueprint.infos.values() if info.role == role]


def _equal(arrays: list[jax.Array]) -> bool:
    first = arrays[0]
    return all(array.shape == first.shape and bool((array == first).all()) for array in arrays)


def run_data(run: Run, source: str | None = None) -> tuple[Dataset, bool]:
    """The data a run was trained on, or another source's in the run's tokens; and whether they have changed since.

    Raises:
      UserError: the data cannot be used, or need ids that the model does not have.
    """
    config, tokenizer, trained_on = run.config(), run.tokenizer(), run.facts()["fingerprint"]
    data = config.data if source is None else replace(config.data, source=source)
    if source is None:
        with contextlib.suppress(
            UserError
        ):  # such as a tokenizer file that is gone: the run has a copy
            dataset = prepare(data)
            if dataset.fingerprint == trained_on:
                return dataset, False
    if data.source.startswith("tokens:"):
        data, tokenizer = replace(data, tokenizer="bpe"), None
    elif tokenizer is None:
        raise UserError(
            f"run {run.name!r} has no tokenizer, as it was trained on ids: give tokens:FILE, not {data.source}"
        )
    dataset = prepare(data, tokenizer)
    config.with_size(dataset.size)
    return dataset, source is None and dataset.fingerprint != trained_on
