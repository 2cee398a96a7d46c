"""What tests ask of a compiled program."""

from vocabjax.forecast import hlo
from vocabjax.forecast.hlo import Shape, buffers, compiled_text

__all__ = ["buffers", "collectives", "compiled_text"]


def collectives(text: str) -> list[tuple[str, Shape]]:
    """(kind, shape of a result) of every collective; one entry per result where several are combined."""
    return [(found.kind, shape) for found in hlo.collectives(text) for _, shape in found.arrays]
