"""Three-way tying: one table for the source, for the target, and for the scores, in a small encoder-decoder.

    x_t = S[id_t] in a document's source, E[id_t] in its target
    m = Encoder(x)                                  sources see themselves, both ways
    h_t = Decoder(x, m)_t                           targets see what precedes them, and their document's source
    z_t = O·h_t

Tied not at all: three tables; the target alone: E = O (a tied head); three ways: S = E = O (`source_table="shared"` and a tied
head). Source: Press & Wolf 2016 (arXiv:1608.05859), section 3; the layers are those of the trunk, with cross-attention between
(Vaswani et al. 2017, arXiv:1706.03762, section 3.1).

A document is its source, then the separator, then its target (`data.prefix_end`). Both stacks run over whole packed windows:
what is source and what is target follows from the ids, and segments keep them apart, as they keep documents apart.

Parameters: (3, 2 or 1)·V·D; in the trunk L·(2·(D·K·(2N + 2G) + 3·D·F + 2D) + D·K·(2N + 2G) + D) + 2D, and what `qk_norm`, `qkv_bias`
and `post_norm` add to each stack.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from vocabjax.attention import Rotation, attention
from vocabjax.errors import UserError
from vocabjax.mesh import Layout
from vocabjax.norms import RMSNorm, rms_norm
from vocabjax.param import Scope, matrix_flops
from vocabjax.trunk import (
    AttentionLayers,
    Cache,
    LayerParams,
    Layers,
    Trunk,
    TrunkConfig,
    feed_forward,
    merge,
    project,
    rematerialised,
)
from vocabjax.vocab.core import Vocab, VocabConfig
from vocabjax.vocab.interfaces import Context, Memory, Part, Reader, Rows, Tokens
from vocabjax.vocab.lexicon import Lexicon
from vocabjax.vocab.modifiers import Modifiers


@dataclass(frozen=True)
class EncoderDecoderConfig(TrunkConfig):
    """An encoder and a decoder of `layers` layers each, alike in all sizes.

    Attributes:
      source_table: "own": sources are read from a table of their own; "shared": from the table that targets are read from.
      separator: the id that ends a document's source; None: that of `data.prefix_end`.
    """

    kind: ClassVar[str] = "encoder_decoder"
    source_table: Literal["own", "shared"] = "own"
    separator: int | None = None


class SourceVocab(Vocab):
    """A vocabulary that reads sources from a table of their own, unless they share that of the targets.

    Attributes:
      source: an input of the same kind as the targets', tied to nothing; None: shared.
    """

    def __init__(
        self,
        config: VocabConfig,
        trunk: EncoderDecoderConfig,
        scope: Scope,
        lexicon: Lexicon | None = None,
    ) -> None:
        """Raises UserError for memories, and where the separator is not an id."""
        if config.memories:
            raise UserError(
                f"memories attach to the layers of a decoder alone, so vocab.memories ({config.memories[0].kind}) does not go "
                "with an encoder-decoder; leave them out, or use another config"
            )
        super().__init__(config, lexicon=lexicon, scope=scope)
        if trunk.separator is None or not 0 <= trunk.separator < self.sizes.logical:
            raise UserError(
                f"trunk.separator = {trunk.separator} must be the id that ends a source, below V = {self.sizes.logical}; "
                "trained on data with data.prefix_end, it is filled in"
            )
        self.separator = trunk.separator
        context = Context(
            scope / "source", self.sizes, config.width, self.dtype, lexicon or Lexicon()
        )
        own = trunk.source_table == "own"
        self.source = config.input.build(context, tied=False) if own else None
        context = context._replace(scope=scope / "source_modifiers")
        self.source_modifiers = Modifiers(config.input, context) if own else None

    def embed(self, rows: Mapping[str, Rows], tokens: Tokens) -> jax.Array:
        x_BTD = super().embed(rows, tokens)
        if self.source is None or self.source_modifiers is None:
            return x_BTD
        is_source_BT = find_source(self.layout, tokens, self.separator)
        source_BTD = self.source_modifiers(self.source(rows["source"], tokens), tokens)
        return jnp.where(is_source_BT[..., None], source_BTD, x_BTD)

    def _parts(self) -> list[Part]:
        return super()._parts() + ([] if self.source is None else [self.source])

    def _readers(self) -> Iterator[tuple[str, Reader]]:
        yield from super()._readers()
        if self.source is not None:
            yield "source", self.source


class EncoderDecoder(Trunk):
    """x_BTD → h_BTD, normed: the states of the decoder. Those of source positions mean nothing; no label stands there."""

    def __init__(self, config: EncoderDecoderConfig, scope: Scope, width: int) -> None:
        super().__init__(config, scope, width)  # `layers` are the decoder's
        assert config.separator is not None  # the vocabulary saw to it
        self.separator = config.separator
        self.cross = AttentionLayers(config, scope / "cross", width)
        self.encoder = Layers(config, scope / "encoder", width)
        self.encoder_norm = RMSNorm(scope / "encoder_norm", width)

    def __call__(
        self,
        x_BTD: jax.Array,
        tokens: Tokens,
        memories: Sequence[Memory] = (),
        contexts: Sequence[tuple[Any, Any]] = (),
        cache: Cache | None = None,
    ) -> tuple[jax.Array, None]:
        # Of one document, its source and its target are segments of their own: 2s and 2s + 1.
        is_target_BT = ~find_source(self.layout, tokens, self.separator)
        source_BT = self.layout.place(2 * tokens.segment_BT, "batch", "seq")
        segment_BT = source_BT + is_target_BT
        turn = self.rotation(self.layout.place(tokens.position_BT, "batch", "seq"))
        x_BTD = self.layout.place(x_BTD, "batch", "seq", None)

        def within(params: LayerParams, x_BTD: jax.Array, causal: bool) -> jax.Array:
            h_BTD = rms_norm(x_BTD, params["attn_norm"])
            return x_BTD + self._attend(params, h_BTD, h_BTD, segment_BT, segment_BT, turn, causal)

        def encode(x_BTD: jax.Array, params: LayerParams) -> jax.Array:
            return self._feed_forward(params, within(params, x_BTD, causal=False))

        m_BTD = self.encoder_norm(self._scan(encode, x_BTD, self.encoder.arrays()))

        def decode(x_BTD: jax.Array, params: tuple[LayerParams, LayerParams]) -> jax.Array:
            own, cross = params
            x_BTD = within(own, x_BTD, causal=True)
            h_BTD = rms_norm(x_BTD, cross["attn_norm"])
            # A query takes the name of its document's source; keys of that name are the source alone.
            x_BTD += self._attend(cross, h_BTD, m_BTD, source_BT, segment_BT, None, causal=False)
            return self._feed_forward(own, x_BTD)

        layers = (self.layers.arrays(), self.cross.arrays())
        return self.final_norm(self._scan(decode, x_BTD, layers)), None

    def flops(self, length: int) -> int:
        """As computed: every position passes both stacks, with full attention in the encoder and from it."""
        keys = length + length + (length + 1) / 2
        heads = self.config.heads * self.layers.q.shape[-1]
        return matrix_flops(self) + round(4 * self.config.layers * heads * keys)

    def init_cache(
        self, batch: int, length: int, dtype: jnp.dtype, memories: Sequence[Memory] = ()
    ) -> NoReturn:
        """Raises UserError: decoding step by step is not built."""
        raise UserError(
            "an encoder-decoder cannot be sampled from here: `eval` measures it; to continue text, train a decoder on the same "
            "data, such as `train tied --data.source gcide`"
        )

    def _attend(
        self,
        params: LayerParams,
        h_BTD: jax.Array,
        m_BTD: jax.Array,
        segment_q_BT: jax.Array,
        segment_kv_BT: jax.Array,
        turn: Rotation | None,
        causal: bool,
    ) -> jax.Array:
        """What attention from h to m adds to the residual stream; `turn` None: without positions."""
        q, k, v = project(self.config, self.layout, params, h_BTD, m_BTD, turn)
        attended = attention(self.layout, q, k, v, segment_q_BT, segment_kv_BT, causal=causal)
        return merge(self.layout, params, attended)

    def _feed_forward(self, params: LayerParams, x_BTD: jax.Array) -> jax.Array:
        return x_BTD + feed_forward(self.layout, params, rms_norm(x_BTD, params["ffn_norm"]))

    def _scan(
        self, layer: Callable[[jax.Array, Any], jax.Array], x_BTD: jax.Array, params: Any
    ) -> jax.Array:
        layer = rematerialised(self.config, layer)
        return lax.scan(lambda x_BTD, params: (layer(x_BTD, params), None), x_BTD, params)[0]


def find_source(layout: Layout, tokens: Tokens, separator: int) -> jax.Array:
    """bool [B, T]: no separator yet in the token's document. The first token of a document is source, whatever it is."""
    # Over whole rows: where positions are sharded, the separator may be on another device.
    ids_BT = layout.place(tokens.ids_BT, "batch", None)
    position_BT = layout.place(tokens.position_BT, "batch", None)
    index_BT = (ids_BT & 0) + jnp.arange(ids_BT.shape[1])
    last_BT = lax.cummax(jnp.where(ids_BT == separator, index_BT, -1), axis=1)
    return layout.place(last_BT <= index_BT - position_BT, "batch", "seq")
