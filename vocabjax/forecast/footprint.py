"""What a compiled program holds on one device, and what a compiler says that refuses it."""

import math
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax

from vocabjax.errors import UserError

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_HBM = re.compile(r"^Memory Space: default \(color=0\)\s*\nTotal bytes: (\d+)", re.MULTILINE)
# libtpu has said it in both of these ways.
_NO_ROOM = (
    re.compile(r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm"),
    re.compile(r"\(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)"),
)


class Footprint(NamedTuple):
    """Bytes on one device.

    Attributes:
      aliased: of the outputs, what is updated in place.
      is_exact: whether `temporaries` is what the compiler allots, or no less than that.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    is_exact: bool

    @property
    def peak(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries


class TooLarge(UserError):
    """The compiler refuses a program for its memory.

    Attributes:
      needs, available: bytes on one device.
    """

    def __init__(self, needs: int, available: int) -> None:
        super().__init__(
            f"it does not fit: the compiler needs {needs:,} of {available:,} bytes on a chip"
        )
        self.needs, self.available = needs, available


def compile_measured(
    lowered: jax.stages.Lowered, platform: str
) -> tuple[jax.stages.Compiled, Footprint]:
    """Compiles for a platform ("cpu", "gpu", "tpu"), and what that holds.

    For a TPU, `memory_analysis` is neither what lies in HBM nor a bound that is of use: its temporaries are up to twice those that
    the compiler allots, and its peak counts on-chip memory too. So the compiler is asked for its own report.

    Raises:
      TooLarge: it does not fit.
      UserError: the compiler refuses it for another reason.
    """
    if platform != "tpu":
        compiled = _compile(lowered, {}, None)
        return compiled, _analysed(compiled)
    with tempfile.TemporaryDirectory() as name:
        options: dict[str, str | bool] = {"xla_dump_to": name, "xla_dump_hlo_as_text": True}
        compiled = _compile(lowered, options, Path(name))
        analysed, total = _analysed(compiled), hbm_total(Path(name))
    if total is None:
        return compiled, analysed._replace(is_exact=False)
    beside = analysed.arguments + analysed.outputs - analysed.aliased
    return compiled, analysed._replace(temporaries=total - beside)


def held(tree: Any) -> int:
    """Bytes of a pytree of arrays or their shapes that one device holds."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * leaf.dtype.itemsize
    return total


def hbm_total(reports: Path) -> int | None:
    """Bytes of HBM that a TPU program is allotted, arguments included, by the compiler's report in a folder; None: there is none."""
    for path in reports.glob("*memory-usage-report.txt"):
        if found := _HBM.search(path.read_text()):
            return int(found[1])
    return None


def no_room(text: str) -> tuple[int, int] | None:
    """(needs, available) bytes, as a refusal says them, rounded; None: it refuses for another reason."""
    for pattern in _NO_ROOM:
        if found := pattern.search(text):
            needs, available = (
                round(float(number) * _UNITS[unit])
                for number, unit in (found.group(1, 2), found.group(3, 4))
            )
            return needs, available
    return None


def _compile(
    lowered: jax.stages.Lowered, options: dict[str, str | bool], reports: Path | None
) -> jax.stages.Compiled:
    try:
        return lowered.compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        said = no_room(str(error))
        if said is None:
            reason = str(error).splitlines()[0][:300]
            raise UserError(f"the compiler refuses it: {reason}") from error
        exact = None if reports is None else hbm_total(reports)
        raise TooLarge(exact or said[0], said[1]) from error


def _analysed(compiled: jax.stages.Compiled) -> Footprint:
    memory: Any = compiled.memory_analysis()
    return Footprint(
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        is_exact=True,
    )
