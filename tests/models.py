"""Small models whose values follow the parameter's path and not the mesh, made without compiling initialisers."""

import functools
import math
import zlib
from typing import Any

import jax
import numpy as np

from vocabjax.mesh import Layout, make_mesh, parse_mesh, parse_rules
from vocabjax.model import Blueprint, Params
from vocabjax.paths import path_of

# For programs that run once: compiling takes longer than running, and half as long unoptimised.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def layout_on(mesh: str, rules: str = "default") -> Layout:
    """A layout on the first devices, e.g. `layout_on("data=2,model=4", "fsdp")`."""
    sizes = parse_mesh(mesh)
    devices = jax.devices()[: math.prod(sizes.values())]
    return Layout.make(make_mesh(sizes, devices=devices), parse_rules(rules))


def random_params(blueprint: Blueprint, std: float = 0.3) -> Params:
    """N(0, std²), plus 1 in norms; padding is zero. Equal on every mesh."""

    def draw(key_path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        path = path_of(key_path)
        info = blueprint.infos[path]
        shape = info.logical
        value = std * np.random.default_rng(zlib.crc32(path.encode())).normal(size=shape)
        if info.role == "vector":
            value += 1
        padding = [(0, whole - part) for whole, part in zip(leaf.shape, shape, strict=True)]
        return jax.device_put(np.pad(value, padding).astype(leaf.dtype), leaf.sharding)

    return jax.tree_util.tree_map_with_path(draw, blueprint.abstract())
