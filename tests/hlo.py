"""What a compiled program holds and sends, read from its text."""

import re

import jax

Shape = tuple[int, ...]

_TYPE = re.compile(r"\b(?:pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_COLLECTIVE = re.compile(
    r"= (?P<result>.+?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|"
    r"collective-broadcast|ragged-all-to-all)(?:-start)?\("
)


def compiled_text(function: jax.stages.Wrapped, *args: object) -> str:
    """The optimised program that one device runs; shapes are those of its shards."""
    text = function.lower(*args).compile().as_text()
    assert text is not None
    return text


def buffers(text: str) -> set[Shape]:
    """The shape of every value in the program, those inside fusions included."""
    return {_shape(dims) for dims in _TYPE.findall(text)}


def collectives(text: str) -> list[tuple[str, Shape]]:
    """(kind, shape of a result) of every collective; one entry per result where several are combined."""
    return [
        (found["kind"], _shape(dims))
        for found in _COLLECTIVE.finditer(text)
        for dims in _TYPE.findall(found["result"])
    ]


def _shape(dims: str) -> Shape:
    return tuple(int(dim) for dim in dims.split(",") if dim)
