"""A language model: a vocabulary around a trunk."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vocabjax.encoder_decoder import EncoderDecoder, EncoderDecoderConfig, SourceVocab
from vocabjax.mesh import Layout
from vocabjax.param import ParamInfo, Scope, param_infos, total_size
from vocabjax.paths import by_path
from vocabjax.trunk import Cache, Trunk, TrunkConfig
from vocabjax.vocab.accumulator import Accumulator
from vocabjax.vocab.core import Vocab, VocabConfig
from vocabjax.vocab.interfaces import Loss, Rows, Shared, Tokens, TrunkShape
from vocabjax.vocab.lexicon import Constant, Lexicon


class LanguageModel(nnx.Module):
    """ids → hidden states → loss or logits."""

    def __init__(
        self,
        vocab: VocabConfig,
        trunk: TrunkConfig,
        scope: Scope,
        lexicon: Lexicon | None = None,
    ) -> None:
        """Builds both, born sharded, keyed by path.

        Raises:
          UserError: shapes or settings that cannot work together or on this mesh.
        """
        vocab.check()
        trunk.check(vocab.width)
        if isinstance(trunk, EncoderDecoderConfig):
            self.vocab: Vocab = SourceVocab(vocab, trunk, scope / "vocab", lexicon)
            self.trunk: Trunk = EncoderDecoder(trunk, scope / "trunk", vocab.width)
            return
        shape = TrunkShape(trunk.layers, trunk.kv_heads, trunk.width_of_head(vocab.width))
        self.vocab = Vocab(vocab, trunk=shape, lexicon=lexicon, scope=scope / "vocab")
        self.trunk = Trunk(trunk, scope / "trunk", vocab.width, self.vocab.memories)

    def hidden(
        self, tokens: Tokens, cache: Cache | None = None, rows: dict[str, Rows] | None = None
    ) -> tuple[jax.Array, Cache | None]:
        """h_BTD after the trunk's final norm, and the cache with these tokens in it.

        Args:
          rows: what `vocab.gather(tokens)` gives, when it was gathered beforehand.
        """
        rows = self.vocab.gather(tokens) if rows is None else rows
        with jax.named_scope("vocab.embed"):
            x_BTD = self.vocab.embed(rows, tokens)
            contexts = self.vocab.contexts(rows, tokens, x_BTD)
        with jax.named_scope("trunk"):
            return self.trunk(x_BTD, tokens, self.vocab.memories, contexts, cache)

    def loss(
        self,
        tokens: Tokens,
        targets_BT: jax.Array,
        weights_BT: jax.Array | None = None,
        *,
        rows: dict[str, Rows] | None = None,
        normalizer: jax.Array | None = None,
    ) -> Loss:
        """The training loss; ids outside [0, V) are counted in `invalid` with the labels."""
        h_BTD, _ = self.hidden(tokens, rows=rows)
        loss = self.vocab.loss(h_BTD, targets_BT, weights_BT, normalizer=normalizer, tokens=tokens)
        return loss._replace(invalid=loss.invalid + self.vocab.invalid_ids(tokens))

    def accumulate(
        self,
        tokens: Tokens,
        targets_BT: jax.Array,
        into: Accumulator | None,
        *,
        rows: dict[str, Rows],
        shared: Shared,
        normalizer: jax.Array,
    ) -> tuple[Loss, Accumulator | None]:
        """The training loss of one microbatch of several.

        Args:
          into: gathers the gradient of the scored table (see `Head.accumulate`); None: it is the total's, like all others.
          rows, shared: what `vocab.gather` gives for these tokens, and what the input lends.
          normalizer: of the whole batch.
        """
        h_BTD, _ = self.hidden(tokens, rows=rows)
        how: Any = {"normalizer": normalizer, "tokens": tokens}
        if into is None:
            loss = self.vocab.loss(h_BTD, targets_BT, shared=shared, **how)
        else:
            loss, into = self.vocab.accumulate(shared, h_BTD, targets_BT, into, **how)
        return loss._replace(invalid=loss.invalid + self.vocab.invalid_ids(tokens)), into

    def nll(self, tokens: Tokens, targets_BT: jax.Array) -> jax.Array:
        """float32 [B, T]: −log p(target), 0 where the label is not valid."""
        return self.vocab.nll(self.hidden(tokens)[0], targets_BT)

    def logits(self, tokens: Tokens, cache: Cache | None = None) -> tuple[jax.Array, Cache | None]:
        """float32 [B, T, Vp], and the cache."""
        h_BTD, cache = self.hidden(tokens, cache)
        return self.vocab.logits(h_BTD), cache

    def init_cache(self, batch: int, length: int) -> Cache:
        """An empty decoding cache for `length` positions."""
        return self.trunk.init_cache(batch, length, self.vocab.dtype, self.vocab.memories)


Params = dict[Any, Any]  # nested: a module's attribute names, and the indices of its lists


class Blueprint:
    """A model without values: how to make its parameters, and how to bind them to it.

    Training holds parameters as a nested dict of arrays (`Params`); `bind` puts them back into the module.

    Attributes:
      infos: by path, what each parameter is.
      constants: by path, what parts were told of the ids: which rows are whose, where that is not the id itself.
      sizes: of the vocabulary.
      config: of the vocabulary.
    """

    def __init__(
        self,
        vocab: VocabConfig,
        trunk: TrunkConfig,
        layout: Layout,
        lexicon: Lexicon | None = None,
    ) -> None:
        self.layout, self.config = layout, vocab
        self._build = lambda key: LanguageModel(vocab, trunk, Scope(key, layout), lexicon)
        # The key too is made abstractly: the mesh may be of devices that are not here.
        abstract = jax.eval_shape(lambda: self._build(jax.random.key(0)))
        self.infos: dict[str, ParamInfo] = param_infos(abstract)
        self.constants: dict[str, Constant] = {
            "/".join(map(str, (*path, name))): value
            for path, module in nnx.iter_modules(abstract)
            for name, value in vars(module).items()
            if isinstance(value, Constant)
        }
        self.sizes = abstract.vocab.sizes
        self._flops = (abstract.vocab.flops(), abstract.trunk.flops)
        self.graphdef, _ = nnx.split(abstract)
        self.has_penalty = jax.eval_shape(lambda model: model.vocab.penalty(), abstract) is not None

    @functools.cached_property
    def scored_and_read(self) -> str | None:
        """The path of the table that the head scores against and the input looks rows up in, if they are one; else None."""
        if not self.config.head.tied:
            return None

        def scored(params: Params) -> Any:
            vocab = self.bind(params).vocab
            return vocab.head.scored(vocab.input.shared())[0]

        params = self.abstract()
        traced = jax.make_jaxpr(scored)(params).jaxpr
        # The very array, not something made of it.
        same = [var is out for out in traced.outvars[:1] for var in traced.invars]
        paths = (path for path, is_same in zip(by_path(params), same, strict=False) if is_same)
        return next(paths, None)

    def init(self, seed: int) -> Params:
        """Fresh parameters, each device drawing its own shards."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract())
        # One program for all of them: compiling one for each would take longer than drawing them.
        draw = jax.jit(
            lambda key: nnx.to_pure_dict(nnx.state(self._build(key))), out_shardings=shardings
        )
        params: Params = draw(jax.random.key(seed))
        return params

    def bind(self, params: Params) -> LanguageModel:
        """The model with these parameters; pure, so it may stand inside jit and grad."""
        model: LanguageModel = nnx.merge(self.graphdef, params)
        return model

    def train_flops(self, length: int) -> int:
        """FLOPs per token of a training step on windows of T = length: three times the forward's.

        Counts the model (matrix products and causal attention), not recomputation, padding, or the masked half of
        attention scores.
        """
        return 3 * (self._flops[0] + self._flops[1](length))

    def count(self, prefix: str = "") -> int:
        """Parameters whose path starts with the prefix, padding left out."""
        return total_size(info for info in self.infos.values() if info.path.startswith(prefix))

    def logical_shapes(self) -> dict[str, tuple[int, ...]]:
        """Path → shape without padding: what a checkpoint needs to be restored on a mesh that pads otherwise."""
        return {path: info.logical for path, info in self.infos.items()}

    def abstract(self) -> Params:
        """The parameters' shapes, dtypes and shardings."""
        tree: Params = {}
        for info in self.infos.values():
            *parents, name = (int(p) if p.isdigit() else p for p in info.path.split("/"))
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[name] = jax.ShapeDtypeStruct(
                info.shape, jnp.dtype(info.dtype), sharding=self.layout.sharding(*info.axes)
            )
        return tree
