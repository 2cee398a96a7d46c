"""The training step: gather rows once, accumulate over microbatches, clip, update."""

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
from vocabjax.vocab.accumulator import Accumulator
from vocabjax.vocab.interfaces import Loss, Reads, Shared, Tokens

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


def abstract_batch(layout: Layout, batch: int, accumulate: int, length: int) -> Arrays:
    """A batch [A, B/A, T] of shapes and shardings."""
    shape = (accumulate, batch // accumulate, length)
    sharding = layout.sharding(None, "batch", "seq")
    array: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    return dict.fromkeys(("ids", "targets", "segment", "position"), array)


def lower(
    blueprint: Blueprint,
    optimizer: optax.GradientTransformation,
    sparse: Sparse,
    shape: tuple[int, int, int],
) -> jax.stages.Lowered:
    """The step for (batch, accumulate, length), without allocating or compiling: what cannot work raises here."""
    state = abstract_state(blueprint, optimizer, sparse.catch_up)
    batch = abstract_batch(blueprint.layout, *shape)
    return make_step(blueprint, optimizer, sparse=sparse).lower(state, batch)


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
) -> jax.stages.Wrapped:
    """The jitted step, (state, batch) → (state, `Metrics`); it consumes the state it is given.

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
        loss, gradients = _loss_and_gradients(blueprint, state.params, batch, slots, key)
        with jax.named_scope("optimizer"):
            updates, moments = optimizer.update(gradients, state.optimizer, state.params)
            params = _centred(blueprint, optax.apply_updates(state.params, updates))
        weight = jnp.where(loss.weight == 0, 1, loss.weight)
        metrics = Metrics(
            loss.total,
            loss.nll / weight,
            loss.z / weight,
            gradient_norm(moments),
            loss.invalid,
        )
        return State(state.step + 1, params, moments, state.current), metrics

    return jax.jit(step, donate_argnums=0)


def _loss_and_gradients(
    blueprint: Blueprint, params: Params, batch: Arrays, slots: Reads, key: jax.Array
) -> tuple[Loss, Params]:
    """Of a batch in microbatches; penalties are in the total.

    What concerns tables stands outside the loop over microbatches: rows are looked up, and what the input lends is made, once;
    their gradients go back once. The scored table's gradient, the largest, adds up in place in the loop and, if rows of it
    are read too, takes in theirs before its one reduction.
    """
    layout, vocab = blueprint.layout, blueprint.bind(params).vocab
    tied = blueprint.scored_and_read
    tokens = tokens_of(batch)

    def gather(params: Params) -> Any:
        held = _without_gradient(params, tied)
        return blueprint.bind(held).vocab.gather(tokens, leading=1, slots=slots)

    def lend(params: Params) -> Shared:
        return blueprint.bind(params).vocab.input.shared()

    def scored(params: Params, shared: Shared) -> Any:
        return blueprint.bind(params).vocab.head.scored(shared)

    rows, back_to_tables = jax.vjp(gather, params)
    shared, back_to_lender = jax.vjp(lend, params)
    (table, bias), back_to_scored = jax.vjp(scored, params, shared)
    normalizer = vocab.weight(batch["targets"])

    def loss_fn(
        params: Params, shared: Shared, rows: Any, part: Arrays, into: Accumulator | None
    ) -> tuple[jax.Array, tuple[Loss, Accumulator | None]]:
        loss, into = blueprint.bind(params).accumulate(
            tokens_of(part)._replace(key=key),
            part["targets"],
            into,
            rows=rows,
            shared=shared,
            normalizer=normalizer,
        )
        return loss.total, (loss, into)

    def accumulate(carry: Any, part: tuple[Arrays, Any]) -> tuple[Any, Any]:
        sums, gradients, into = carry
        differentiate = jax.value_and_grad(loss_fn, argnums=(0, 1, 2), has_aux=True)
        (_, (loss, into)), (of_params, of_shared, of_rows) = differentiate(
            params, shared, part[1], part[0], into
        )
        new = (loss, (of_params, of_shared))
        return (*jax.tree.map(jnp.add, (sums, gradients), new), into), of_rows

    nothing = Loss(*[jnp.zeros((), jnp.float32)] * len(Loss._fields))
    zeros = jax.tree.map(jnp.zeros_like, (params, shared))
    into = None if table is None else Accumulator.zeros(layout, table, bias)
    (loss, gradients, into), of_rows = lax.scan(accumulate, (nothing, zeros, into), (batch, rows))

    if blueprint.has_penalty:

        def penalty(params: Params, shared: Shared) -> Any:
            return blueprint.bind(params).vocab.penalty(shared)

        more, of_penalty = jax.value_and_grad(penalty, argnums=(0, 1))(params, shared)
        loss = loss._replace(total=loss.total + more)
        gradients = jax.tree.map(jnp.add, gradients, of_penalty)
    if into is not None:
        read: Any = {}
        if tied is not None:
            part, name = vocab.place_of(tied)
            ids, logical = vocab.wanted(tokens, leading=1)[tied], blueprint.infos[tied].logical[0]
            read = {"ids": ids, "of_rows": of_rows[part][name], "logical": logical, "leading": 1}
        with jax.named_scope("table_gradient"):
            of_scored = back_to_scored(into.total(layout, **read))
        gradients = jax.tree.map(jnp.add, gradients, of_scored)
    of_params, of_shared = gradients
    for more in (back_to_tables(of_rows), back_to_lender(of_shared)):
        of_params = jax.tree.map(jnp.add, of_params, more[0])
    return loss, of_params


def _without_gradient(params: Params, path: str | None) -> Params:
    return jax.tree.map_with_path(
        lambda key_path, x: lax.stop_gradient(x) if path_of(key_path) == path else x, params
    )
