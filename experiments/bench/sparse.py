"""Adam on a large table of which a step reads few rows: dense, by touched rows, and torch's SparseAdam.

    python run.py bench sparse

Tables of two sizes with the same number of touched rows, in the same rounds: an update by rows should cost the same for both. The
floor gathers given rows of table and moments, updates them and puts them back, in place, knowing that the ids are sorted,
unique and in range.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vocabjax.flags import Flat, Switches, parse
from vocabjax.mesh import Layout
from vocabjax.vocab import touched
from vocabjax.vocab.table import lookup
from vocabjax.vocab.touched import Plan

from . import runner
from .harness import Candidate, Deviation, Memory, Ready, Record, measure
from .loss import finished, on_device
from .report import Target

DENSE, GIVEN, RAW = "dense Optax Adam", "ours, touched rows given", "ours, raw tokens"
COALESCED, TORCH = "torch SparseAdam, coalesced", "torch SparseAdam, raw tokens"
FLOOR = "row update alone"
LR, B1, B2, EPS = 1e-3, 0.9, 0.999, 1e-8
ADAM = optax.scale_by_adam(B1, B2, EPS)

Rows = dict[str, np.ndarray]  # of table, mu and nu


@dataclass(frozen=True)
class Options:
    """Times Adam by rows.

    Attributes:
      tokens: N, raw tokens of a step.
      touched: distinct rows among them.
      width: D.
      vocab: rows of the small table.
      large: rows of the large one; 0: without it.
      threads: of torch.
    """

    tokens: int = 8192
    touched: int = 4096
    width: int = 512
    vocab: int = 100_096
    large: int = 800_768
    threads: int = 2
    how: Annotated[runner.Rounds, Flat, Switches] = field(default_factory=runner.Rounds)


class Problem:
    """A table with its moments, which the candidates in JAX update in turn, and the gradients of one step.

    Attributes:
      ids_N, g_ND: of the raw tokens; rows_U, g_UD: of the touched rows, ascending, repeated ids summed.
      state: float32 table, mu and nu [V, D], and the count of steps.
    """

    def __init__(self, options: Options, vocab: int) -> None:
        rng = np.random.default_rng(options.how.seed)
        self.layout, self.vocab, self.width = Layout.make(), vocab, options.width
        self.rows_U = np.sort(rng.choice(vocab, options.touched, replace=False)).astype(np.int32)
        more = rng.choice(self.rows_U, options.tokens - options.touched)
        self.ids_N = rng.permutation(np.concatenate([self.rows_U, more]))
        self.g_ND = rng.standard_normal((options.tokens, options.width), np.float32)
        g_UD = np.zeros((options.touched, options.width))
        np.add.at(g_UD, np.searchsorted(self.rows_U, self.ids_N), self.g_ND)
        self.g_UD = g_UD.astype(np.float32)
        shape = (vocab, options.width)
        self.state: tuple[jax.Array, ...] = (*(jnp.zeros(shape) for _ in "pmv"), jnp.int32(0))
        # Some touched rows, and as many that are not.
        others = np.setdiff1d(rng.choice(vocab, 256, replace=False), self.rows_U)[:64]
        self.sample_S = np.concatenate([self.rows_U[:64], others])
        self.g_SD = np.zeros((len(self.sample_S), options.width))
        self.g_SD[:64] = g_UD[:64]

    def sample(self) -> tuple[list[np.ndarray], int]:
        *arrays, count = self.state
        return [np.asarray(array[self.sample_S], np.float64) for array in arrays], int(count)

    def check(
        self,
        run: Callable[[], Any],
        sample: Callable[[], tuple[list[np.ndarray], int]],
        *,
        is_dense: bool,
    ) -> Sequence[Deviation]:
        """One step of the textbook's Adam on the sample. A row that is not touched moves under dense updates alone."""
        (p, m, v), count = sample()
        run()
        found, _ = sample()
        m_new = B1 * m + (1 - B1) * self.g_SD
        v_new = B2 * v + (1 - B2) * self.g_SD**2
        step = count + 1
        p_new = p - LR * (m_new / (1 - B1**step)) / (np.sqrt(v_new / (1 - B2**step)) + EPS)
        moves = np.full((len(self.sample_S), 1), is_dense)
        moves[:64] = True
        pairs = ((p_new, p), (m_new, m), (v_new, v))
        expected = [np.where(moves, new, old) for new, old in pairs]
        # torch adds ε before it corrects the bias, which shows where a gradient is small.
        limits = {"the table": 1e-4, "mu": 1e-5, "nu": 1e-5}
        return [
            Deviation.of(name, found[i], expected[i], limit)
            for i, (name, limit) in enumerate(limits.items())
        ]


