"""A trained model, out of its run directory."""

from dataclasses import dataclass, replace
from typing import Literal

import jax

from vocabjax.checkpoint import Checkpoints
from vocabjax.config import Config
from vocabjax.data import Dataset, prepare
from vocabjax.errors import UserError
from vocabjax.mesh import Layout
from vocabjax.model import Blueprint, Params
from vocabjax.optim import make_optimizer, path_of
from vocabjax.runs import Run
from vocabjax.step import State, abstract_state

TABLE, HEAD = "vocab/input/table", "vocab/head/table"
Step = int | Literal["best", "latest"]


@dataclass(frozen=True)
class Loaded:
    """The parameters of one checkpoint, and what they belong to."""

    run: Run
    config: Config
    blueprint: Blueprint
    params: Params
    step: int


def load_run(run: Run, layout: Layout, step: Step = "best") -> Loaded:
    """Restores a checkpoint on any layout, whatever the run trained on; changes nothing on disk.

    Args:
      step: a saved step, the "latest", or the "best" by validation loss (the latest where none was validated).

    Raises:
      UserError: no such checkpoint, or one that is damaged or of another config.
    """
    config = run.config()
    with jax.set_mesh(layout.mesh):
        blueprint = Blueprint(config.vocab, config.trunk, layout)
        optimizer = make_optimizer(config.optim, blueprint.infos.values(), config.train.steps)
        checkpoints = Checkpoints(run.checkpoints)
        if step == "best":
            step = checkpoints.best() or "latest"
        if step == "latest":
            found = checkpoints.latest()
            if found is None:
                raise UserError(f"run {run.name!r} has no checkpoint yet")
            step = found
        state: State = checkpoints.restore(
            abstract_state(blueprint, optimizer),
            None,
            logical=blueprint.logical_shapes(),
            step=step,
        )
    return Loaded(run, config, blueprint, state.params, step)


def adopt(blueprint: Blueprint, source: Loaded) -> Params:
    """A run's parameters as a start for this model, on the same layout.

    Tied and untied must agree with what is there. A head equal to the input table may become tied; a tied table never becomes
    two silently.

    Raises:
      UserError: parameters that are missing, left over, or of another shape; names the first.
    """
    where = f"run {source.run.name!r}"
    theirs = {
        path_of(key_path): leaf for key_path, leaf in jax.tree.leaves_with_path(source.params)
    }
    if HEAD in theirs and HEAD not in blueprint.infos:
        head, table = theirs.pop(HEAD), theirs[TABLE]
        if head.shape != table.shape or not bool((head == table).all()):
            raise UserError(
                f"{where} has a head of its own ({HEAD}), different from {TABLE}: this config is tied and would lose it; "
                "use an untied config"
            )
    if HEAD in blueprint.infos and HEAD not in theirs:
        raise UserError(
            f"{where} is tied and has no {HEAD}, which this untied config needs; use a tied config"
        )
    for path, info in blueprint.infos.items():
        there = source.blueprint.infos.get(path)
        if there is None or there.shape != info.shape:
            shown = "absent" if there is None else f"{there.shape} (stored)"
            raise UserError(f"{path} is {shown} in {where}, {info.shape} in this config")
    for path in theirs.keys() - blueprint.infos.keys():
        raise UserError(f"{where} holds {path}, which this config has no place for")
    return jax.tree_util.tree_map_with_path(
        lambda key_path, _: theirs[path_of(key_path)], blueprint.abstract()
    )


def run_data(run: Run, config: Config, source: str | None = None) -> Dataset:
    """The run's data, or another source's, in the run's own tokens.

    Raises:
      UserError: the data cannot be used, or need ids that the model does not have.
    """
    data, tokenizer = config.data, run.tokenizer()
    if source is not None:
        data = replace(data, source=source)
    if data.source.startswith("tokens:"):
        data, tokenizer = replace(data, tokenizer="bpe"), None
    elif tokenizer is None:
        raise UserError(
            f"run {run.name!r} has no tokenizer, as it was trained on ids: give tokens:FILE, not {data.source}"
        )
    dataset = prepare(data, tokenizer)
    config.with_size(dataset.size)
    return dataset
