"""A whole training step: against its own parts measured alone, and against the step one would write with Optax.

    python run.py bench step                    32,768 ids
    python run.py bench step --vocab 100352     another case, beside the first

`tied` is set against the sum of what it cannot do without: the trunk alone (forward, backward and its Adam), F (the three products of
the head alone), and dense Adam of the table. `untied` and `ple`, whose looked-up tables are trained by rows, are set against the same
model with full logits, Optax's loss and dense Adam everywhere.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vocabjax.flags import Flat, Switches, parse
from vocabjax.launch import Launch, start
from vocabjax.mesh import Layout
from vocabjax.model import Blueprint, Params
from vocabjax.optim import GroupConfig, OptimConfig, gradient_norm, make_optimizer
from vocabjax.paths import by_path
from vocabjax.sparse import Sparse
from vocabjax.state import init_state
from vocabjax.step import Arrays, make_step, to_device, tokens_of
from vocabjax.trunk import TrunkConfig
from vocabjax.vocab.core import VocabConfig
from vocabjax.vocab.heads.linear import TiedHead, UntiedHead
from vocabjax.vocab.interfaces import Tokens
from vocabjax.vocab.memories.ple import PLE

from . import runner
from .harness import Candidate, Deviation, Memory, Ready, Record, measure
from .loss import Problem, floor_in_jax, floor_in_torch
from .report import Target

TRUNK, TABLE = "trunk alone, with its Adam", "dense Adam of the table"
FLOORS = ("F, XLA", "F, torch")
STEPS = 10_000  # of the schedule: more than are ever taken
LAZY = GroupConfig(sparse="lazy", weight_decay=0.0)
DENSE = OptimConfig(lr=1e-3)
BY_ROWS = {"untied": replace(DENSE, embed=LAZY), "ple": replace(DENSE, memory=LAZY)}


@dataclass(frozen=True)
class Options:
    """Times training steps.

    Attributes:
      batch, length: of the tokens.
      width: D.
      layers: L.
      vocab: V, a multiple of 128.
      threads: of torch.
    """

    batch: int = 8
    length: int = 256
    width: int = 512
    layers: int = 4
    vocab: int = 32_768
    threads: int = 2
    how: Annotated[runner.Rounds, Flat, Switches] = field(default_factory=runner.Rounds)


@dataclass(frozen=True)
class Setting:
    """A model, its first parameters, and the batch of every step."""

    blueprint: Blueprint
    optim: OptimConfig
    batch: Arrays  # int32 [1, B, T]: one microbatch

    @staticmethod
    def of(layout: Layout, options: Options, vocab: VocabConfig, optim: OptimConfig) -> "Setting":
        D, V = options.width, options.vocab
        trunk = TrunkConfig(options.layers, heads=D // 64, kv_heads=D // 64, ffn=3 * D)
        blueprint = Blueprint(replace(vocab, size=V, width=D), trunk, layout)
        rng = np.random.default_rng(options.how.seed)
        text = rng.integers(0, V, (1, options.batch, options.length + 1)).astype(np.int32)
        ids, zeros = text[..., :-1], np.zeros_like(text[..., 1:])
        position = zeros + np.arange(options.length, dtype=np.int32)
        host: dict[str, np.ndarray] = {
            "ids": ids,
            "targets": text[..., 1:],
            "segment": zeros,
            "position": position,
        }
        batch = to_device(layout, host, None, "batch", "seq")
        return Setting(blueprint, optim, batch)

    @property
    def tokens(self) -> Tokens:
        return tokens_of({name: array[0] for name, array in self.batch.items()})

    def optimizer(self, prefix: str = "") -> optax.GradientTransformation:
        """Of the parameters whose paths start with the prefix."""
        infos = self.blueprint.infos.values()
        mine = [info for info in infos if info.path.startswith(prefix)]
        return make_optimizer(self.optim, mine, STEPS)

    def params(self) -> Params:
        """The same at each call; steps consume them."""
        return self.blueprint.init(0)

    def check(self, params: Params, run: Callable[[], tuple[Any, Any, Any]]) -> Sequence[Deviation]:
        """The first step's loss and the scored table's first moment, some rows of it, in float64 from the hidden states.

        Args:
          params: before the step.
          run: one step → loss, gradient norm, moments.
        """
        model = self.blueprint.bind(params)
        h_BTD = jax.jit(lambda tokens: model.hidden(tokens)[0])(self.tokens)
        h_ND = np.asarray(h_BTD, np.float64).reshape(-1, h_BTD.shape[-1])
        path = (
            "vocab/head/table"
            if "vocab/head/table" in self.blueprint.infos
            else "vocab/input/table"
        )
        table_VD = np.asarray(by_path(params)[path], np.float64)
        targets_N = np.asarray(self.batch["targets"]).reshape(-1)
        # Rows that are scored and not read, as those of a tied table have a gradient from the input too.
        read = np.asarray(self.batch["ids"])
        rows_S = np.setdiff1d(np.concatenate([np.arange(32), targets_N[-1:]]), read)
        loss, dtable_SD = 0.0, np.zeros((len(rows_S), h_ND.shape[1]))
        for first in range(0, len(h_ND), 256):
            part = slice(first, first + 256)
            z_CV, at_C = h_ND[part] @ table_VD.T, targets_N[part]
            lse_C1 = np.log(np.exp(z_CV).sum(1, keepdims=True))
            loss += (lse_C1[:, 0] - z_CV[np.arange(len(at_C)), at_C]).sum() / len(h_ND)
            dz_CS = np.exp(z_CV[:, rows_S] - lse_C1) - (at_C[:, None] == rows_S)
            dtable_SD += dz_CS.T @ h_ND[part] / len(h_ND)
        found, norm, moments = run()
        clipped = dtable_SD * min(1.0, (self.optim.clip or np.inf) / float(norm))
        mu_VD = next(x for name, x in by_path(moments).items() if name.endswith(f"mu/{path}"))
        mu_SD = (1 - self.optim.b1) * clipped
        return (
            Deviation.of("the loss", found, loss, 1e-5),
            Deviation.of("mu of the scored table", np.asarray(mu_VD)[rows_S], mu_SD, 1e-3),
        )


def ours(setting: Setting) -> Ready:
    """The library's step."""
    blueprint, batch = setting.blueprint, setting.batch
    optimizer, sparse = setting.optimizer(), Sparse(setting.optim, blueprint, STEPS)
    state = init_state(optimizer, setting.params(), sparse.catch_up)
    step = make_step(blueprint, optimizer, sparse=sparse)
    compiled = step.lower(state, batch).compile()

    def run() -> Any:
        nonlocal state
        state, metrics = jax.block_until_ready(compiled(state, batch))
        return metrics.loss, metrics.gradient_norm, state.optimizer

    return Ready(run, lambda: setting.check(setting.params(), run), Memory.of(compiled))


