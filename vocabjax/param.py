"""A parameter, declared once: shape, logical axes, role, initialiser. It is born sharded, keyed by its path."""

import functools
import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType

from vocabjax.errors import UserError
from vocabjax.mesh import Layout
from vocabjax.paths import path_of

Role = Literal["embed", "head", "tied", "memory", "matrix", "vector"]
Initializer = Callable[[jax.Array, tuple[int, ...]], jax.Array]  # (key, shape) -> float32 array
Axes = tuple[str | None, ...]


class ParamInfo(NamedTuple):
    """What is known of a parameter without its values.

    Attributes:
      shape: as stored; `logical` without the rows that pad a table for its shards.
      centred: whether its mean row is subtracted from all rows after every step.
    """

    path: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: Axes
    role: Role
    logical: tuple[int, ...]
    centred: bool = False


@functools.cache  # equal initialisers compile once
def normal(std: float) -> Initializer:
    """N(0, std²), float32."""
    return functools.partial(_normal, std=std)


def _normal(key: jax.Array, shape: tuple[int, ...], *, std: float) -> jax.Array:
    return std * jax.random.normal(key, shape, jnp.float32)


def ones(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.ones(shape, jnp.float32)


def zeros(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.zeros(shape, jnp.float32)


class Scope(NamedTuple):
    """Where in the model a module is being built: the root key, the layout, and the path so far.

    Random numbers follow the parameter's path, not the order of construction, so two models that share a path (the same
    trunk under a tied and an untied vocabulary) start from the same values there.
    """

    key: jax.Array
    layout: Layout
    path: str = ""

    def __truediv__(self, name: str) -> "Scope":
        return self._replace(path=f"{self.path}/{name}" if self.path else name)

    def param(
        self,
        name: str,
        shape: tuple[int, ...],
        axes: Axes,
        role: Role,
        init: Initializer,
        *,
        rows: int | None = None,
    ) -> nnx.Param[jax.Array]:
        """Declares a float32 parameter; each device draws only its own shard.

        Args:
          name: the attribute it is stored under; with the scope's path it is the parameter's path.
          shape, axes: one logical axis per dimension. A leading `"layers"` axis draws each layer from a key of its own,
            so that a deeper model starts with the layers of a shallower one, up to the scales that depend on depth.
          role: the optimiser group it belongs to by default.
          init: float32 values from (key, shape).
          rows: logical size of the `"vocab"` dimension, which may be padded for its shards; rows from here on are zero.

        Raises:
          UserError: the name is `value`; or more rows, or wider ones, than an int32 can count.
        """
        if name == "value":
            raise UserError("a parameter cannot be called 'value': paths drop that name")
        path = (self / name).path
        if max(shape) >= 2**31:
            raise UserError(f"{path} would have the shape {shape}: each size must be below 2^31")
        seed = int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big")
        draw = _draw(init, shape, axes[0] == "layers", rows, self.layout.sharding(*axes))
        value = draw(jax.random.fold_in(self.key, seed))
        logical = tuple(
            rows if axis == "vocab" and rows is not None else size
            for axis, size in zip(axes, shape, strict=True)
        )
        return nnx.Param(value, axes=axes, role=role, logical=logical, path=path)


@functools.lru_cache(maxsize=256)
def _draw(
    init: Initializer,
    shape: tuple[int, ...],
    per_layer: bool,
    rows: int | None,
    sharding: jax.sharding.NamedSharding,
) -> Callable[[jax.Array], jax.Array]:
    own = shape[1:] if per_layer else shape  # of one layer

    def one(key: jax.Array) -> jax.Array:
        value = init(key, own)
        if rows is not None and rows < own[0]:
            is_row = (jnp.arange(own[0]) < rows).reshape(-1, *[1] * (len(own) - 1))
            value = jnp.where(is_row, value, 0)
        return value

    def draw(key: jax.Array) -> jax.Array:
        if not per_layer:
            return one(key)
        return jax.vmap(one)(jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(shape[0])))

    if AxisType.Explicit in sharding.mesh.axis_types:
        # Automatic inside: on explicit axes each device would draw the whole array and keep its share.
        draw = jax.sharding.auto_axes(draw, out_sharding=sharding)
    return jax.jit(draw, out_shardings=sharding)


def param_infos(module: nnx.Module) -> dict[str, ParamInfo]:
    """Every parameter of a module by path, abstract or not.

    Raises:
      UserError: a parameter stored under another name than it was declared; one Param reachable by two paths. `jax.grad` would silently turn it into two; a tied head receives the
        table as a call argument instead of storing it.
    """
    seen: dict[int, str] = {}
    infos: dict[str, ParamInfo] = {}
    declared: dict[str, str] = {}
    leaves = jax.tree_util.tree_flatten_with_path(
        module, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )[0]
    for key_path, leaf in leaves:
        if not isinstance(leaf, nnx.Param):
            continue
        path = path_of(key_path)
        if id(leaf) in seen:
            raise UserError(
                f"parameters {seen[id(leaf)]!r} and {path!r} are one Param stored twice: jax.grad would train two. "
                "Store it once, and pass it to the other user as a call argument (as a tied head does)"
            )
        seen[id(leaf)] = path
        value = leaf.get_value()
        metadata = leaf.get_metadata()
        declared[path] = metadata["path"]
        infos[path] = ParamInfo(
            path,
            tuple(value.shape),
            value.dtype,
            metadata["axes"],
            metadata["role"],
            metadata["logical"],
            metadata.get("centred", False),
        )
    for path, name in declared.items():
        # The module may be a part of what was built, or the other way round.
        if not (f"/{name}".endswith(f"/{path}") or f"/{path}".endswith(f"/{name}")):
            raise UserError(
                f"a parameter was declared as {name!r}, but is stored as {path!r}: give both one name, which decides its "
                "initial values and where checkpoints keep it"
            )
    return infos


def total_size(infos: Iterable[ParamInfo]) -> int:
    """Number of parameters, padding left out."""
    return sum(math.prod(info.logical) for info in infos)


def matrix_flops(module: nnx.Module) -> int:
    """2 · the scalars in a module's matrices: what a token costs where each is used once."""
    matrices = (info for info in param_infos(module).values() if info.role == "matrix")
    return 2 * total_size(matrices)
