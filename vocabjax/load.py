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
from vocabjax.optim import make_optimizer
from vocabjax.runs import Run
from vocabjax.step import State, abstract_state

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
            axes={info.path: info.axes for info in blueprint.infos.values()},
            logical={"vocab": blueprint.sizes.logical},
            step=step,
        )
    return Loaded(run, config, blueprint, state.params, step)


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
