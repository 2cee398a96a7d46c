"""Published figures of the chips that models are planned for."""

from dataclasses import dataclass
from typing import Literal

from vocabjax.errors import UserError, nearest

GIB = 1 << 30


@dataclass(frozen=True)
class Accelerator:
    """One chip, by its maker's figures; what a program reaches is less.

    Attributes:
      name: as flags call it.
      maker: whose figures they are: Google Cloud's pages of TPU versions, or NVIDIA's data sheets (dense, SXM).
      bf16_flops: peak of bfloat16 matrix products, FLOP/s.
      memory: bytes.
      memory_bandwidth: bytes/s.
      link_bandwidth: bytes/s of one link in one direction; of a GPU, all its links together.
      torus: dimensions of the network of links (each chip has two per dimension); 0: switched.
    """

    name: str
    maker: Literal["Google", "NVIDIA"]
    bf16_flops: float
    memory: int
    memory_bandwidth: float
    link_bandwidth: float
    torus: int

    @property
    def ridge(self) -> float:
        """FLOPs per byte below which a bfloat16 program is bound by memory (Williams et al. 2009, the roofline model)."""
        return self.bf16_flops / self.memory_bandwidth


_ALL = (
    Accelerator("v4", "Google", 275e12, 32 * GIB, 1228e9, 50e9, 3),
    Accelerator("v5e", "Google", 197e12, 16 * GIB, 819e9, 50e9, 2),
    Accelerator("v5p", "Google", 459e12, 95 * GIB, 2765e9, 100e9, 3),
    Accelerator("v6e", "Google", 918e12, 32 * GIB, 1638e9, 100e9, 2),
    Accelerator("tpu7x", "Google", 2307e12, 192 * GIB, 7380e9, 100e9, 3),
    Accelerator("a100", "NVIDIA", 312e12, 80 * 10**9, 2039e9, 300e9, 0),
    Accelerator("h100", "NVIDIA", 989e12, 80 * 10**9, 3350e9, 450e9, 0),
    Accelerator("h200", "NVIDIA", 989e12, 141 * 10**9, 4800e9, 450e9, 0),
    Accelerator("b200", "NVIDIA", 2250e12, 180 * 10**9, 7700e9, 900e9, 0),
)
ACCELERATORS = {chip.name: chip for chip in _ALL}


def accelerator(name: str, flag: str = "--accelerator") -> Accelerator:
    """The chip of that name. Raises UserError for an unknown one."""
    if name not in ACCELERATORS:
        raise UserError(f"{flag}: unknown accelerator {name!r}{nearest(name, ACCELERATORS)}")
    return ACCELERATORS[name]
