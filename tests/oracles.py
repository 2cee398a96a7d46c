"""What the vocabulary must compute, in float64 NumPy: the equations written out, with their gradients."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class CrossEntropy(NamedTuple):
    """Sums and gradients of a linear head's loss; the fields of `vocabjax.Loss`, then per-token values, then gradients."""

    total: float
    nll: float
    z: float
    weight: float
    tokens: int
    invalid: int
    nll_BT: np.ndarray
    dh_BTD: np.ndarray
    dtable_VD: np.ndarray
    dbias_V: np.ndarray


def allowed_ids(padded: int, logical: int, banned: Sequence[int] = ()) -> np.ndarray:
    """bool [Vp]: the ids that may be predicted."""
    return np.array([v < logical and v not in banned for v in range(padded)])


def scores(
    h: np.ndarray,
    table_VD: np.ndarray,
    bias_V: np.ndarray | None = None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> np.ndarray:
    """cap · tanh((scale · h·tableᵀ + bias) / cap), before any masking."""
    u = scale * (h.astype(np.float64) @ table_VD.astype(np.float64).T)
    if bias_V is not None:
        u = u + bias_V.astype(np.float64)
    return u if softcap is None else softcap * np.tanh(u / softcap)


def cross_entropy(
    h_BTD: np.ndarray,
    table_VD: np.ndarray,
    targets_BT: np.ndarray,
    allowed_V: np.ndarray,
    *,
    bias_V: np.ndarray | None = None,
    weights_BT: np.ndarray | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    normalizer: float | None = None,
) -> CrossEntropy:
    """The loss one token at a time, over the allowed ids only, and its gradient by the chain rule.

    Per token: q = (1−ε) one-hot + ε uniform, loss = −Σ q log p + λ lse², so dz = p − q + 2λ lse p.
    """
    h_BTD, table_VD = h_BTD.astype(np.float64), table_VD.astype(np.float64)
    (ids,) = np.nonzero(allowed_V)
    all_scores = scores(h_BTD, table_VD, bias_V, scale=scale, softcap=softcap)
    nll_BT = np.zeros(targets_BT.shape)
    dscores = np.zeros_like(all_scores)
    total = nll = z = weight_sum = 0.0
    tokens = invalid = 0
    for at in np.ndindex(targets_BT.shape):
        target = int(targets_BT[at])
        if target not in ids:
            invalid += target != -100
            continue
        weight = 1.0 if weights_BT is None else float(weights_BT[at])
        allowed_scores = all_scores[at][ids]
        top = allowed_scores.max()
        lse = top + np.log(np.exp(allowed_scores - top).sum())
        log_p = allowed_scores - lse
        q = np.full(len(ids), label_smoothing / len(ids)) + (1 - label_smoothing) * (ids == target)
        nll_BT[at] = -log_p[ids == target][0]
        total += weight * (-(q * log_p).sum() + z_loss * lse**2)
        nll += weight * nll_BT[at]
        z += weight * lse**2
        weight_sum += weight
        tokens += 1
        dscores[at][ids] = weight * (np.exp(log_p) * (1 + 2 * z_loss * lse) - q)
    divisor = weight_sum if normalizer is None else normalizer
    inverse = 0.0 if divisor == 0 else 1 / divisor
    slope = 1.0 if softcap is None else 1 - (all_scores / softcap) ** 2
    du = (dscores * inverse * slope).reshape(-1, len(allowed_V))
    return CrossEntropy(
        total * inverse,
        nll,
        z,
        weight_sum,
        tokens,
        invalid,
        nll_BT,
        scale * (du @ table_VD).reshape(h_BTD.shape),
        scale * du.T @ h_BTD.reshape(len(du), -1),
        du.sum(0),
    )


def scatter_add(shape: tuple[int, ...], ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The gradient of a lookup: each row sums the values of the places that read it; ids outside [0, V) read none."""
    out = np.zeros(shape)
    real = (ids >= 0) & (ids < shape[0])
    np.add.at(out, ids[real], values[real].astype(np.float64))
    return out
