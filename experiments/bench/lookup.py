"""What a sharded lookup and the sharded loss send and hold, against automatic partitioning: bytes, not time.

    python run.py bench lookup

On eight simulated devices (data 2 × model 4), which share this machine's cores, so times would say nothing. Kinds and bytes of the
collectives (of their results on one device) are read from the compiled program.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from vocabjax.flags import Flat, Switches, parse
from vocabjax.forecast import hlo
from vocabjax.launch import Launch, start
from vocabjax.mesh import Layout, make_mesh
from vocabjax.vocab.interfaces import Objective
from vocabjax.vocab.loss import linear_cross_entropy, reference_cross_entropy
from vocabjax.vocab.scores import Scoring
from vocabjax.vocab.sizes import Sizes
from vocabjax.vocab.table import lookup

from . import runner
from .harness import Candidate, Deviation, Memory, Ready, Record, measure
from .loss import Problem
from .report import Target

OURS, TAKE, AUTOMATIC = "ours", "take, automatic", "full logits, automatic"
FORWARD, BACKWARD, LOSS = "lookup, forward", "lookup, backward", "loss, forward and backward"
MESH = {"data": 2, "model": 4}


@dataclass(frozen=True)
class Options:
    """Reads collectives and memory off compiled programs.

    Attributes:
      batch, length: of the tokens; N is their product.
      width: D.
      vocab: V.
    """

    batch: int = 8
    length: int = 256
    width: int = 512
    vocab: int = 50_304
    how: Annotated[runner.Rounds, Flat, Switches] = field(default_factory=runner.Rounds)


def collectives(text: str) -> dict[str, int]:
    """Bytes of the results of all collectives of a compiled program, by kind."""
    moved: Counter[str] = Counter()
    for found in hlo.collectives(text):
        moved[found.kind] += found.bytes
    return dict(sorted(moved.items()))


def in_jax(
    layout: Layout,
    function: Callable[..., Any],
    arrays: Mapping[str, jax.Array],
    out: Any,
    check: Callable[[Any], Sequence[Deviation]],
) -> Ready:
    with jax.set_mesh(layout.mesh):
        compiled = jax.jit(function, out_shardings=out).lower(*arrays.values()).compile()
    text = compiled.as_text()
    assert text is not None

    def run() -> Any:
        return jax.block_until_ready(compiled(*arrays.values()))

    return Ready(run, lambda: check(run()), Memory.of(compiled), collectives(text))


def measured(options: Options) -> list[Record]:
    mesh = ",".join(f"{name}={size}" for name, size in MESH.items())
    explicit = start(Launch(devices=8, mesh=mesh))
    automatic = Layout.make(make_mesh(MESH, explicit=False))
    B, T, D, V = options.batch, options.length, options.width, options.vocab
    problem = Problem.draw(B * T, D, V, "float32", options.how.seed)
    g_BTD = problem.h_ND.reshape(B, T, D)
    ids_BT = problem.targets_N.reshape(B, T)
    dtable_VD = np.zeros((V, D))
    np.add.at(dtable_VD, problem.targets_N, problem.h_ND.astype(np.float64))

    def arrays(layout: Layout) -> dict[str, jax.Array]:
        return {
            "table": jax.device_put(problem.table_VD, layout.sharding("vocab", None)),
            "ids": jax.device_put(ids_BT, layout.sharding("batch", "seq")),
            "g": jax.device_put(g_BTD, layout.sharding("batch", "seq", None)),
        }

    def right_rows(found: Any) -> Sequence[Deviation]:
        return [Deviation.of("rows", found, problem.table_VD[ids_BT], 0.0)]

    def right_gradient(found: Any) -> Sequence[Deviation]:
        return [Deviation.of("dtable", found, dtable_VD, 1e-6)]

    def right_loss(found: Any) -> Sequence[Deviation]:
        value, (dh_BTD, dtable_VD) = found
        return problem.check((value, np.asarray(dh_BTD).reshape(B * T, D), dtable_VD))

    def our_lookup(table_VD: jax.Array, ids_BT: jax.Array, _: jax.Array) -> jax.Array:
        return lookup(explicit, table_VD, ids_BT, logical=V, dtype=table_VD.dtype)

    def take(table_VD: jax.Array, ids_BT: jax.Array, _: jax.Array) -> jax.Array:
        return jnp.take(table_VD, ids_BT, axis=0)

    def backward(forward: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def gradient(table_VD: jax.Array, ids_BT: jax.Array, g_BTD: jax.Array) -> jax.Array:
            return jax.vjp(lambda table: forward(table, ids_BT, g_BTD), table_VD)[1](g_BTD)[0]

        return gradient

    def our_loss(table_VD: jax.Array, targets_BT: jax.Array, h_BTD: jax.Array) -> jax.Array:
        scoring = Scoring(explicit, Sizes.make(V, 1, (), explicit))
        return linear_cross_entropy(scoring, Objective(), h_BTD, table_VD, targets_BT).total

    def full_loss(table_VD: jax.Array, targets_BT: jax.Array, h_BTD: jax.Array) -> jax.Array:
        sizes = Sizes.make(V, 1, (), automatic)
        z_BTV = jnp.einsum("btd,vd->btv", h_BTD, table_VD)
        return reference_cross_entropy(sizes, Objective(), z_BTV, targets_BT).total

    def gradients(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
        of = jax.value_and_grad(lambda h, table, ids: loss(table, ids, h), argnums=(0, 1))
        return lambda table, ids, h: of(h, table, ids)

    def candidate(
        case: str,
        name: str,
        layout: Layout,
        function: Callable[..., Any],
        check: Callable[[Any], Sequence[Deviation]],
    ) -> Candidate:
        rows, tokens = layout.sharding("vocab", None), layout.sharding("batch", "seq", None)
        out = {FORWARD: tokens, BACKWARD: rows, LOSS: (layout.sharding(), (tokens, rows))}[case]
        return Candidate(case, name, lambda: in_jax(layout, function, arrays(layout), out, check))

    listed = [
        candidate(FORWARD, OURS, explicit, our_lookup, right_rows),
        candidate(FORWARD, TAKE, automatic, take, right_rows),
        candidate(BACKWARD, OURS, explicit, backward(our_lookup), right_gradient),
        candidate(BACKWARD, TAKE, automatic, backward(take), right_gradient),
        candidate(LOSS, OURS, explicit, gradients(our_loss), right_loss),
        candidate(LOSS, AUTOMATIC, automatic, gradients(full_loss), right_loss),
    ]
    return measure(listed, {}, rounds=0, retries=0)


def targets(cases: Sequence[str]) -> list[Target]:
    """What lookups and the loss are to reach on the mesh."""
    return [
        Target(
            "lookup backward, bytes / automatic",
            0.20,
            (BACKWARD, OURS),
            (((BACKWARD, TAKE),),),
            "collectives",
        ),
        Target(
            "loss, temporaries / automatic",
            0.30,
            (LOSS, OURS),
            (((LOSS, AUTOMATIC),),),
            "temporaries",
        ),
    ]


def main(arguments: list[str]) -> None:
    """Compiles, checks, and writes results, table and picture."""
    options = parse(Options, "bench lookup", arguments)
    runner.run("lookup", arguments, options.how, lambda: measured(options), targets, is_timed=False)
