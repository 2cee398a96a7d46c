"""The state of training: what a step changes and a checkpoint keeps."""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from vocabjax.model import Blueprint, Params
from vocabjax.optim import state_shardings
from vocabjax.paths import by_path


class State(NamedTuple):
    """All that training changes.

    Attributes:
      step: int32 scalar, steps done.
      params: nested dict of float32 arrays.
      optimizer: the Optax state.
      current: by path of a table that catches up, int32 [Vp]: after how many steps each row is as dense training would have it.
    """

    step: jax.Array
    params: Params
    optimizer: Any
    current: dict[str, jax.Array]


def init_state(
    optimizer: optax.GradientTransformation, params: Params, catching_up: Iterable[str] = ()
) -> State:
    """Step 0; what the optimiser keeps is born as its parameters lie.

    Args:
      catching_up: the paths of `State.current`.
    """
    return State(
        jnp.zeros((), jnp.int32),
        params,
        jax.jit(optimizer.init, out_shardings=state_shardings(optimizer, params))(params),
        {path: _of_rows(by_path(params)[path]) for path in catching_up},
    )


def _of_rows(table: jax.Array) -> jax.Array:
    """int32 zeros, one for each row, lying as the rows do."""
    zeros = functools.partial(jnp.zeros, len(table), jnp.int32)
    if not isinstance(table.sharding, NamedSharding):
        return zeros()
    rows = PartitionSpec(table.sharding.spec[0])
    return zeros(device=NamedSharding(table.sharding.mesh, rows))


def abstract_state(
    blueprint: Blueprint,
    optimizer: optax.GradientTransformation,
    catching_up: Iterable[str] = (),
) -> Any:
    """A `State` of shapes, dtypes and shardings, without allocating it."""
    params = blueprint.abstract()
    replicated = blueprint.layout.sharding()
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    moments = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(optimizer.init, params),
        state_shardings(optimizer, params),
    )
    current = {
        path: jax.ShapeDtypeStruct(
            blueprint.infos[path].shape[:1], jnp.int32, sharding=blueprint.layout.sharding("vocab")
        )
        for path in catching_up
    }
    return State(step, params, moments, current)  # type: ignore[arg-type]  # stands for arrays
