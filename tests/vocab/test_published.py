"""Parts against published code, whose weights, outputs and gradients `tests/fixtures/make.py` froze.

Both sides start from the same float32 weights. What they may differ by is float32 rounding through a few layers, theirs (float64 for
ALBERT and the cross-entropy, float32 for Gemma) or ours, hence the tolerances: 1e−5 of the largest entry. Where a formula
differs on purpose, a test says by how much.
"""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import quick_jit

from vocabjax import FullTable, Objective, Tokens, UntiedHead, Vocab, VocabConfig
from vocabjax.norms import EPSILON
from vocabjax.paths import by_path, path_of
from vocabjax.vocab.heads.adaptive import AdaptiveSoftmax
from vocabjax.vocab.heads.factorized import AlbertHead
from vocabjax.vocab.inputs.factorized import FactorizedTable
from vocabjax.vocab.interfaces import TrunkShape
from vocabjax.vocab.lexicon import Lexicon
from vocabjax.vocab.memories.ple import PLE

Arrays = dict[str, np.ndarray]


def load(name: str) -> Arrays:
    with np.load(Path(__file__).parents[1] / "fixtures" / f"{name}.npz") as file:
        return dict(file)


def under(prefix: str, arrays: Arrays) -> Arrays:
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def build(
    size: int,
    width: int,
    *,
    trunk: TrunkShape | None = None,
    lexicon: Lexicon | None = None,
    **parts: Any,
) -> Vocab:
    config = VocabConfig(size=size, width=width, multiple=1, **parts)
    return Vocab(config, rngs=nnx.Rngs(0), trunk=trunk, lexicon=lexicon)


def fill(vocab: Vocab, values: Arrays, part: str) -> Vocab:
    """The vocabulary with these values in one part, each of whose parameters must have one."""
    assert values.keys() == {path for path in by_path(vocab) if path.startswith(part)}

    def value(key_path: Any, leaf: jax.Array) -> jax.Array:
        new = values.get(path_of(key_path))
        if new is None:
            return leaf
        assert new.shape == leaf.shape
        return jnp.asarray(new, leaf.dtype)

    return jax.tree_util.tree_map_with_path(value, vocab)


def close(ours: Any, theirs: np.ndarray, name: str = "") -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max(), err_msg=name)


def all_close(gradients: Any, theirs: Arrays) -> None:
    ours = by_path(gradients)
    for name, gradient in theirs.items():
        close(ours[name], gradient, name)


def albert_paths(theirs: Arrays) -> Arrays:
    """Parameters (or gradients) of ALBERT under our names and in our layouts."""
    embeddings, encoder = "albert.embeddings", "albert.encoder.embedding_hidden_mapping_in"
    return {
        "input/table": theirs[f"{embeddings}.word_embeddings.weight"],
        "input/row_norm/scale": theirs[f"{embeddings}.LayerNorm.weight"],
        "input/row_norm/bias": theirs[f"{embeddings}.LayerNorm.bias"],
        "input/projection": theirs[f"{encoder}.weight"].T,
        "input/bias": theirs[f"{encoder}.bias"],
        "head/dense": theirs["predictions.dense.weight"].T,
        "head/dense_bias": theirs["predictions.dense.bias"],
        "head/norm/scale": theirs["predictions.LayerNorm.weight"],
        "head/norm/bias": theirs["predictions.LayerNorm.bias"],
        "head/bias": theirs["predictions.bias"],
    }


def albert(arrays: Arrays, rows: float = 1.0) -> Vocab:
    values = albert_paths(under("weights/", arrays))
    (V, E), D = values["input/table"].shape, len(values["input/bias"])
    vocab = build(V, D, input=FactorizedTable(E, True, "layernorm"), head=AlbertHead(bias=True))
    return fill(vocab, values | {"input/table": rows * values["input/table"]}, "")


def test_albert() -> None:
    """Input, head, and the two gradients of the tied table. Variances are of order 1, so ε (1e−12 there) is below the tolerance."""
    arrays = load("albert")
    ids, targets = (jnp.asarray(arrays[f"inputs/{name}"], jnp.int32) for name in ("ids", "targets"))

    @quick_jit
    def run(vocab: Vocab) -> Any:
        def loss(vocab: Vocab) -> Any:
            x_BTD = vocab.encode(ids)
            h_BTD = jnp.tanh(x_BTD)
            return vocab.loss(h_BTD, targets).total, (x_BTD, vocab.logits(h_BTD))

        return jax.value_and_grad(loss, has_aux=True)(vocab)

    (total, (x_BTD, z_BTV)), gradients = run(albert(arrays))
    close(x_BTD, arrays["x"])
    close(z_BTV, arrays["logits"])
    close(total, arrays["loss"])
    all_close(gradients, albert_paths(under("gradients/", arrays)))


