"""A small config on the tests' corpus, and what its training leaves."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from vocabjax import FullTable, UntiedHead
from vocabjax import train as training
from vocabjax.checkpoint import Checkpoints
from vocabjax.config import Config, TrainConfig
from vocabjax.data import DataConfig
from vocabjax.mesh import Layout
from vocabjax.optim import OptimConfig
from vocabjax.paths import path_of
from vocabjax.state import abstract_state
from vocabjax.train import Setup, train
from vocabjax.trunk import TrunkConfig
from vocabjax.vocab.core import VocabConfig
from vocabjax.vocab.interfaces import Objective

ONE = "data=1,model=1"


def config_of(corpus: Path, *, head: Any = None, steps: int = 6, **settings: Any) -> Config:
    return Config(
        vocab=VocabConfig(
            width=16,
            multiple=1,
            input=FullTable(dropout=0.1),  # so that what is dropped is the same everywhere, too
            head=head or UntiedHead(),
            objective=Objective(chunk=settings.pop("chunk", 16)),
        ),
        trunk=TrunkConfig(layers=2, heads=8, kv_heads=2, head_dim=4, ffn=24),
        data=DataConfig(source=f"files:{corpus}", vocab_size=300, length=16),
        optim=OptimConfig(warmup=2),
        train=TrainConfig(
            steps=steps,
            **{"batch": 8, "eval_every": 3, "checkpoint_every": 3, "log_every": 1, **settings},
        ),
    )


def trained(config: Config, directory: Path, layout: Layout) -> tuple[dict[str, Any], Any]:
    """The summary and the final parameters, logical rows only."""
    summary = train(config, directory, layout, quiet=True)
    with jax.set_mesh(layout.mesh):
        setup = Setup.of(config, layout)
        state = restore(setup, directory)
    size = setup.blueprint.sizes.logical

    def logical(key_path: Any, leaf: jax.Array) -> np.ndarray:
        info = setup.blueprint.infos[path_of(key_path)]
        return np.asarray(leaf)[:size] if info.axes[0] == "vocab" else np.asarray(leaf)

    return summary, jax.tree_util.tree_map_with_path(logical, state.params)


def restore(setup: Setup, directory: Path) -> Any:
    return Checkpoints(directory / "checkpoints").restore(
        abstract_state(setup.blueprint, setup.optimizer, setup.sparse.catch_up),
        None,
        logical=setup.blueprint.logical_shapes(),
    )


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delivers SIGTERM once `step` has been taken."""

    def stopped(self: Any, stop: Any, now: int) -> bool:
        if now == step:
            os.kill(os.getpid(), signal.SIGTERM)
            while not stop.signal_number:
                time.sleep(0.01)
        return bool(stop.signal_number)

    monkeypatch.setattr(training._Trainer, "_stopped", stopped)


def drop_speed(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def environment() -> dict[str, str]:
    """Of a process that simulates devices of its own: compiled as quickly as here."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    return {**os.environ, "XLA_FLAGS": " ".join(flags)}
