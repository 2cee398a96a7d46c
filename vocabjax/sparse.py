"""Sparse training of tables that are only looked up: a step fetches the rows it reads, updates those, and puts them back.

    view, plans = sparse.fetch(state, reads)       touched rows and their moments, caught up if the group says so
    view        = the ordinary step on the view    differentiated, clipped and updated by whatever Optax transform it is
    state       = sparse.commit(state, view, plans)

To the step a view is a table like any other, only smaller (`vocab/touched.py`), so every leaf of the state is either dense or
a table's rows, never both. Gradients of repeated ids are summed before the clip, so its norm is the dense one. A row
counts as touched when it is read, even where its gradient is zero.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from vocabjax.catch_up import CatchUp, Rows, in_blocks, make_catch_up
from vocabjax.errors import UserError
from vocabjax.mesh import Layout
from vocabjax.model import Blueprint, Params
from vocabjax.optim import OptimConfig, assign, sparse_rules
from vocabjax.paths import path_of
from vocabjax.state import State
from vocabjax.vocab import touched
from vocabjax.vocab.interfaces import Reads, Tokens
from vocabjax.vocab.touched import Plan


class Sparse:
    """The tables of a model that are trained by rows; none, if no group asks for it.

    Attributes:
      tables: path → (logical, stored) rows.
      catch_up: path → what a row has missed, for tables whose group says `catch_up`.
    """

    def __init__(self, config: OptimConfig, blueprint: Blueprint, steps: int) -> None:
        """Raises UserError for a sparse group with a parameter that is more than looked up."""
        self.layout: Layout = blueprint.layout
        rules = sparse_rules(config, blueprint.infos.values(), steps)
        if rules:
            only = looked_up(blueprint)
            for path in rules.keys() - only:
                group = assign(config, blueprint.infos.values())[path]
                raise UserError(
                    f"the group {group!r} is sparse, but the model does more with {path} than look rows of it up; tables that "
                    f"are only looked up: {', '.join(sorted(only)) or 'none'}. Give those a group of their own (--group)"
                )
        self.tables = {
            path: (blueprint.infos[path].logical[0], blueprint.infos[path].shape[0])
            for path in rules
        }
        self.catch_up: dict[str, CatchUp] = {
            path: make_catch_up(rule) for path, rule in rules.items() if rule.sparse == "catch_up"
        }

    def fetch(self, state: State, reads: Reads) -> tuple[State, dict[str, Plan]]:
        """The state with a view of the rows that are read in place of each sparse table and of what the optimiser keeps of it.

        Args:
          reads: `Vocab.wanted` of the batch [A, B, T].
        """
        plans = {
            path: touched.plan(self.layout, reads[path], logical=rows, padded=stored, leading=1)
            for path, (rows, stored) in self.tables.items()
        }

        def fetch(key_path: Any, leaf: jax.Array) -> jax.Array:
            path = self._table(key_path, leaf)
            return leaf if path is None else touched.fetch(self.layout, leaf, plans[path])

        view: State = jax.tree.map_with_path(fetch, state)
        return self._caught_up(view), plans

    def commit(self, state: State, view: State, plans: Mapping[str, Plan]) -> State:
        """The state after a step: sparse tables with the view's rows in them, everything else the view's."""

        def commit(key_path: Any, leaf: jax.Array, new: jax.Array) -> jax.Array:
            path = self._table(key_path, leaf)
            return new if path is None else touched.commit(self.layout, leaf, plans[path], new)

        current = {path: (x & 0) + view.step for path, x in view.current.items()}
        return jax.tree.map_with_path(commit, state, view._replace(current=current))

    @functools.cached_property
    def flush(self) -> Callable[[State], State]:
        """state → the state with every row caught up, which is what evaluation and checkpoints see; consumes its argument."""
        if not self.catch_up:
            return lambda state: state
        return jax.jit(functools.partial(self._caught_up, blocks=True), donate_argnums=0)

    def _table(self, key_path: Any, leaf: jax.Array) -> str | None:
        """The sparse table whose rows this leaf of a state holds something of."""
        name = path_of(key_path)
        path = next((path for path in self.tables if name.endswith(f"/{path}")), None)
        return path if path and leaf.ndim and leaf.shape[0] == self.tables[path][1] else None

    def _caught_up(self, state: State, blocks: bool = False) -> State:
        leaves, structure = jax.tree.flatten_with_path(state)
        names = {path_of(key_path): at for at, (key_path, _) in enumerate(leaves)}
        values = [leaf for _, leaf in leaves]
        for path, catch_up in self.catch_up.items():
            kept = {
                kind: at
                for kind in ("params", "mu", "nu")
                for name, at in names.items()
                if name.endswith(f"{kind}/{path}")
            }
            rows = {kind: values[at] for kind, at in kept.items()}
            rows = self._per_shard(catch_up, blocks, rows, state.current[path], state.step)
            for kind, at in kept.items():
                values[at] = rows[kind]
            values[names[f"current/{path}"]] = (state.current[path] & 0) + state.step
        return jax.tree.unflatten(structure, values)

    def _per_shard(
        self, catch_up: CatchUp, blocks: bool, rows: Rows, current: jax.Array, step: jax.Array
    ) -> Rows:
        layout = self.layout
        table, vector = layout.spec("vocab", None), layout.spec("vocab")
        caught: Rows = jax.shard_map(
            functools.partial(in_blocks, catch_up) if blocks else catch_up,
            mesh=layout.mesh,
            in_specs=(table, vector, layout.spec()),
            out_specs=table,
            check_vma=False,
        )(rows, current, step)
        return caught


def looked_up(blueprint: Blueprint) -> frozenset[str]:
    """Paths of the tables of which nothing is used but the rows that are read: the loss, given those, does not depend on them."""
    layout = blueprint.layout
    length = layout.shards("seq") * (blueprint.config.objective.future + 1)
    shape, sharding = (layout.shards("batch"), length), layout.sharding("batch", "seq")
    ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    params = blueprint.abstract()

    def read(params: Params, ids: jax.Array) -> tuple[Reads, Any]:
        vocab, tokens = blueprint.bind(params).vocab, Tokens.of(ids)
        return vocab.wanted(tokens), vocab.gather(tokens)

    def rest(params: Params, rows: Any, ids: jax.Array) -> Any:
        model = blueprint.bind(params)
        return model.loss(Tokens.of(ids), ids, rows=rows).total, model.vocab.penalty()

    reads, rows = jax.eval_shape(read, params, ids)
    traced = jax.make_jaxpr(rest)(params, rows, ids).jaxpr
    _, used = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
    paths = [path_of(key_path) for key_path, _ in jax.tree.leaves_with_path(params)]
    return (
        frozenset(p for p, is_used in zip(paths, used, strict=False) if not is_used) & reads.keys()
    )
