"""Published models have the published number of parameters, and a Hugging Face `config.json` says which one it is."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from models import layout_on

from vocabjax.errors import UserError
from vocabjax.find import load_config
from vocabjax.model import Blueprint
from vocabjax.published import MODELS, from_hugging_face
from vocabjax.vocab.lexicon import Lexicon

# Totals of the published weights, as their repositories state them. Gemma 2's report counts what is not the embedding exactly.
TOTALS = {
    "qwen2_0_5b": 494_032_768,
    "qwen2_1_5b": 1_543_714_304,
    "qwen2_7b": 7_615_616_512,
    "qwen2_72b": 72_706_203_648,
    "qwen2_5_3b": 3_085_938_688,
    "qwen2_5_14b": 14_770_033_664,
    "qwen2_5_32b": 32_763_876_352,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "llama3_1_8b": 8_030_261_248,
    "llama3_1_70b": 70_553_706_496,
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "smollm2_1_7b": 1_711_376_384,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "gemma3_270m": 268_098_176,
    "gemma3_1b": 999_885_952,
    # The article: 2,458,255,360 before norms; two a layer, the last one, and a LayerNorm's scale and bias after the lookup.
    "article_3b": 2_458_255_360 + (2 * 32 + 1 + 2) * 2560,
}
# Millions that are not the embedding: Gemma 3's report, table 1.
REST = {"gemma3_4b": 3_209, "gemma3_12b": 10_759, "gemma3_27b": 25_600}


def blueprint_of(name: str) -> Blueprint:
    config = MODELS[name][1]
    config.check()
    return Blueprint(config.vocab, config.trunk, layout_on("data=1,model=1"), Lexicon.stand_in())


@pytest.mark.parametrize("name", TOTALS)
def test_parameters_are_those_published(name: str) -> None:
    assert blueprint_of(name).count() == TOTALS[name]


@pytest.mark.parametrize("name", REST)
def test_parameters_beside_the_embedding_are_those_published(name: str) -> None:
    assert round(blueprint_of(name).count("trunk/") / 1e6) == REST[name]


def test_the_table_of_gemma_3n_is_the_published_one() -> None:
    blueprint = blueprint_of("gemma3n_e4b")
    table = blueprint.infos["vocab/memories/0/table"]
    assert math.prod(table.logical) == 262_144 * 35 * 256 == 2_348_810_240
    assert {*TOTALS, *REST, "gemma3n_e4b"} == MODELS.keys()


QWEN = {
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "torch_dtype": "bfloat16",
}


def test_a_config_json_of_hugging_face_is_a_config(tmp_path: Path) -> None:
    path = tmp_path / "Qwen2-0.5B" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(QWEN))
    assert load_config(str(path)) == ("Qwen2-0.5B", MODELS["qwen2_0_5b"][1])


def test_of_a_gemma_with_images_the_text_model_is_taken() -> None:
    text = {
        "vocab_size": 262_208, "hidden_size": 2560, "num_hidden_layers": 34, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 10_240,
    }  # fmt: skip
    config = from_hugging_face({"model_type": "gemma3", "text_config": text}, "here")
    assert config == MODELS["gemma3_4b"][1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "t5"}, "model_type 't5' is not supported; supported: llama, mistral, qwen2"),
        ({"hidden_size": None, "vocab_size": None}, "vocab_size, hidden_size missing: qwen2 needs them"),
        ({"num_hidden_layers": "24"}, "num_hidden_layers must be a positive whole number, not '24'"),
        ({"num_experts": 60}, "num_experts = 60: the trunk has nothing like it"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias = True: the trunk has nothing"),
    ],
)  # fmt: skip
def test_what_no_trunk_here_is_gets_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^config.json: {message}"):
        from_hugging_face({**QWEN, **change}, "config.json")
