"""The training step: gather rows once, accumulate over microbatches, clip, update."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from vocabjax.data import Batch
from vocabjax.mesh import Layout
from vocabjax.model import Blueprint, Params
from vocabjax.optim import gradient_norm, state_shardings
from vocabjax.paths import path_of
from vocabjax.vocab.interfaces import Loss, Tokens

Arrays = dict[str, jax.Array]  # a batch: ids, targets, segment, position


class State(NamedTuple):
    """All that training changes.

    Attributes:
      step: int32 scalar, steps done.
      params: nested dict of float32 arrays.
      optimizer: the Optax state.
    """

    step: jax.Array
    params: Params
    optimizer: Any


class Metrics(NamedTuple):
    """float32 scalars of one step, over the whole batch.

    Attributes:
      loss: what was minimised: the objective per unit of weight, plus penalties.
      nll: mean −log p(target) in nats per unit of weight.
      lse2: mean squared log-partition (what z-loss weighs).
      gradient_norm: over all trained leaves, before clipping.
      invalid: ids outside [0, V) and labels neither predictable nor −100.
    """

    loss: jax.Array
    nll: jax.Array
    lse2: jax.Array
    gradient_norm: jax.Array
    invalid: jax.Array


def tokens_of(batch: Arrays) -> Tokens:
    """The tokens of a batch, whatever its leading dimensions."""
    return Tokens(batch["ids"], batch["segment"], batch["position"])


def to_device(layout: Layout, host: Batch, *axes: str | None) -> Arrays:
    """This process's rows of a batch as global arrays."""
    return {name: layout.from_host(array, *axes) for name, array in host.items()}


def init_state(optimizer: optax.GradientTransformation, params: Params) -> State:
    """Step 0; the moments are born as their parameters lie."""
    return State(
        jnp.zeros((), jnp.int32),
        params,
        jax.jit(optimizer.init, out_shardings=state_shardings(optimizer, params))(params),
    )


def abstract_state(blueprint: Blueprint, optimizer: optax.GradientTransformation) -> Any:
    """A `State` of shapes, dtypes and shardings, without allocating it."""
    params = blueprint.abstract()
    replicated = blueprint.layout.sharding()
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    moments = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(optimizer.init, params),
        state_shardings(optimizer, params),
    )
    return State(step, params, moments)  # type: ignore[arg-type]  # stands for arrays


def trace(
    blueprint: Blueprint, optimizer: optax.GradientTransformation, shape: tuple[int, int, int]
) -> None:
    """Traces the step on batches [A, B/A, T] without allocating or compiling: what cannot work raises here."""
    sharding = blueprint.layout.sharding(None, "batch", "seq")
    array = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    batch = dict.fromkeys(("ids", "targets", "segment", "position"), array)
    jax.eval_shape(make_step(blueprint, optimizer), abstract_state(blueprint, optimizer), batch)


def _centred(blueprint: Blueprint, params: Params) -> Params:
    """Subtracts the mean row where a head asks for it; padding stays zero."""

    def centre(key_path: Any, table_RD: jax.Array) -> jax.Array:
        info = blueprint.infos[path_of(key_path)]
        if not info.centred:
            return table_RD
        rows, layout = info.logical[0], blueprint.layout
        is_row_R1 = layout.place(jnp.arange(len(table_RD))[:, None] < rows, "vocab", None)
        return jnp.where(is_row_R1, table_RD - table_RD.sum(0) / rows, 0)

    return jax.tree.map_with_path(centre, params)


def make_step(
    blueprint: Blueprint, optimizer: optax.GradientTransformation, seed: int = 0
) -> Callable[[State, Arrays], tuple[State, Metrics]]:
    """The jitted step; it consumes the state it is given.

    Its batch holds int32 arrays [A, B/A, T]: A microbatches. The loss is normalised by the weight of all of them, so A
    changes nothing but memory.

    Args:
      seed: of what is dropped; with the number of the step it decides that, so a resumed run drops the same.
    """

    def step(state: State, batch: Arrays) -> tuple[State, Metrics]:
        # The implementation is stated: others draw differently under vmap, or when sharded.
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), state.step)

        def gather(params: Params) -> Any:
            return blueprint.bind(params).vocab.gather(tokens_of(batch), leading=1)

        # One lookup for all microbatches, and one scatter of its gradient: no table is read inside the loop.
        rows, scatter = jax.vjp(gather, state.params)
        normalizer = blueprint.bind(state.params).vocab.weight(batch["targets"])

        def loss_fn(params: Params, rows: Any, part: Arrays) -> tuple[jax.Array, Loss]:
            tokens = tokens_of(part)._replace(key=key)
            loss = blueprint.bind(params).loss(
                tokens, part["targets"], rows=rows, normalizer=normalizer
            )
            return loss.total, loss

        def accumulate(carry: Any, part: Any) -> tuple[Any, Any]:
            gradients, sums = carry
            batch_part, rows_part = part
            (_, loss), (more, row_gradients) = jax.value_and_grad(
                loss_fn, argnums=(0, 1), has_aux=True
            )(state.params, rows_part, batch_part)
            return jax.tree.map(jnp.add, (gradients, sums), (more, loss)), row_gradients

        zeros = jax.tree.map(jnp.zeros_like, state.params)
        no_loss = Loss(*[jnp.zeros((), jnp.float32)] * len(Loss._fields))
        (gradients, loss), row_gradients = lax.scan(accumulate, (zeros, no_loss), (batch, rows))
        gradients = jax.tree.map(jnp.add, gradients, scatter(row_gradients)[0])
        total = loss.total
        if blueprint.has_penalty:
            penalty, more = jax.value_and_grad(lambda p: blueprint.bind(p).vocab.penalty())(
                state.params
            )
            total, gradients = total + penalty, jax.tree.map(jnp.add, gradients, more)

        updates, moments = optimizer.update(gradients, state.optimizer, state.params)
        params = _centred(blueprint, optax.apply_updates(state.params, updates))
        weight = jnp.where(loss.weight == 0, 1, loss.weight)
        metrics = Metrics(
            total,
            loss.nll / weight,
            loss.z / weight,
            gradient_norm(moments),
            loss.invalid,
        )
        return State(state.step + 1, params, moments), metrics

    return jax.jit(step, donate_argnums=0)