def test_albert_s_small_rows_come_out_shorter_by_our_epsilon() -> None:
    """Its initial rows have a standard deviation of 0.02: ε = 1e−6 beside their variance is seen, 1e−12 is not."""
    arrays = load("albert")
    ids = arrays["inputs/ids"]
    values = albert_paths(under("weights/", arrays))
    variance_BT1 = (0.02 * values["input/table"][ids]).var(-1, keepdims=True)
    shrink_BT1 = np.sqrt(variance_BT1 / (variance_BT1 + EPSILON))
    assert 1e-3 < 1 - shrink_BT1.min() < 0.02
    still_D = values["input/row_norm/bias"] @ values["input/projection"] + values["input/bias"]
    x_BTD = albert(arrays, rows=0.02).encode(ids)
    close(x_BTD, still_D + shrink_BT1 * (arrays["x"] - still_D))


def gemma_paths(theirs: Arrays, layers: int) -> Arrays:
    """Per-layer embeddings of Gemma under our names and in our layouts."""

    def stack(name: str) -> np.ndarray:
        return np.stack([theirs[f"layers.{i}.{name}"].T for i in range(layers)])

    ours = {
        "table": theirs["embed_tokens_per_layer.weight"],
        "context": theirs["per_layer_model_projection.weight"].T,
        "context_norm/scale": theirs["per_layer_projection_norm.weight"],
        "gate": stack("per_layer_input_gate.weight"),
        "out": stack("per_layer_projection.weight"),
        "out_norm": stack("post_per_layer_input_norm.weight"),
    }
    if "layers.0.layer_scalar" in theirs:
        ours["scalar"] = stack("layer_scalar")
    return {f"memories/0/{name}": array for name, array in ours.items()}


@pytest.mark.parametrize(("name", "output"), [("gemma3n", "delta"), ("gemma4", "y")])
def test_ple_is_gemma_s(name: str, output: str) -> None:
    """Gemma 3n's ids from V' = 11 on read the padding id's row, which is zero; Gemma 4 scales the layer's whole output."""
    arrays = load(name)
    is_gemma4 = output == "y"
    L, _, _, D = arrays["inputs/h"].shape
    vocab = build(
        14, D, trunk=TrunkShape(L, 1, 4), memories=(PLE(width=6, rows=11, scalar=is_gemma4),)
    )
    vocab = fill(vocab, gemma_paths(under("weights/", arrays), L), "memories/0/")
    tokens = Tokens.of(arrays["inputs/ids"])

    @quick_jit
    def run(vocab: Vocab, x_BTD: jax.Array, h_LBTD: jax.Array) -> Any:
        def loss(vocab: Vocab, x_BTD: jax.Array, h_LBTD: jax.Array) -> Any:
            memory = vocab.memories[0]
            common, contexts = memory.prepare(vocab.gather(tokens)["memories/0"], tokens, x_BTD)
            apply = jax.vmap(lambda p, e, h, y: memory.apply(p, common, e, h, y, None)[0])
            y_LBTD = h_LBTD if is_gemma4 else jnp.zeros_like(h_LBTD)
            out = apply(memory.per_layer(), contexts, h_LBTD, y_LBTD)
            return (out * arrays["inputs/cotangent"]).sum(), out

        return jax.grad(loss, (0, 1, 2), has_aux=True)(vocab, x_BTD, h_LBTD)

    (dvocab, dx_BTD, dh_LBTD), out_LBTD = run(vocab, arrays["inputs/x"], arrays["inputs/h"])
    close(out_LBTD, arrays[output])
    close(dx_BTD, arrays["gradients/x"])
    close(dh_LBTD, arrays["gradients/h"])
    all_close(dvocab, gemma_paths(under("gradients/", arrays), L))


