"""What the compiled training step holds and sends."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import collectives, compiled_text
from models import layout_on, random_params

from vocabjax.model import Blueprint
from vocabjax.optim import GroupConfig, OptimConfig, make_optimizer
from vocabjax.paths import by_path
from vocabjax.state import abstract_state, init_state
from vocabjax.step import make_step, to_device
from vocabjax.trunk import TrunkConfig
from vocabjax.vocab.core import VocabConfig
from vocabjax.vocab.heads.factorized import FactorizedHead
from vocabjax.vocab.heads.linear import MatrixHead, UntiedHead
from vocabjax.vocab.inputs.factorized import FactorizedTable
from vocabjax.vocab.inputs.hashed import HashTable
from vocabjax.vocab.inputs.over_encoding import OverEncoding
from vocabjax.vocab.interfaces import Context, Head, Input, Loss, Objective


@dataclass(frozen=True)
class DoubledHead(UntiedHead):
    kind: ClassVar[str] = "doubled"

    def build(self, context: Context, objective: Objective, input: Input) -> Head:
        return Doubled(self, context, objective, input)


class Doubled(MatrixHead):
    """A loss of its own."""

    def loss(self, *arguments: Any) -> Loss:
        loss = super().loss(*arguments)
        return loss._replace(total=2 * loss.total)


TRUNK = TrunkConfig(layers=2, heads=8, kv_heads=8, head_dim=4, ffn=16)
TIED = VocabConfig(size=4096, width=24, multiple=2, objective=Objective(chunk=16))


@pytest.mark.parametrize(
    ("vocab", "both"),
    [
        (TIED, "vocab/input/table"),
        (replace(TIED, head=UntiedHead()), None),
        (replace(TIED, input=OverEncoding(order=2, buckets=100)), "vocab/input/table"),
        (
            replace(TIED, input=FactorizedTable(factor=8), head=FactorizedHead()),
            "vocab/input/table",
        ),
        (replace(TIED, input=HashTable(buckets=64)), None),  # its rows are composed, not read
    ],
    ids=["tied", "untied", "over_encoding", "factorized", "hash"],
)
def test_the_scored_table_is_reduced_once_a_step_whatever_else_reads_it(
    vocab: VocabConfig, both: str | None
) -> None:
    """Of two microbatches and, where tied, two faces: one all-reduce of its shard, outside every loop."""
    blueprint = Blueprint(vocab, TRUNK, layout_on("data=2,model=4"))
    assert blueprint.scored_and_read == both
    with jax.set_mesh(blueprint.layout.mesh):
        optimizer = make_optimizer(OptimConfig(warmup=0), blueprint.infos.values(), 20)
        sharding = blueprint.layout.sharding(None, "batch", "seq")
        array = jax.ShapeDtypeStruct((2, 4, 8), jnp.int32, sharding=sharding)
        batch = dict.fromkeys(("ids", "targets", "segment", "position"), array)
        text = compiled_text(
            make_step(blueprint, optimizer), abstract_state(blueprint, optimizer), batch
        )
    shard = (1024, 8 if isinstance(vocab.input, FactorizedTable) else 24)
    entry = text[text.index("\nENTRY ") :]
    for part in (text, entry):
        assert [found for found in collectives(part) if found[1] == shard] == [
            ("all-reduce", shard)
        ]
    assert not [found for found in collectives(text) if 4096 in found[1]]


def test_a_head_with_a_loss_of_its_own_is_trained_on_it() -> None:
    """And not on what the head it extends would have accumulated: with plain SGD, twice the loss moves everything twice as far."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 32, (1, 2, 5)).astype(np.int32)
    host = {"ids": ids[..., :4], "targets": ids[..., 1:], "segment": ids[..., :4] * 0}
    host["position"] = np.broadcast_to(np.arange(4, dtype=np.int32), (1, 2, 4))
    groups = {
        role: GroupConfig(optimizer="sgd", weight_decay=0.0)
        for role in ("embed", "head", "matrix", "vector")
    }
    config = OptimConfig(lr=0.1, schedule="constant", warmup=0, clip=None, **groups)
    moved = []
    for head in (UntiedHead(), DoubledHead()):
        vocab = VocabConfig(size=32, width=16, multiple=1, head=head)
        blueprint = Blueprint(vocab, replace(TRUNK, layers=1), layout_on("data=1,model=1"))
        with jax.set_mesh(blueprint.layout.mesh):
            optimizer = make_optimizer(config, blueprint.infos.values(), 1)
            batch = to_device(blueprint.layout, host, None, "batch", "seq")
            state = init_state(optimizer, random_params(blueprint))
            state, _ = make_step(blueprint, optimizer)(state, batch)
        start = by_path(random_params(blueprint))
        moved.append(
            {path: np.asarray(x - start[path]) for path, x in by_path(state.params).items()}
        )
    for path, once in moved[0].items():
        assert abs(once).max() > 0
        np.testing.assert_allclose(moved[1][path], 2 * once, rtol=1e-2, atol=1e-5, err_msg=path)
