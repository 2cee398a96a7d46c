"""What the compiled training step holds and sends."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hlo import collectives, compiled_text
from models import layout_on

from vocabjax.model import Blueprint
from vocabjax.optim import OptimConfig, make_optimizer
from vocabjax.state import abstract_state
from vocabjax.step import make_step
from vocabjax.trunk import TrunkConfig
from vocabjax.vocab.core import VocabConfig
from vocabjax.vocab.heads.factorized import FactorizedHead
from vocabjax.vocab.heads.linear import UntiedHead
from vocabjax.vocab.inputs.factorized import FactorizedTable
from vocabjax.vocab.inputs.hashed import HashTable
from vocabjax.vocab.inputs.over_encoding import OverEncoding
from vocabjax.vocab.interfaces import Objective

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