def test_the_scale_is_rounded_once_where_gemma_rounds_it_to_bfloat16() -> None:
    """Field report 19: √3072 = 55.43 is 55.5 in bfloat16, which has 8 bits: a rounding moves a number by at most 2⁻⁸ of itself."""
    arrays = load("gemma_scale")
    table, theirs = arrays["weights/weight"], arrays["x"].astype(np.float64)
    vocab = build(2, 3072, input=FullTable(scale="sqrt_width"), dtype="bfloat16")
    vocab = fill(vocab, {"input/table": table}, "input/")
    ours = np.asarray(vocab.encode(np.arange(2)[None])[0], np.float64)
    exact = table * math.sqrt(3072)
    rounding = 2**-8 * np.abs(exact)
    assert (np.abs(ours - exact) <= rounding).all()
    assert (np.abs(theirs - exact * 55.5 / math.sqrt(3072)) <= 1.01 * rounding).all()
    assert (np.abs(theirs - exact) > rounding).any()
    # On average over 6144 numbers, roundings cancel to some 2e−5; theirs keeps the factor's 1.34e−3.
    assert abs((ours / exact).mean() - 1) < 1e-4
    assert (theirs / exact).mean() - 1 == pytest.approx(55.5 / math.sqrt(3072) - 1, abs=1e-4)


def test_cross_entropy_is_torch_s() -> None:
    """Mean over the labels that are not ignored; smoothing over all ids, which are all predictable."""
    arrays = load("cross_entropy")
    h_BTD, targets_BT = arrays["inputs/h"][None], arrays["inputs/targets"][None].astype(np.int32)
    V, D = arrays["weights/table"].shape
    objective = Objective(label_smoothing=float(arrays["label_smoothing"]), chunk=5)
    vocab = build(V, D, head=UntiedHead(bias=True), objective=objective)
    weights, expected = (
        {f"head/{name}": array for name, array in under(kind, arrays).items() if name != "h"}
        for kind in ("weights/", "gradients/")
    )
    run = quick_jit(
        jax.value_and_grad(lambda vocab, h: vocab.loss(h, jnp.asarray(targets_BT)).total, (0, 1))
    )
    total, (dvocab, dh_BTD) = run(fill(vocab, weights, "head/"), jnp.asarray(h_BTD, jnp.float32))
    close(total, arrays["loss"])
    close(dh_BTD[0], arrays["gradients/h"])
    all_close(dvocab, expected)


@pytest.mark.parametrize("case", ["middle", "ends"])
def test_adaptive_softmax_is_torch_s(case: str) -> None:
    """All log-probabilities, the loss and its gradients, also with cutoffs [1, V − 1] (field report 21)."""
    arrays = under(f"{case}/", load("adaptive_softmax"))
    cutoffs = tuple(int(cutoff) for cutoff in arrays["cutoffs"][: len(arrays["cutoffs"])])
    V, D = arrays["log_prob"].shape[1], arrays["inputs/h"].shape[1]
    cutoffs = tuple(cutoff for cutoff in cutoffs if cutoff < V)
    vocab = build(
        V, D, head=AdaptiveSoftmax(cutoffs=cutoffs, factor=int(arrays["div_value"])),
        lexicon=Lexicon(counts_V=np.arange(V)[::-1]),  # sorted by id, as torch wants them
    )  # fmt: skip

    def ours(kind: str) -> Arrays:
        theirs = under(f"{kind}/", arrays)
        named = {
            "head/tables/0": theirs["head.weight"][: cutoffs[0]],
            "head/slots": theirs["head.weight"][cutoffs[0] :],
        }
        for i in range(len(cutoffs)):
            named[f"head/downs/{i}"] = theirs[f"tail.{i}.0.weight"].T
            named[f"head/tables/{i + 1}"] = theirs[f"tail.{i}.1.weight"]
        return named

    vocab = fill(vocab, ours("weights"), "head/")
    h_BTD = jnp.asarray(arrays["inputs/h"][None], jnp.float32)
    targets_BT = jnp.asarray(arrays["inputs/targets"][None].astype(np.int32))
    close(vocab.logits(h_BTD)[0], arrays["log_prob"])
    run = quick_jit(jax.value_and_grad(lambda vocab, h: vocab.loss(h, targets_BT).total, (0, 1)))
    total, (dvocab, dh_BTD) = run(vocab, h_BTD)
    close(total, arrays["loss"])
    close(dh_BTD[0], arrays["gradients/h"])
    all_close(dvocab, ours("gradients"))
