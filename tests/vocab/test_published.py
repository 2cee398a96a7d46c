"""Parts against published code, whose weights, outputs and gradients `tests/fixtures/make.py` froze.

Both sides start from the same float32 weights. What they may differ by is float32 rounding through a few layers, theirs (float64 for
ALBERT and the cross-entropy, float32 for Gemma and Qwen) or ours, hence the tolerances: 1e−5 of the largest entry. Where a formula
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
from vocabjax.vocab.memories.engram import TAPS, Engram
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


def engram_paths(theirs: Arrays, one: float) -> Arrays:
    """Engrams of Qwen4-Exp, or their gradients, under our names and in our layouts; norms multiply by weight + one."""

    def stack(name: str) -> np.ndarray:
        return np.stack([theirs[f"{at}.{name}.weight"] for at in range(2)])

    ours = {
        f"grams/{at}": theirs[f"{at}.ple_embedding.ngram_embedding.weight"] for at in range(2)
    } | {
        "keys": stack("key_proj").swapaxes(1, 2),
        "values": stack("value_proj").swapaxes(1, 2),
        "taps": stack("conv1d")[:, :, 0, ::-1].swapaxes(1, 2),  # their last is the token itself
        "key_norm": one + stack("norm_key"),
        "query_norm": one + stack("norm_query"),
        "value_norm": one + stack("norm_conv"),
    }
    return {f"memories/0/{name}": array for name, array in ours.items()}


def engram(arrays: Arrays) -> tuple[Vocab, Tokens]:
    """A vocabulary with Qwen4-Exp's hashes and weights, and its documents: eos is the last token of one.

    Its ids are not compressed, and eos is what stands before a document, where ours is an id of its own.
    """
    ids_BT, eos = arrays["inputs/ids"].astype(np.int32), int(arrays["eos"])
    starts_BT = np.pad(ids_BT[:, :-1] == eos, ((0, 0), (1, 0)), constant_values=True)
    at_T = np.arange(ids_BT.shape[1], dtype=np.int32)
    position_BT = at_T - np.maximum.accumulate(starts_BT * at_T, 1)
    tokens = Tokens(*map(jnp.asarray, (ids_BT, np.cumsum(starts_BT, 1, np.int32), position_BT)))

    config = Engram(order=3, heads=2, width=6, buckets=11, layers=(0, 1), compress=False)
    vocab = build(13, 8, trunk=TrunkShape(2, 1, 8), memories=(config,))
    memory = vocab.memories[0]
    memory.nothing = eos
    memory.multipliers = tuple(tuple(layer) for layer in arrays["multipliers"].tolist())
    return fill(vocab, engram_paths(under("weights/", arrays), 1), "memories/0/"), tokens


def test_engram_s_rows_are_qwen_s() -> None:
    """Given its multipliers; the primes are the same ones. Some n-grams would reach over an eos, some over the row's start."""
    arrays = load("qwen4_exp")
    vocab, tokens = engram(arrays)
    primes = [[p for heads in layer for p in heads] for layer in vocab.memories[0].primes]
    assert primes == arrays["primes"].tolist()
    reads = vocab.memories[0].reads(tokens)
    assert len(reads) == len(arrays["rows"])
    for at, rows_BTH in enumerate(arrays["rows"]):
        np.testing.assert_array_equal(reads[f"grams/{at}"], rows_BTH)


def test_engram_is_qwen_s_but_for_a_convolution_that_stays_in_its_document() -> None:
    """Theirs crosses documents, as ours does if told that a row is one; told of them, what reaches over an eos alone differs."""
    arrays = load("qwen4_exp")
    vocab, tokens = engram(arrays)

    @quick_jit
    def run(vocab: Vocab, h_LBTD: jax.Array, position_BT: jax.Array) -> Any:
        def loss(vocab: Vocab, h_LBTD: jax.Array) -> Any:
            memory = vocab.memories[0]
            rows = vocab.gather(tokens)["memories/0"]
            _, contexts = memory.prepare(rows, tokens, jnp.zeros(()))
            apply = jax.vmap(
                lambda p, e, h: memory.apply(p, position_BT, e, h, jnp.zeros_like(h), None)[0]
            )
            out_LBTD = apply(memory.per_layer(), contexts, h_LBTD)
            return (out_LBTD * arrays["inputs/cotangent"]).sum(), out_LBTD

        return jax.grad(loss, (0, 1), has_aux=True)(vocab, h_LBTD)

    whole_BT = Tokens.of(tokens.ids_BT).position_BT
    (dvocab, dh_LBTD), out_LBTD = run(vocab, arrays["inputs/h"], whole_BT)
    close(out_LBTD, arrays["delta"])
    close(dh_LBTD, arrays["gradients/h"])
    all_close(dvocab, engram_paths(under("gradients/", arrays), 0))

    _, out_LBTD = run(vocab, arrays["inputs/h"], tokens.position_BT)
    back_J11 = 3 * np.arange(1, TAPS)[:, None, None]
    reaches_over_BT = ((tokens.position_BT < back_J11) & (back_J11 <= whole_BT)).any(0)
    differs_LBT = (abs(out_LBTD - arrays["delta"]) > 1e-3).any(-1)
    np.testing.assert_array_equal(differs_LBT, [reaches_over_BT] * 2)
    close(
        np.where(reaches_over_BT[..., None], 0, out_LBTD),
        np.where(reaches_over_BT[..., None], 0, arrays["delta"]),
    )


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