def theirs(setting: Setting) -> Ready:
    """The step one would write: whole logits, Optax's loss, every gradient and every update dense."""
    blueprint, optimizer, tokens = setting.blueprint, setting.optimizer(), setting.tokens
    layout = blueprint.layout
    # What Optax does with logits, an explicit mesh wants replicated; on one device, nothing moves.
    targets_BT = layout.place(setting.batch["targets"][0], None, None)

    def loss_of(params: Params) -> jax.Array:
        model = blueprint.bind(params)
        h_BTD = model.hidden(tokens)[0]
        table_VD = model.vocab.head.scored(model.vocab.input.shared())[0]
        assert table_VD is not None  # a head of one matrix
        h_BTD, table_VD = layout.place(h_BTD, *[None] * 3), layout.place(table_VD, None, None)
        z_BTV = jnp.einsum("btd,vd->btv", h_BTD, table_VD)
        each = optax.losses.softmax_cross_entropy_with_integer_labels(z_BTV, targets_BT)
        return each.mean()

    def step(params: Params, moments: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss, gradient_norm(moments)

    state: Any = (params := setting.params(), jax.jit(optimizer.init)(params))
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*state).compile()

    def run() -> Any:
        nonlocal state
        *state, loss, norm = jax.block_until_ready(compiled(*state))
        return loss, norm, state[1]

    return Ready(run, lambda: setting.check(setting.params(), run), Memory.of(compiled))


def trunk_alone(setting: Setting) -> Ready:
    """Forward and backward of the trunk from a given input and a given cotangent of its output, and its update."""
    blueprint, optimizer, tokens = setting.blueprint, setting.optimizer("trunk/"), setting.tokens
    rest = setting.params()
    rng = np.random.default_rng(0)
    shape = (*tokens.ids_BT.shape, blueprint.config.width)
    x_BTD, g_BTD = (
        blueprint.layout.from_host(rng.standard_normal(shape, np.float32), "batch", "seq", None)
        for _ in "xg"
    )

    def forward(trunk: Params, x_BTD: jax.Array) -> jax.Array:
        model = blueprint.bind({**rest, "trunk": trunk})
        return model.trunk(x_BTD, tokens, (), (), None)[0]

    def step(params: Params, moments: Any, x_BTD: jax.Array, g_BTD: jax.Array) -> Any:
        y_BTD, back = jax.vjp(forward, params["trunk"], x_BTD)
        of_trunk, dx_BTD = back(g_BTD)
        updates, moments = optimizer.update({"trunk": of_trunk}, moments, params)
        return optax.apply_updates(params, updates), moments, y_BTD, dx_BTD

    state: Any = (params := {"trunk": rest.pop("trunk")}, jax.jit(optimizer.init)(params))
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*state, x_BTD, g_BTD).compile()

    def run() -> Any:
        nonlocal state
        *state, y_BTD, dx_BTD = jax.block_until_ready(compiled(*state, x_BTD, g_BTD))
        return y_BTD, dx_BTD

    # A part of ours, not a peer: the tests of the trunk say that it is right.
    return Ready(run, lambda: (), Memory.of(compiled))


