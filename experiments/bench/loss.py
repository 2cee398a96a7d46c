"""Fused linear cross-entropy, forward and backward, against its peers and the three matrix products alone.

    python run.py bench loss                                        50,304 ids in float32
    python run.py bench loss --vocab 151936 --dtype bfloat16        another case, beside the first

The loss is the mean over N tokens of lse(h·tableᵀ) − z_target, with its gradients in h and table, both given in the case's dtype.
The floor F is the three products (logits, dh, dtable) alone; of XLA's and torch's, the faster counts.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vocabjax.flags import Flat, Switches, parse
from vocabjax.mesh import Layout
from vocabjax.vocab.interfaces import Objective
from vocabjax.vocab.loss import linear_cross_entropy
from vocabjax.vocab.scores import Scoring
from vocabjax.vocab.sizes import Sizes

from . import runner
from .harness import Candidate, Deviation, Memory, Ready, Record, measure
from .report import Target

OURS, OPTAX, SCAN = "ours", "Optax, full logits", "token scan + checkpoint"
TOKAMAX = ("tokamax xla", "tokamax chunked_xla")
TORCH, CCE = "torch, full logits", "cut-cross-entropy torch_compile"
FLOORS = ("F, XLA", "F, torch")
SCAN_CHUNK = 256

# Relative errors that may be: of the mean loss, and of each gradient.
LIMITS = {"float32": (1e-5, 1e-4), "bfloat16": (1e-3, 1e-2)}
Dtype = Literal["float32", "bfloat16"]
Gradients = tuple[Any, Any, Any]  # loss, dh, dtable


@dataclass(frozen=True)
class Options:
    """Times the fused loss.

    Attributes:
      tokens: N.
      width: D.
      vocab: V.
      dtype: of hidden states and table.
      threads: of torch.
    """

    tokens: int = 2048
    width: int = 512
    vocab: int = 50_304
    dtype: Dtype = "float32"
    threads: int = 2
    how: Annotated[runner.Rounds, Flat, Switches] = field(default_factory=runner.Rounds)


@dataclass(frozen=True)
class Problem:
    """Inputs in NumPy, of values that the dtype can hold.

    Attributes:
      dz_NV: cotangents of the logits, for the products alone.
    """

    dtype: Dtype
    h_ND: np.ndarray
    table_VD: np.ndarray
    targets_N: np.ndarray
    dz_NV: np.ndarray

    @staticmethod
    def draw(tokens: int, width: int, vocab: int, dtype: Dtype, seed: int) -> "Problem":
        rng = np.random.default_rng(seed)
        return Problem(
            dtype,
            _rounded(rng.normal(size=(tokens, width)), dtype),
            _rounded(rng.normal(size=(vocab, width)) / np.sqrt(width), dtype),
            rng.integers(0, vocab, tokens).astype(np.int32),
            _rounded(rng.standard_normal((tokens, vocab), np.float32), dtype),
        )

    @functools.cached_property
    def answer(self) -> tuple[float, np.ndarray, np.ndarray]:
        return cross_entropy(self.h_ND, self.table_VD, self.targets_N)

    def check(self, found: Gradients) -> Sequence[Deviation]:
        of_loss, of_gradient = LIMITS[self.dtype]
        loss, dh_ND, dtable_VD = self.answer
        return (
            Deviation.of("the loss", found[0], loss, of_loss),
            Deviation.of("dh", found[1], dh_ND, of_gradient),
            Deviation.of("dtable", found[2], dtable_VD, of_gradient),
        )

    def check_products(self, z_NV: Any, dh_ND: Any, dtable_VD: Any) -> Sequence[Deviation]:
        """Of the floor, by a few rows of each product."""
        h, table, dz = (x.astype(np.float64) for x in (self.h_ND[:4], self.table_VD, self.dz_NV))
        limit = LIMITS[self.dtype][1]
        return (
            Deviation.of("logits", z_NV[:4], h @ table.T, limit),
            Deviation.of("dh", dh_ND[:4], dz[:4] @ table, limit),
            Deviation.of(
                "dtable", dtable_VD[:4], dz[:, :4].T @ self.h_ND.astype(np.float64), limit
            ),
        )


def cross_entropy(
    h_ND: np.ndarray, table_VD: np.ndarray, targets_N: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """The mean loss and its gradients in float64 NumPy, 256 tokens at a time."""
    table_VD, count = table_VD.astype(np.float64), len(h_ND)
    loss, dh_ND, dtable_VD = 0.0, np.zeros(h_ND.shape), np.zeros(table_VD.shape)
    for start in range(0, count, 256):
        part = slice(start, start + 256)
        h_CD, at = h_ND[part].astype(np.float64), targets_N[part]
        z_CV = h_CD @ table_VD.T
        tokens = np.arange(len(at))
        top_C1 = z_CV.max(1, keepdims=True)
        target_C = z_CV[tokens, at] - top_C1[:, 0]
        p_CV = np.exp(z_CV - top_C1, out=z_CV)
        sum_C1 = p_CV.sum(1, keepdims=True)
        loss += float((np.log(sum_C1[:, 0]) - target_C).sum()) / count
        p_CV /= sum_C1 * count
        p_CV[tokens, at] -= 1 / count
        dh_ND[part] = p_CV @ table_VD
        dtable_VD += p_CV.T @ h_CD
    return loss, dh_ND, dtable_VD


def _rounded(x: np.ndarray, dtype: Dtype) -> np.ndarray:
    return np.asarray(x, jnp.dtype(dtype)).astype(np.float32)


def in_jax(problem: Problem, loss: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]) -> Ready:
    """A candidate from its loss (h_ND, table_VD, targets_N) → the mean."""
    dtype = jnp.dtype(problem.dtype)
    args = (
        jnp.asarray(problem.h_ND, dtype),
        jnp.asarray(problem.table_VD, dtype),
        jnp.asarray(problem.targets_N),
    )
    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*args).compile()

    def run() -> Any:
        return jax.block_until_ready(compiled(*args))

    def check() -> Sequence[Deviation]:
        value, gradients = run()
        return problem.check((value, *gradients))

    return Ready(run, check, Memory.of(compiled))


def ours(problem: Problem) -> Ready:
    layout = Layout.make()
    scoring = Scoring(layout, Sizes.make(len(problem.table_VD), 1, (), layout))

    def loss(h_ND: jax.Array, table_VD: jax.Array, targets_N: jax.Array) -> jax.Array:
        batch = (h_ND[None], table_VD, targets_N[None])
        return linear_cross_entropy(scoring, Objective(), *batch).total

    return in_jax(problem, loss)


def _sum_of_full(h_ND: jax.Array, table_VD: jax.Array, targets_N: jax.Array) -> jax.Array:
    z_NV = jnp.einsum("nd,vd->nv", h_ND, table_VD, preferred_element_type=jnp.float32)
    return optax.losses.softmax_cross_entropy_with_integer_labels(z_NV, targets_N).sum()


def full(problem: Problem) -> Ready:
    return in_jax(problem, lambda h, table, targets: _sum_of_full(h, table, targets) / len(h))


def scan(problem: Problem) -> Ready:
    """What one writes first against the memory: chunks of tokens, whose logits are computed again in the backward."""

    def loss(h_ND: jax.Array, table_VD: jax.Array, targets_N: jax.Array) -> jax.Array:
        of_chunk = jax.checkpoint(_sum_of_full)

        def body(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return total + of_chunk(part[0], table_VD, part[1]), None

        parts = (h_ND.reshape(-1, SCAN_CHUNK, h_ND.shape[1]), targets_N.reshape(-1, SCAN_CHUNK))
        return jax.lax.scan(body, jnp.float32(0), parts)[0] / len(h_ND)

    return in_jax(problem, loss)


def tokamax(problem: Problem, implementation: str) -> Ready:
    from tokamax import linear_softmax_cross_entropy_loss

    def loss(h_ND: jax.Array, table_VD: jax.Array, targets_N: jax.Array) -> jax.Array:
        return linear_softmax_cross_entropy_loss(
            h_ND, targets_N, table_VD.T, reduction="mean", implementation=implementation
        )

    return in_jax(problem, loss)


def in_torch(problem: Problem, threads: int, loss: Callable[[Any, Any, Any, Any], Any]) -> Ready:
    """A candidate from its loss (torch, h_ND, table_VD, targets_N) → the mean."""
    import torch

    torch.set_num_threads(threads)
    h_ND, table_VD = (
        on_device(torch, x, problem.dtype).requires_grad_()
        for x in (problem.h_ND, problem.table_VD)
    )
    targets_N = on_device(torch, problem.targets_N, "int64")

    def run() -> Gradients:
        value = loss(torch, h_ND, table_VD, targets_N)
        return finished(torch, (value.detach(), *torch.autograd.grad(value, (h_ND, table_VD))))

    def check() -> Sequence[Deviation]:
        value, dh_ND, dtable_VD = (x.double().cpu().numpy() for x in run())
        return problem.check((value, dh_ND, dtable_VD))

    return Ready(run, check)


def on_device(torch: Any, x: np.ndarray, dtype: str) -> Any:
    """A torch tensor where JAX computes: on the GPU, if that is one."""
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    return torch.from_numpy(x).to(device, getattr(torch, dtype))


def finished(torch: Any, results: tuple[Any, ...]) -> tuple[Any, ...]:
    """The results, when they are there."""
    if results[0].is_cuda:
        torch.cuda.synchronize()
    return results


def torch_full(problem: Problem, threads: int) -> Ready:
    def loss(torch: Any, h_ND: Any, table_VD: Any, targets_N: Any) -> Any:
        return torch.nn.functional.cross_entropy((h_ND @ table_VD.T).float(), targets_N)

    return in_torch(problem, threads, loss)


def cut_cross_entropy(problem: Problem, threads: int) -> Ready:
    from cut_cross_entropy import linear_cross_entropy as theirs

    def loss(_: Any, h_ND: Any, table_VD: Any, targets_N: Any) -> Any:
        return theirs(h_ND, table_VD, targets_N, impl="torch_compile")

    return in_torch(problem, threads, loss)


def floor_in_jax(problem: Problem) -> Ready:
    dtype = jnp.dtype(problem.dtype)
    arrays = (problem.h_ND, problem.table_VD, problem.dz_NV)
    args = [jnp.asarray(x, dtype) for x in arrays]

    def products(h_ND: jax.Array, table_VD: jax.Array, dz_NV: jax.Array) -> Any:
        # dtableᵀ with h turned beforehand: XLA's CPU products in bf16 are slow where the left operand's rows are contracted.
        return (
            jnp.einsum("nd,vd->nv", h_ND, table_VD, preferred_element_type=jnp.float32),
            jnp.einsum("nv,vd->nd", dz_NV, table_VD, preferred_element_type=jnp.float32),
            jnp.einsum("dn,nv->dv", h_ND.T, dz_NV, preferred_element_type=jnp.float32),
        )

    compiled = jax.jit(products).lower(*args).compile()

    def run() -> Any:
        return jax.block_until_ready(compiled(*args))

    def check() -> Sequence[Deviation]:
        z_NV, dh_ND, dtable_DV = run()
        return problem.check_products(z_NV, dh_ND, dtable_DV.T)

    return Ready(run, check, Memory.of(compiled))


def floor_in_torch(problem: Problem, threads: int) -> Ready:
    import torch

    torch.set_num_threads(threads)
    arrays = (problem.h_ND, problem.table_VD, problem.dz_NV)
    h_ND, table_VD, dz_NV = (on_device(torch, x, problem.dtype) for x in arrays)

    def run() -> Any:
        return finished(torch, (h_ND @ table_VD.T, dz_NV @ table_VD, dz_NV.T @ h_ND))

    def check() -> Sequence[Deviation]:
        return problem.check_products(*(product.double().cpu().numpy() for product in run()))

    return Ready(run, check)


def candidates(case: str, problem: Problem, options: Options) -> list[Candidate]:
    threads = options.threads
    makers: dict[str, Callable[[], Ready]] = {
        OURS: lambda: ours(problem),
        OPTAX: lambda: full(problem),
        SCAN: lambda: scan(problem),
        TOKAMAX[0]: lambda: tokamax(problem, "xla"),
        TOKAMAX[1]: lambda: tokamax(problem, "chunked_xla"),
        TORCH: lambda: torch_full(problem, threads),
        CCE: lambda: cut_cross_entropy(problem, threads),
        FLOORS[0]: lambda: floor_in_jax(problem),
        FLOORS[1]: lambda: floor_in_torch(problem, threads),
    }
    return [Candidate(case, name, make) for name, make in makers.items()]


def measured(options: Options) -> list[Record]:
    case = f"{options.dtype}, V {options.vocab:,}, D {options.width}, N {options.tokens:,}"
    how = options.how
    problem = Problem.draw(options.tokens, options.width, options.vocab, options.dtype, how.seed)
    listed = candidates(case, problem, options)
    return measure(listed, {case: FLOORS}, how.rounds, how.retries, how.seed)


def targets(cases: Sequence[str]) -> list[Target]:
    """What the loss is to reach, case by case."""
    found = []
    for case in cases:

        def target(what: str, limit: float, *against: str, case: str = case, **more: Any) -> Target:
            keys = tuple(((case, name),) for name in against)
            return Target(f"{case}: {what}", limit, (case, OURS), keys, **more)

        if case.startswith("float32"):
            found += [
                target("time / F", 1.05, *FLOORS),
                target("time / best peer in JAX that recomputes", 0.72, SCAN, *TOKAMAX),
            ]
        else:
            found += [
                target("time / Optax, full logits", 0.55, OPTAX),
                target("time / cut-cross-entropy", 1.10, CCE),
            ]
        found.append(
            target("temporaries / Optax, full logits", 0.25, OPTAX, quantity="temporaries")
        )
    return found


def main(arguments: list[str]) -> None:
    """Measures, and writes results, table and picture."""
    options = parse(Options, "bench loss", arguments)
    runner.run("loss", arguments, options.how, lambda: measured(options), targets)
