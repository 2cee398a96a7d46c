"""Every number of docs/articles.md, from the library and by hand."""

import re
from pathlib import Path

import jax
from models import layout_on

from vocabjax.config import Config
from vocabjax.design import Design
from vocabjax.flags import parse, with_parts
from vocabjax.forecast.accelerators import ACCELERATORS
from vocabjax.forecast.advise import rows_seen
from vocabjax.forecast.commands import CountFlags
from vocabjax.forecast.count import Count, count
from vocabjax.published import MODELS

PAGE = (Path(__file__).parent.parent / "docs" / "articles.md").read_text(encoding="utf-8")
V, D, L, P = 100_096, 2560, 32, 128


def counted(command: str) -> Count:
    name, *words = command.split()
    config: Config = with_parts(MODELS[name][1], words)
    config = parse(CountFlags, "count", words, CountFlags(config=config)).config
    layout = layout_on("data=1,model=1")
    with jax.set_mesh(layout.mesh):
        return count(Design.of(config, layout))


def value_of(start: str) -> str:
    """The value in the row whose statement begins so."""
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {start}")]
    return row.split(" | ")[-2]


def test_parameters() -> None:
    tied = counted("article_3b")
    assert value_of("an embedding of V × D") == f"{V * D:,}" == f"{tied.groups['tied']:,}"
    assert value_of("2.46B in all") == f"{tied.parameters:,}"
    assert f"{tied.parameters - (2 * L + 1 + 2) * D:,} before norms" in PAGE
    assert value_of("it is 10.4") == f"{V * D / tied.parameters:.1%}"
    untied = counted("article_3b --head untied")
    assert value_of("untied: 2.72B") == f"{untied.parameters:,}"
    assert value_of("both tables") == f"{2 * V * D / untied.parameters:.1%}"
    ple = counted("article_3b --memory ple --vocab.memories.0.width 128")
    assert value_of("PLE: 32") == f"{L * V * P:,}" == f"{ple.groups['memory']:,}"
    rest = next(part for part in ple.parts if part.name.startswith("memory")).parameters - L * V * P
    assert f"its projections and norms add {rest:,}" in PAGE
    assert value_of("that is 60") == f"{L * V * P / (V * D) - 1:.1%}"
    small = counted("article_3b --input factorized --head factorized_tied --vocab.input.factor 512 --vocab.input.norm none")  # fmt: skip
    assert value_of("factorised, E") == f"{V * 512 + 512 * D:,}" == f"{small.vocab:,}"
    assert f"{1 - small.vocab / (V * D):.1%} less" in PAGE
    assert V == 128 * 782 == 64 * 1564
    assert f"are {-(-V // 512) * 512:,}" in PAGE
    large = counted("llama3_1_70b")
    assert value_of("of a 70B") == f"{128_256 * 8192 / large.parameters:.1%}"
    assert f"{128_256 * 8192:,}, and two are {large.vocab / large.parameters:.1%}" in PAGE
    shares = [counted(name) for name in ("llama3_2_1b", "gemma3_1b")]
    assert value_of("1B: 15") == ", ".join(f"{x.vocab / x.parameters:.1%}" for x in shares)
    seven = counted("qwen2_7b")
    assert value_of("7B: about") == f"{seven.vocab / 2 / seven.parameters:.1%} a table"
    half = counted("qwen2_0_5b --head untied")
    assert value_of("0.5B untied") == f"{half.vocab / half.parameters:.1%}"
    assert f"({half.vocab:,} of {half.parameters:,})" in PAGE


def test_flops_and_bytes() -> None:
    found = counted("article_3b")
    assert value_of("the head, a token") == f"{2 * D * V:,}" == f"{found.head.decode_flops:,}"
    theirs, real = 2 * (4 * D**2 + 2 * 8 / 3 * D**2), 24 * D**2
    assert value_of("a layer: 2") == f"{round(theirs):,}"
    assert f"24·D² = {real:,}" in PAGE
    assert value_of("so the head is 6") == f"{2 * D * V / real:.1f}"
    assert f"{2 * D * V / theirs:.1f} by the article's own expression" in PAGE
    assert f"{found.head_in_layers:.1f} of `article_3b`'s" in PAGE
    assert value_of("PLE adds about") == f"{6 * D * P / real:.2%}"
    assert f"{6 * D * 256 / real:.1%} at P = 256" in PAGE
    assert f"{2 * D * P / real:.2%}" in PAGE
    assert value_of("decoding with the head") == f"{found.head.intensity:g} FLOP per byte"
    for chip, sequences in (("v5e", 241), ("h100", 295)):
        assert re.search(rf"\b{sequences}\b", PAGE)
        assert sequences == round(ACCELERATORS[chip].ridge)
    assert value_of("a lookup costs") == str(found.parts[0].decode_flops)


def test_rates() -> None:
    seen = [f"{rows_seen(V, tokens):.0%} at {tokens:,}" for tokens in (65_536, 1_048_576)]
    assert value_of("8 to 12 %") == f"{seen[0]} tokens, {seen[1]}"
