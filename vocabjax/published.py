"""Published models as configs, and any Hugging Face `config.json` of a family like theirs.

A trunk here is plain: SwiGLU, full attention, one rotary base. Where a model has GeGLU, sliding windows or capped attention scores
(Gemma) or two rotary bases (Gemma 3), parameters and matrix products are the published ones, and attention is counted as full. Of
Gemma 3n the vocabulary is the published one; its AltUp, LAuReL and shared keys are left out of the trunk.

Shapes: the configurations published with the models, which their reports describe (Qwen2 arXiv:2407.10671, Qwen2.5 arXiv:2412.15115,
Qwen3 arXiv:2505.09388, Llama 3 arXiv:2407.21783, Gemma 2 arXiv:2408.00118, Gemma 3 arXiv:2503.19786, SmolLM2 arXiv:2502.02737).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vocabjax.config import Config, TrainConfig
from vocabjax.data import DataConfig
from vocabjax.errors import UserError
from vocabjax.optim import OptimConfig
from vocabjax.trunk import TrunkConfig
from vocabjax.vocab.core import VocabConfig
from vocabjax.vocab.heads.linear import TiedHead, UntiedHead
from vocabjax.vocab.inputs.full import FullTable
from vocabjax.vocab.interfaces import InputConfig
from vocabjax.vocab.memories.ple import PLE


@dataclass(frozen=True)
class Family:
    """What the models of a family share.

    Attributes:
      title: of the family, for lists.
      tied: by default.
      trunk: of the trunk.
      input: of the input.
      softcap: of the scores.
    """

    title: str
    tied: bool
    trunk: TrunkConfig
    input: InputConfig = field(default_factory=FullTable)
    softcap: float | None = None

    def config(
        self,
        size: int,
        width: int,
        layers: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        ffn: int,
        *,
        tied: bool | None = None,
        **trunk: Any,
    ) -> Config:
        """The model V, D, L, N, G, K, F; `tied` None: as the family."""
        tied = self.tied if tied is None else tied
        shape: dict[str, Any] = {
            "layers": layers,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "ffn": ffn,
        }
        return Config(
            vocab=VocabConfig(
                size=size,
                width=width,
                dtype="bfloat16",
                input=self.input,
                head=(TiedHead if tied else UntiedHead)(softcap=self.softcap),
            ),
            trunk=replace(self.trunk, **shape, **trunk),
            data=DataConfig(length=4096),
            optim=OptimConfig(lr=3e-4, warmup=2000),
            train=TrainConfig(steps=100_000, batch=256, eval_every=2000, checkpoint_every=2000),
        )


_PLAIN = TrunkConfig(remat="full")
_QWEN = replace(_PLAIN, rope_theta=1e6)
_LLAMA = replace(_PLAIN, rope_theta=5e5)
_GEMMA_INPUT = FullTable(scale="sqrt_width")
FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", False, _LLAMA),
    "mistral": Family("Mistral", False, replace(_PLAIN, rope_theta=1e6)),
    "qwen2": Family("Qwen2", False, replace(_QWEN, qkv_bias=True)),
    "qwen3": Family("Qwen3", False, replace(_QWEN, qk_norm=True)),
    "gemma": Family("Gemma", True, _PLAIN, _GEMMA_INPUT),
    "gemma2": Family("Gemma 2", True, replace(_PLAIN, post_norm=True), _GEMMA_INPUT, 30.0),
    "gemma3_text": Family(
        "Gemma 3", True, replace(_PLAIN, post_norm=True, qk_norm=True, rope_theta=1e6), _GEMMA_INPUT
    ),
}

# By family: name → V, D, L, N, G, K, F, and whether it is tied.
_SHAPES: dict[str, dict[str, tuple[int, int, int, int, int, int, int, bool]]] = {
    "qwen2": {
        "qwen2_0_5b": (151_936, 896, 24, 14, 2, 64, 4864, True),
        "qwen2_1_5b": (151_936, 1536, 28, 12, 2, 128, 8960, True),
        "qwen2_7b": (152_064, 3584, 28, 28, 4, 128, 18_944, False),
        "qwen2_72b": (152_064, 8192, 80, 64, 8, 128, 29_568, False),
        "qwen2_5_3b": (151_936, 2048, 36, 16, 2, 128, 11_008, True),
        "qwen2_5_14b": (152_064, 5120, 48, 40, 8, 128, 13_824, False),
        "qwen2_5_32b": (152_064, 5120, 64, 40, 8, 128, 27_648, False),
    },
    "qwen3": {
        "qwen3_0_6b": (151_936, 1024, 28, 16, 8, 128, 3072, True),
        "qwen3_1_7b": (151_936, 2048, 28, 16, 8, 128, 6144, True),
        "qwen3_4b": (151_936, 2560, 36, 32, 8, 128, 9728, True),
        "qwen3_8b": (151_936, 4096, 36, 32, 8, 128, 12_288, False),
        "qwen3_14b": (151_936, 5120, 40, 40, 8, 128, 17_408, False),
        "qwen3_32b": (151_936, 5120, 64, 64, 8, 128, 25_600, False),
    },
    "llama": {
        "llama3_2_1b": (128_256, 2048, 16, 32, 8, 64, 8192, True),
        "llama3_2_3b": (128_256, 3072, 28, 24, 8, 128, 8192, True),
        "llama3_1_8b": (128_256, 4096, 32, 32, 8, 128, 14_336, False),
        "llama3_1_70b": (128_256, 8192, 80, 64, 8, 128, 28_672, False),
        "smollm2_135m": (49_152, 576, 30, 9, 3, 64, 1536, True),
        "smollm2_360m": (49_152, 960, 32, 15, 5, 64, 2560, True),
        "smollm2_1_7b": (49_152, 2048, 24, 32, 32, 64, 8192, True),
    },
    "gemma2": {
        "gemma2_2b": (256_000, 2304, 26, 8, 4, 256, 9216, True),
        "gemma2_9b": (256_000, 3584, 42, 16, 8, 256, 14_336, True),
        "gemma2_27b": (256_000, 4608, 46, 32, 16, 128, 36_864, True),
    },
    "gemma3_text": {
        "gemma3_270m": (262_144, 640, 18, 4, 1, 256, 2048, True),
        "gemma3_1b": (262_144, 1152, 26, 4, 1, 256, 6912, True),
        "gemma3_4b": (262_208, 2560, 34, 8, 4, 256, 10_240, True),
        "gemma3_12b": (262_208, 3840, 48, 16, 8, 256, 15_360, True),
        "gemma3_27b": (262_208, 5376, 62, 32, 16, 128, 21_504, True),
    },
}


def _models() -> dict[str, tuple[str, Config]]:
    found = {
        name: (FAMILIES[family].title, FAMILIES[family].config(*shape, tied=tied))
        for family, shapes in _SHAPES.items()
        for name, (*shape, tied) in shapes.items()
    }
    # The article gives V, D, L and a total; heads and feed-forward are chosen to meet it.
    article = Family("the article on vocabulary design", True, _PLAIN, FullTable(norm="layernorm"))
    found["article_3b"] = (
        article.title,
        article.config(100_096, 2560, 32, 20, 4, 128, 6912),
    )
    base = FAMILIES["gemma3_text"].config(262_400, 2048, 35, 8, 2, 256, 16_384)
    memories = (PLE(width=256, rows=262_144),)
    found["gemma3n_e4b"] = (
        "Gemma 3n: its vocabulary, on a plain trunk",
        replace(base, vocab=replace(base.vocab, memories=memories)),
    )
    return found


MODELS: dict[str, tuple[str, Config]] = _models()  # name → (whose it is, the config)

_NEEDED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)


def is_hugging_face(values: Any) -> bool:
    """Whether the content of a JSON file is a Hugging Face `config.json`."""
    return isinstance(values, Mapping) and "model_type" in values


def from_hugging_face(values: Mapping[str, Any], where: str) -> Config:
    """The config of a Hugging Face `config.json`; of a Gemma 3 with images, of its text model.

    Raises:
      UserError: another family, a field that is missing or no whole number, or one that no trunk here has.
    """
    family = values["model_type"]
    if family in ("gemma3", "gemma3_text") and isinstance(values.get("text_config"), Mapping):
        family, values = "gemma3_text", values["text_config"]
    if family not in FAMILIES:
        raise UserError(
            f"{where}: model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    missing = [name for name in _NEEDED if values.get(name) is None]
    if missing:
        raise UserError(f"{where}: {', '.join(missing)} missing: {family} needs them")

    def whole(name: str, default: int | None = None) -> int:
        value = values.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise UserError(f"{where}: {name} must be a positive whole number, not {value!r}")
        return value

    for name in ("num_local_experts", "num_experts", "attention_bias", "mlp_bias"):
        # Qwen2 has its biases whatever the field says.
        if values.get(name) and not (name == "attention_bias" and family == "qwen2"):
            raise UserError(f"{where}: {name} = {values[name]!r}: the trunk has nothing like it")
    heads, width = whole("num_attention_heads"), whole("hidden_size")
    known = FAMILIES[family]
    tied = values.get("tie_word_embeddings", known.tied)
    theta = values.get("rope_theta") or known.trunk.rope_theta
    softcap = values.get("final_logit_softcapping", known.softcap)
    return replace(known, softcap=softcap).config(
        whole("vocab_size"),
        width,
        whole("num_hidden_layers"),
        heads,
        whole("num_key_value_heads", heads),
        whole("head_dim", max(1, width // heads)),
        whole("intermediate_size"),
        tied=bool(tied),
        rope_theta=float(theta),
    )