def table_alone(setting: Setting) -> Ready:
    """Dense Adam of the tied table."""
    optimizer = setting.optimizer("vocab/input/table")
    params: Params = {"vocab": {"input": {"table": setting.params()["vocab"]["input"]["table"]}}}
    state: Any = (params, jax.jit(optimizer.init)(params))
    gradients = jax.tree.map(jnp.ones_like, params)

    def step(params: Params, moments: Any, gradients: Params) -> Any:
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*state, gradients).compile()

    def run() -> Any:
        nonlocal state
        state = jax.block_until_ready(compiled(*state, gradients))

    def check() -> Sequence[Deviation]:
        run()
        # All gradients are equal and clipped to a norm of `clip`; so are their moments.
        mu = next(
            x for name, x in by_path(state[1]).items() if name.endswith("mu/vocab/input/table")
        )
        clipped = (setting.optim.clip or np.inf) / np.sqrt(mu.size)
        return (Deviation.of("mu", mu, np.full(mu.shape, (1 - setting.optim.b1) * clipped), 1e-4),)

    return Ready(run, check, Memory.of(compiled))


MODELS = {
    "tied": VocabConfig(head=TiedHead()),
    "untied": VocabConfig(head=UntiedHead()),
    "ple": VocabConfig(head=TiedHead(), memories=(PLE(width=64),)),
}


def by_rows(model: str) -> str:
    return f"{model}, by rows"


def by_optax(model: str) -> str:
    return f"{model}, full logits and dense Adam"


def measured(options: Options) -> list[Record]:
    case = f"V {options.vocab:,}, D {options.width}, L {options.layers}, N {options.batch * options.length:,}"
    how, threads = options.how, options.threads
    layout = start(Launch(), one_device=True)

    def setting(model: str, optim: OptimConfig = DENSE) -> Setting:
        return Setting.of(layout, options, MODELS[model], optim)

    @functools.cache
    def products() -> Problem:
        tokens = options.batch * options.length
        return Problem.draw(tokens, options.width, options.vocab, "float32", how.seed)

    makers: dict[str, Callable[[], Ready]] = {
        "tied": lambda: ours(setting("tied")),
        TRUNK: lambda: trunk_alone(setting("tied")),
        FLOORS[0]: lambda: floor_in_jax(products()),
        FLOORS[1]: lambda: floor_in_torch(products(), threads),
        TABLE: lambda: table_alone(setting("tied")),
        by_rows("untied"): lambda: ours(setting("untied", BY_ROWS["untied"])),
        by_optax("untied"): lambda: theirs(setting("untied")),
        by_rows("ple"): lambda: ours(setting("ple", BY_ROWS["ple"])),
        by_optax("ple"): lambda: theirs(setting("ple")),
    }
    listed = [Candidate(case, name, make) for name, make in makers.items()]
    with jax.set_mesh(layout.mesh):
        return measure(listed, {case: FLOORS}, how.rounds, how.retries, how.seed)


def targets(cases: Sequence[str]) -> list[Target]:
    """What a step is to reach, case by case."""
    found = []
    for case in cases:
        parts = tuple(((case, TRUNK), (case, floor), (case, TABLE)) for floor in FLOORS)
        found.append(Target(f"{case}: tied / (trunk + F + Adam)", 1.10, (case, "tied"), parts))
        for model in ("untied", "ple"):
            mine, other = (case, by_rows(model)), (((case, by_optax(model)),),)
            found += [
                Target(f"{case}: {model}, time", 0.6, mine, other),
                Target(f"{case}: {model}, peak memory", 0.5, mine, other, "peak"),
            ]
    return found


def main(arguments: list[str]) -> None:
    """Measures, and writes results, table and picture."""
    options = parse(Options, "bench step", arguments)
    runner.run("step", arguments, options.how, lambda: measured(options), targets)
