"""The layouts that everything sharded is tested on."""

import math
from typing import Any

import jax

from vocabjax.mesh import Layout, make_mesh, parse_mesh

# The last two shard the vocabulary over axes of the batch too: tokens are gathered over them and results scattered back.
_MESHES = (
    "data=1,model=1",
    "model=8",
    "data=2,model=4",
    "data=8",
    "data=2,seq=2,model=2",
    "a=2,b=2,c=2",
)
_RULES = {
    "data=2,seq=2,model=2": {"vocab": ("model", "data"), "seq": ("seq",)},
    # One token axis that shares none of its two mesh axes with the rows, and one that shares both, in another order.
    "a=2,b=2,c=2": {"batch": ("c", "a", "b"), "vocab": ("b", "a"), "heads": (), "ffn": ()},
}

EVERYWHERE = ("none", *(f"{mesh} {kind}" for kind in ("explicit", "auto") for mesh in _MESHES))
SOME = ("none", "data=2,model=4 explicit", "data=2,seq=2,model=2 auto")


def layout_of(name: str) -> Layout:
    """The layout of one of the names above; `none` is the library's default without any mesh."""
    if name == "none":
        return Layout.make()
    axes, kind = name.split()
    sizes = parse_mesh(axes)
    devices = jax.devices()[: math.prod(sizes.values())]
    mesh = make_mesh(sizes, devices=devices, explicit=kind == "explicit")
    return Layout.make(mesh, _RULES.get(axes))


def put(layout: Layout, x: Any, *logical: str | None) -> jax.Array:
    """An array on the devices of a layout, sharded by logical axes."""
    return jax.device_put(x, layout.sharding(*logical))
