"""Devices that are not here: a CPU's simulated ones are made by `launch.py`; a TPU pod's are described by libtpu, its compiler."""

import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from vocabjax.errors import UserError
from vocabjax.forecast.accelerators import Accelerator, accelerator

# What Google Cloud's pages of these versions offer: on a flat torus these shapes; on one of three dimensions each of
# 1, 2, 4 or a multiple of 4, up to so many chips (of a v5p pod's 8,960 a slice takes 6,144).
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_MOST_CHIPS: Mapping[str, int] = {"v4": 4096, "v5p": 6144}
KNOWN = (
    f"v5e and v6e: {', '.join(_FLAT)}; v4 and v5p: AxBxC, each 1, 2, 4 or a multiple of 4, such as v4:4x4x4, v5p:8x8x8, up to "
    "4,096 chips of v4 and 6,144 of v5p"
)
_NAME = re.compile(r"(v4|v5e|v5p|v6e):([1-9]\d*(?:x[1-9]\d*)+)")


def tpu_devices(topology: str) -> tuple[Sequence[jax.Device], Accelerator]:
    """The chips of a slice such as "v5e:4x4", for compiling only, and what one of them is.

    Raises:
      UserError: an unknown topology, or libtpu is not installed.
    """
    match = _NAME.fullmatch(topology)
    if match is None or not _is_offered(match[1], match[2]):
        raise UserError(f"--topology {topology!r} is not known; write e.g. v5e:4x4; known: {KNOWN}")
    chip = accelerator(match[1])
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "planning for a TPU needs its compiler, libtpu: pip install 'vocabjax[tpu]' (in a checkout: pip install -e '.[tpu]')"
        )
    # It would ask a metadata server what machine this is, and refuse a second process.
    settings = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_MIN_LOG_LEVEL": "4",  # else it leaves files behind, wherever TPU_LOG_DIR points
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if chip.name == "v4":  # both cores of a chip as one device, as JAX has them on the machine
        options["chip_config_name"] = "megacore"
    if match[2] == "1x1":
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options)
    except Exception as error:  # whatever its plugin raises
        reason = str(error).splitlines()[0][:200]
        raise UserError(
            f"--topology {topology}: libtpu refuses it ({reason}); known: {KNOWN}"
        ) from error
    return found.devices, chip


def _is_offered(version: str, shape: str) -> bool:
    if version not in _MOST_CHIPS:
        return shape in _FLAT
    sizes = [int(size) for size in shape.split("x")]
    return (
        len(sizes) == 3
        and all(size in (1, 2) or size % 4 == 0 for size in sizes)
        and math.prod(sizes) <= _MOST_CHIPS[version]
    )
