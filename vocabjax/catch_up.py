"""What a row has missed while it was not touched, given all at once: what dense updates with a gradient of zero would have done.

For a row current after update t and read before update n + 1, with s = t + 1 … n, λ the decay and η_s the rate of update s:

    m ← b1^(n−t) m        v ← b2^(n−t) v        D(s) = Π_{s < r ≤ n} (1 − η_r λ)
    p ← p · D(t) − m Σ_s η_s D(s) b1^(s−t) / (1 − b1^s) / (√(b2^(s−t) v / (1 − b2^s)) + ε)

The sum has no closed form while ε counts, but its terms shrink like (b1/√b2)^(s−t): those below 2⁻³⁰ of the first are left out.
Adagrad and SGD do not move without a gradient, so theirs is the decay alone.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from vocabjax.optim import GroupRule

UNROLL = 8  # terms of the sum in one pass over the rows
BLOCK = 1024  # rows that are brought up to date at one time: what a cache holds

Rows = dict[str, jax.Array]  # "params", and for Adam "mu" and "nu": [R, W]
CatchUp = Callable[[Rows, jax.Array, jax.Array], Rows]  # (rows, last_R, now) → rows


def make_catch_up(rule: GroupRule) -> CatchUp:
    """(rows, last_R, now) → the rows after `now` updates, where row r is as update `last_R[r]` left it (0: as it was born).

    Elementwise in rows, float32.
    """
    rates = rule.rates
    decayed = np.log1p(-rates.astype(np.float64) * rule.weight_decay)
    log_kept = np.concatenate([[0.0], np.cumsum(decayed)])
    terms = _terms(rule.b1, rule.b2)

    def missed(rows: Rows, last_R: jax.Array, now: jax.Array) -> Rows:
        def kept(since: jax.Array) -> jax.Array:
            logs = jnp.asarray(log_kept, jnp.float32)
            return jnp.exp(logs[now] - logs[since])

        params = rows["params"] * kept(last_R)[:, None]
        if rule.optimizer != "adamw":
            return {**rows, "params": params}
        mu, nu = rows["mu"], rows["nu"]
        gap_R = now - last_R
        root = jnp.sqrt(nu)

        def add(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            start, total = state
            back_RK = start + 1 + jnp.arange(UNROLL) + 0 * gap_R[:, None]
            step_RK = jnp.minimum(last_R[:, None] + back_RK, now)
            rate_RK = jnp.asarray(rates, jnp.float32)[jnp.maximum(step_RK - 1, 0)]
            # Written as Optax does, so that early steps round alike.
            weight_RK = rate_RK * kept(step_RK) * rule.b1**back_RK / (1 - rule.b1**step_RK)
            weight_RK = jnp.where(back_RK <= gap_R[:, None], weight_RK, 0)
            factor_RK = jnp.sqrt(rule.b2**back_RK / (1 - rule.b2**step_RK))
            for k in range(UNROLL):
                total += weight_RK[:, k, None] / (root * factor_RK[:, k, None] + rule.eps)
            return start + UNROLL, total

        # Rows without momentum (never touched, or unused) have nothing to sum.
        needed = jnp.where((mu != 0).any(-1), jnp.minimum(gap_R, terms), 0).max(initial=0)
        _, total = lax.while_loop(
            lambda state: state[0] < needed, add, (jnp.int32(0), jnp.zeros_like(root))
        )
        return {
            "params": params - mu * total,
            "mu": mu * rule.b1 ** gap_R[:, None],
            "nu": nu * rule.b2 ** gap_R[:, None],
        }

    return missed


def in_blocks(catch_up: CatchUp, rows: Rows, last_R: jax.Array, now: jax.Array) -> Rows:
    """The same for a whole table, block after block in place."""
    size, block = len(last_R), min(BLOCK, len(last_R))

    def body(index: jax.Array, rows: Rows) -> Rows:
        # The last block may begin inside the one before: those rows have caught up, and are kept as they are.
        start = jnp.minimum(index * block, size - block)
        is_new_B = start + jnp.arange(block) >= index * block
        last_B = jnp.where(is_new_B, lax.dynamic_slice_in_dim(last_R, start, block), now)
        part = {name: lax.dynamic_slice_in_dim(x, start, block) for name, x in rows.items()}
        part = catch_up(part, last_B, now)
        return {
            name: lax.dynamic_update_slice_in_dim(x, part[name], start, 0)
            for name, x in rows.items()
        }

    return lax.fori_loop(0, -(-size // block), body, rows)


def _terms(b1: float, b2: float) -> int:
    """How many terms of the sum count in float32."""
    if b1 == 0:
        return 0
    vanished = math.ceil(150 * math.log(2) / -math.log(b1))  # b1^k is 0 in float32
    ratio = b1 / math.sqrt(b2) if b2 else math.inf
    if ratio >= 1:
        return vanished
    return min(vanished, math.ceil(30 * math.log(2) / -math.log(ratio)))
