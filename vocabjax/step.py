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
from vocabjax.optim import gradient_norm
from vocabjax.paths import path_of
from vocabjax.sparse import Sparse
from vocabjax.state import State, abstract_state
from vocabjax.vocab.interfaces import Loss, Reads, Tokens

Arrays = dict[str, jax.Array]  # a batch: ids, targets, segment, position


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


def trace(
    blueprint: Blueprint,
    optimizer: optax.GradientTransformation,
    sparse: Sparse,
    shape: tuple[int, int, int],
) -> None:
    """Traces the step on batches [A, B/A, T] without allocating or compiling: what cannot work raises here."""
    sharding = blueprint.layout.sharding(None, "batch", "seq")
    array = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    batch = dict.fromkeys(("ids", "targets", "segment", "position"), array)
    state = abstract_state(blueprint, optimizer, sparse.catch_up)
    jax.eval_shape(make_step(blueprint, optimizer, sparse=sparse), state, batch)


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
    blueprint: Blueprint,
    optimizer: optax.GradientTransformation,
    seed: int = 0,
    sparse: Sparse | None = None,
) -> Callable[[State, Arrays], tuple[State, Metrics]]:
    """The jitted step; it consumes the state it is given.

    Its batch holds int32 arrays [A, B/A, T]: A microbatches. The loss is normalised by the weight of all of them, so A
    changes nothing but memory.

    Args:
      seed: of what is dropped; with the number of the step it decides that, so a resumed run drops the same.
      sparse: the tables that are updated by the rows a batch reads; None: none.
    """

    def step(state: State, batch: Arrays) -> tuple[State, Metrics]:
        if sparse is None or not sparse.tables:
            return update(state, batch, {})
        reads = blueprint.bind(state.params).vocab.wanted(tokens_of(batch), leading=1)
        view, plans = sparse.fetch(state, reads)
        slots = {path: plan.slots for path, plan in plans.items()}
        view, metrics = update(view, batch, slots)
        return sparse.commit(state, view, plans), metrics

    def update(state: State, batch: Arrays, slots: Reads) -> tuple[State, Metrics]:
        """One step of dense tables, or of views of sparse ones: there, `slots` says which rows are read."""
        # The implementation is stated: others draw differently under vmap, or when sharded.
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), state.step)

        def gather(params: Params) -> Any:
            return blueprint.bind(params).vocab.gather(tokens_of(batch), leading=1, slots=slots)

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
        return State(state.step + 1, params, moments, state.current), metrics

    return jax.jit(step, donate_argnums=0)