def in_place(
    problem: Problem, step: Callable[..., tuple[jax.Array, ...]], *args: Any, is_dense: bool = False
) -> Ready:
    """A candidate from its step (table, mu, nu, count, *args) → the first four, all donated."""
    donated = jax.jit(step, donate_argnums=(0, 1, 2, 3))
    compiled = donated.lower(*problem.state, *args).compile()

    def run() -> None:
        problem.state = jax.block_until_ready(compiled(*problem.state, *args))

    check = functools.partial(problem.check, run, problem.sample, is_dense=is_dense)
    return Ready(run, check, Memory.of(compiled))


def adam(arrays: Sequence[jax.Array], count: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
    """Table, mu, nu and count after a step with the gradient g of all their rows."""
    p, m, v = arrays
    moves, state = ADAM.update(g, optax.ScaleByAdamState(count, m, v))
    return p - LR * moves, state.mu, state.nu, state.count


def dense(problem: Problem) -> Ready:
    shape = (problem.vocab, problem.width)
    g_VD = jnp.zeros(shape).at[problem.rows_U].set(problem.g_UD)

    def step(p: Any, m: Any, v: Any, count: Any, g_VD: jax.Array) -> Any:
        return adam((p, m, v), count, g_VD)

    return in_place(problem, step, g_VD, is_dense=True)


def by_plan(problem: Problem, state: Sequence[jax.Array], plan: Plan, g: Any) -> Any:
    """Fetches rows and moments, updates them with the gradient that `g` makes of the table's, and puts them back."""
    *arrays, count = state
    views = [touched.fetch(problem.layout, array, plan) for array in arrays]
    *new, count = adam(views, count, g(views[0]))
    pairs = zip(arrays, new, strict=True)
    return (*(touched.commit(problem.layout, array, plan, view) for array, view in pairs), count)


def given(problem: Problem) -> Ready:
    plan_of = functools.partial(
        touched.plan, problem.layout, logical=problem.vocab, padded=problem.vocab
    )
    plan = jax.jit(plan_of)(jnp.asarray(problem.rows_U[None]))

    def step(table: Any, mu: Any, nu: Any, count: Any, plan: Plan, g_UD: jax.Array) -> Any:
        return by_plan(problem, (table, mu, nu, count), plan, lambda _: g_UD)

    return in_place(problem, step, plan, jnp.asarray(problem.g_UD))


def raw(problem: Problem) -> Ready:
    layout, vocab = problem.layout, problem.vocab

    def step(table: Any, mu: Any, nu: Any, count: Any, ids_BT: jax.Array, g_BTD: jax.Array) -> Any:
        plan = touched.plan(layout, ids_BT, logical=vocab, padded=vocab)

        def gradient(view_UD: jax.Array) -> jax.Array:
            def read(view_UD: jax.Array) -> jax.Array:
                rows, dtype = len(view_UD), view_UD.dtype
                return lookup(layout, view_UD, plan.slots, logical=rows, dtype=dtype)

            return jax.vjp(read, view_UD)[1](g_BTD)[0]

        return by_plan(problem, (table, mu, nu, count), plan, gradient)

    return in_place(
        problem, step, jnp.asarray(problem.ids_N[None]), jnp.asarray(problem.g_ND[None])
    )


def floor(problem: Problem) -> Ready:
    known: Any = {
        "unique_indices": True,
        "indices_are_sorted": True,
        "mode": "promise_in_bounds",
    }

    def step(p: Any, m: Any, v: Any, count: Any, rows_U: jax.Array, g_UD: jax.Array) -> Any:
        arrays = (p, m, v)
        *new, count = adam([array.at[rows_U].get(**known) for array in arrays], count, g_UD)
        pairs = zip(arrays, new, strict=True)
        return (*(array.at[rows_U].set(rows, **known) for array, rows in pairs), count)

    return in_place(problem, step, jnp.asarray(problem.rows_U), jnp.asarray(problem.g_UD))


def in_torch(problem: Problem, threads: int, *, coalesced: bool) -> Ready:
    import torch

    torch.set_num_threads(threads)
    shape = (problem.vocab, problem.width)
    table = torch.nn.Parameter(on_device(torch, np.zeros(shape, np.float32), "float32"))
    optimizer = torch.optim.SparseAdam([table], lr=LR, betas=(B1, B2), eps=EPS)
    ids, g = (problem.rows_U, problem.g_UD) if coalesced else (problem.ids_N, problem.g_ND)
    index, values = on_device(torch, ids[None], "int64"), on_device(torch, g, "float32")
    sample_S = on_device(torch, problem.sample_S, "int64")

    def run() -> None:
        table.grad = torch.sparse_coo_tensor(
            index, values, shape, is_coalesced=coalesced, check_invariants=False
        )
        optimizer.step()
        finished(torch, (table,))

    def sample() -> tuple[list[np.ndarray], int]:
        state = optimizer.state[table]
        arrays = (table.detach(), state["exp_avg"], state["exp_avg_sq"])
        found = [array[sample_S].double().cpu().numpy() for array in arrays]
        return found, int(state["step"])

    run()  # makes its moments
    return Ready(run, functools.partial(problem.check, run, sample, is_dense=False))


def candidates(case: str, problem: Problem, options: Options) -> list[Candidate]:
    makers: dict[str, Callable[[], Ready]] = {
        DENSE: lambda: dense(problem),
        GIVEN: lambda: given(problem),
        RAW: lambda: raw(problem),
        FLOOR: lambda: floor(problem),
    }
    if (
        problem.vocab == options.vocab
    ):  # torch's own table and moments: the large ones need not fit beside ours
        makers[COALESCED] = lambda: in_torch(problem, options.threads, coalesced=True)
        makers[TORCH] = lambda: in_torch(problem, options.threads, coalesced=False)
    return [Candidate(case, name, make) for name, make in makers.items()]


def measured(options: Options) -> list[Record]:
    listed: list[Candidate] = []
    for vocab in filter(None, (options.vocab, options.large)):
        listed += candidates(f"{vocab:,} × {options.width}", Problem(options, vocab), options)
    floors = {candidate.case: (FLOOR,) for candidate in listed}
    how = options.how
    return measure(listed, floors, how.rounds, how.retries, how.seed)


def targets(cases: Sequence[str]) -> list[Target]:
    """What updates by rows are to reach."""
    small, *large = sorted(cases, key=lambda case: int(case.split()[0].replace(",", "")))
    found = [
        Target(f"{small}: touched rows / dense", 0.17, (small, GIVEN), (((small, DENSE),),)),
        Target(f"{small}: raw tokens / torch's", 1.0, (small, RAW), (((small, TORCH),),)),
    ]
    for case in large:
        found += [
            Target(f"{case}: touched rows / dense", 0.035, (case, GIVEN), (((case, DENSE),),)),
            Target(f"touched rows, {case} / {small}", 1.2, (case, GIVEN), (((small, GIVEN),),)),
            Target(f"raw tokens, {case} / {small}", 1.2, (case, RAW), (((small, RAW),),)),
        ]
    return found


def main(arguments: list[str]) -> None:
    """Measures, and writes results, table and picture."""
    options = parse(Options, "bench sparse", arguments)
    runner.run("sparse", arguments, options.how, lambda: measured(options), targets)
