"""Devices that are not here: a CPU's simulated ones are made by `launch.py`; a TPU pod's are described by libtpu, its compiler."""

import importlib.util
import os
import re
from collections.abc import Sequence

import jax

from vocabjax.accelerators import ACCELERATORS, Accelerator, accelerator
from vocabjax.errors import UserError

KNOWN = "v4:2x2x1 … v4:12x16x16, v5e:1x1 … v5e:16x16, v5p:2x2x1 … v5p:16x20x28, v6e:1x1 … v6e:16x16"
_NAME = re.compile(r"(v4|v5e|v5p|v6e):(\d+(?:x\d+)+)")


def tpu_devices(topology: str) -> tuple[Sequence[jax.Device], Accelerator]:
    """The chips of a slice such as "v5e:4x4", for compiling only, and what one of them is.

    Raises:
      UserError: an unknown topology, or libtpu is not installed.
    """
    match = _NAME.fullmatch(topology)
    chip = None if match is None else accelerator(match[1])
    if match is None or chip is None or match[2].count("x") + 1 != chip.torus:
        raise UserError(f"--topology {topology!r} is not known; write e.g. v5e:4x4; known: {KNOWN}")
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
        "TPU_LOG_DIR": "disabled",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:  # whatever its plugin raises
        reason = str(error).splitlines()[0][:200]
        raise UserError(
            f"--topology {topology}: libtpu refuses it ({reason}); known: {KNOWN}"
        ) from error
    return found.devices, chip


def names() -> str:
    """The chips that `--accelerator` knows."""
    return ", ".join(ACCELERATORS)
