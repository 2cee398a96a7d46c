"""Meshes, the rules that place logical axes on them, and multi-host start.

A parameter or activation names its dimensions logically (`"vocab"`, `"heads"`, `"batch"` …); one rules table maps those
names to mesh axes. Nothing else in vocabjax names a mesh axis.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vocabjax.errors import UserError, nearest

# Every logical axis, and what it is sharded over by default. `table_width` is a name of its own and has no rule on
# purpose: tables are sharded over rows only, so that no rule set can make a step gather a table.
DEFAULT_RULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "batch": ("data",),
        "seq": (),
        "vocab": ("model",),
        "heads": ("model",),
        "ffn": ("model",),
        "width": (),
    }
)
FSDP_RULES: Mapping[str, tuple[str, ...]] = MappingProxyType({**DEFAULT_RULES, "width": ("data",)})
RULE_SETS = {"default": DEFAULT_RULES, "fsdp": FSDP_RULES}
UNSHARDED_AXES = frozenset({"layers", "head_dim", "table_width"})


def make_mesh(
    axes: Mapping[str, int], *, devices: Sequence[jax.Device] | None = None, explicit: bool = True
) -> Mesh:
    """A mesh of named axes, e.g. `make_mesh({"data": 2, "model": 4})`; one size may be −1 (the rest of the devices).

    `explicit` axes carry shardings in types (what vocabjax's own trunk uses); `explicit=False` gives automatic ones.

    Raises:
      UserError: sizes that do not multiply to the number of devices.
    """
    pool = list(jax.devices() if devices is None else devices)
    sizes = dict(axes)
    free = [name for name, size in sizes.items() if size == -1]
    if not sizes or len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise UserError(
            f"mesh {_show(axes)}: every size must be positive, and at most one may be -1"
        )
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free and len(pool) % fixed == 0:
        sizes[free[0]] = len(pool) // fixed
    if math.prod(sizes.values()) != len(pool):
        raise UserError(
            f"mesh {_show(axes)} needs {fixed}{' times a whole number of' if free else ''} devices, but there are "
            f"{len(pool)}; change the mesh (--mesh), or simulate devices on a CPU (--devices {fixed}; in a script, "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={fixed})"
        )
    kind = AxisType.Explicit if explicit else AxisType.Auto
    shape, names = tuple(sizes.values()), tuple(sizes)
    # Axis types are always stated: `jax.make_mesh` and `Mesh` have opposite defaults.
    kinds = (kind,) * len(sizes)
    try:
        return jax.make_mesh(shape, names, axis_types=kinds, devices=pool)
    except NotImplementedError:  # an axis is no whole axis of the torus, as 2 of a 4×4×4: cut one
        cut = mesh_utils.create_device_mesh(shape, pool, allow_split_physical_axes=True)
        return Mesh(cut, names, axis_types=kinds)


def parse_mesh(text: str) -> dict[str, int]:
    """`"data=2,model=4"` → `{"data": 2, "model": 4}`. Raises UserError naming the part that cannot be read."""
    axes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, size = part.partition("=")
        if not name.isidentifier() or not size.removeprefix("-").isdigit() or name in axes:
            raise UserError(f"--mesh {text!r}: cannot read {part!r}; write e.g. data=2,model=4")
        axes[name] = int(size)
    return axes or {"data": -1, "model": 1}


def parse_rules(text: str) -> dict[str, tuple[str, ...]]:
    """A rule set and changes to it: `"fsdp,vocab=model+data,seq=context"` (`name=` alone replicates that axis).

    Raises:
      UserError: an unknown rule set, or a part that is not `logical=mesh[+mesh]`.
    """
    base, *changes = [part.strip() for part in text.split(",")]
    if "=" in base:
        base, changes = "default", [base, *changes]
    if base not in RULE_SETS:
        raise UserError(f"--rules: unknown rule set {base!r}{nearest(base, RULE_SETS)}")
    rules = dict(RULE_SETS[base])
    for change in changes:
        logical, separator, target = change.partition("=")
        if not separator or logical not in rules:
            raise UserError(f"--rules: cannot read {change!r}{nearest(logical, rules)}")
        rules[logical] = tuple(filter(None, target.split("+")))
    return rules


@dataclass(frozen=True)
class Layout:
    """A mesh and the rules that place logical axes on it; hashable, so modules may keep it.

    Attributes:
      mesh: the devices, with named axes.
      rules: (logical axis, mesh axes) pairs; axes that the mesh lacks are dropped by `Layout.make`.
    """

    mesh: Mesh
    rules: tuple[tuple[str, tuple[str, ...]], ...]

    @staticmethod
    def make(
        mesh: Mesh | None = None, rules: Mapping[str, Sequence[str]] | None = None
    ) -> "Layout":
        """The layout for a mesh (None: the ambient mesh of `jax.set_mesh`, else one device).

        Args:
          mesh: its axes are all explicit or all automatic.
          rules: changes to the default rules, logical axis → mesh axes (major first). A default that names an axis the
            mesh lacks replicates; rules that differ from the defaults must name real axes.

        Raises:
          UserError: a rule for an unknown logical axis, or for a mesh axis that does not exist; an axis that shards the
            vocabulary and tokens, but is not the last of those tokens' axes; a mesh of mixed axis types.
        """
        if mesh is None:
            mesh = _ambient_mesh()
        if not isinstance(mesh, Mesh):
            raise UserError(
                f"mesh must be a jax.sharding.Mesh, such as vocabjax.make_mesh({{...}}) gives, not {type(mesh).__name__}"
            )
        if len(set(mesh.axis_types)) > 1 or AxisType.Manual in mesh.axis_types:
            raise UserError(
                f"mesh {_show(mesh.shape)} has axes of types {mesh.axis_types}; make all explicit or all automatic "
                "(vocabjax.make_mesh does)"
            )
        stated = {**DEFAULT_RULES, **{name: tuple(axes) for name, axes in (rules or {}).items()}}
        for logical, targets in stated.items():
            if logical not in DEFAULT_RULES:
                raise UserError(
                    f"rules: unknown logical axis {logical!r}{nearest(logical, DEFAULT_RULES)}"
                )
            is_standard = any(stated[logical] == known.get(logical) for known in RULE_SETS.values())
            for target in targets:
                if target not in mesh.axis_names and not is_standard:
                    raise UserError(
                        f"rules: {logical!r} is placed on mesh axis {target!r}, which the mesh {_show(mesh.shape)} "
                        f"does not have{nearest(target, mesh.axis_names)}"
                    )
        table = tuple(
            (logical, tuple(t for t in targets if t in mesh.axis_names))
            for logical, targets in sorted(stated.items())
        )
        layout = Layout(mesh, table)
        layout._require_minor()
        return layout

    @property
    def explicit(self) -> bool:
        """Whether arrays on this mesh carry their sharding in their type."""
        return AxisType.Explicit in self.mesh.axis_types

    def axes(self, logical: str | None) -> tuple[str, ...]:
        """The mesh axes a logical axis is sharded over."""
        if logical is None or logical in UNSHARDED_AXES:
            return ()
        table = dict(self.rules)
        if logical not in table:
            raise UserError(f"unknown logical axis {logical!r}{nearest(logical, table)}")
        return table[logical]

    def shards(self, logical: str | None) -> int:
        """Into how many pieces a logical axis is cut."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes(logical))

    def spec(self, *logical: str | None) -> PartitionSpec:
        """The partition of an array whose dimensions carry these logical axes.

        Raises:
          UserError: two dimensions claim one mesh axis.
        """
        used: dict[str, str | None] = {}
        entries: list[str | tuple[str, ...] | None] = []
        for name in logical:
            axes = self.axes(name)
            for axis in axes:
                if axis in used:
                    raise UserError(
                        f"rules: {used[axis]!r} and {name!r} of one array {logical} are both placed on mesh axis "
                        f"{axis!r}; place one of them elsewhere (--rules {name}=)"
                    )
                used[axis] = name
            entries.append(axes[0] if len(axes) == 1 else axes or None)
        return PartitionSpec(*entries)

    def sharding(self, *logical: str | None) -> NamedSharding:
        """`spec` on this mesh."""
        return NamedSharding(self.mesh, self.spec(*logical))

    def place(self, x: jax.Array, *logical: str | None) -> jax.Array:
        """Brings an array to the sharding of these logical axes; differentiable. On automatic meshes, a constraint."""
        return self.place_as(x, self.spec(*logical))

    def place_as(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """`place`, for a partition that is known already."""
        sharding = NamedSharding(self.mesh, spec)
        if self.explicit:
            return jax.sharding.reshard(x, sharding)
        return jax.lax.with_sharding_constraint(x, sharding)

    def from_host(self, x: np.ndarray, *logical: str | None) -> jax.Array:
        """A global array from this process's rows (see `process_share`); the other processes bring theirs."""
        sharding = self.sharding(*logical)
        if jax.process_count() == 1:
            return jax.device_put(x, sharding)
        rows = logical.index("batch")
        shape = list(x.shape)
        shape[rows] *= self.process_share()[1]
        return jax.make_array_from_process_local_data(sharding, x, tuple(shape))

    def process_share(self) -> tuple[int, int]:
        """(index, count): this process holds the index-th of count equal parts of a batch.

        Processes whose devices differ only along axes that do not shard the batch hold the same part.

        Raises:
          UserError: a mesh whose processes hold parts that are not contiguous or not equal.
        """
        shards = self.shards("batch")
        where = self.sharding("batch").addressable_devices_indices_map((shards,))
        held = sorted({index[0].indices(shards)[0] for index in where.values() if index})
        first, size = held[0], len(held)
        if held != list(range(first, first + size)) or first % size or shards % size:
            raise UserError(
                f"mesh {_show(self.mesh.shape)}: this process holds the batch shards {held} of {shards}, which is not "
                "one contiguous equal part; put the batch axes first in --mesh"
            )
        return first // size, shards // size

    def require(self, what: str, logical: str, size: int) -> None:
        """Raises UserError, with the sizes that would do, unless `size` divides over the logical axis's shards."""
        shards = self.shards(logical)
        if size % shards:
            below, above = size // shards * shards, (size // shards + 1) * shards
            fit = f"{below} or {above}" if below else f"{above}"
            raise UserError(
                f"{what} = {size} does not divide over the {shards} shards of {logical!r} on mesh "
                f"{_show(self.mesh.shape)}; use {fit}, another --mesh, or replicate it with --rules {logical}="
            )

    def require_used(self) -> None:
        """Raises UserError for a mesh axis, larger than 1, that no rule uses: its devices would all do the same work."""
        used = {axis for _, axes in self.rules for axis in axes}
        for axis, size in self.mesh.shape.items():
            if size > 1 and axis not in used:
                raise UserError(
                    f"mesh {_show(self.mesh.shape)}: no rule uses axis {axis!r}, so its {size} devices would repeat each "
                    f"other's work; place something on it (--rules batch={axis}), or rename it (data, model)"
                )

    def _require_minor(self) -> None:
        """Tokens that are gathered over an axis stay in order only if it is the last one they are sharded over."""
        rows = self.axes("vocab")
        for logical in ("batch", "seq"):
            shared = [axis in rows for axis in self.axes(logical)]
            if shared != sorted(shared):
                axes = sorted(self.axes(logical), key=lambda axis: axis in rows)
                raise UserError(
                    f"rules: {logical!r} is placed on {self.axes(logical)}, of which 'vocab' shares {rows}; put the shared "
                    f"axes last (--rules {logical}={'+'.join(axes)})"
                )


def _ambient_mesh() -> Mesh:
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError as error:  # under jit, JAX knows the axes but not the devices
        raise UserError(
            "the mesh of jax.set_mesh is not known while tracing: give mesh=, or build outside jit"
        ) from error
    return _single_device_mesh() if mesh.empty else mesh


@functools.cache
def _single_device_mesh() -> Mesh:
    # Automatic: a trunk that knows of no mesh must not meet shardings in its types.
    return Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))


def _show(axes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in axes.items())
