"""The optimiser: one table of parameter groups becomes one Optax transform.

    p ← p − schedule(step) · group.lr · (direction(g) + weight_decay · p)

Each parameter declares a role, which names its default group; a `NamedGroup` takes
parameters out of theirs by path. Gradients are clipped by one norm over all groups, before they
part: a clip inside a group would see that group only. Frozen parameters never enter the transform,
so they have no share in the norm, no moments and no weight decay.

The state is keyed by parameter path (`vocab/input/table`), whatever tree the parameters live in, so
that a checkpoint of it does not depend on the model's classes.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import DictKey

from vocabjax.errors import UserError, nearest
from vocabjax.param import ParamInfo, Role
from vocabjax.paths import by_path, path_of

Optimizer = Literal["adamw", "sgd", "adagrad"]
Sparse = Literal["off", "lazy", "catch_up"]
Schedule = Literal["cosine", "wsd", "constant"]

ROLES = get_args(Role)


@dataclass(frozen=True)
class GroupConfig:
    """How one group of parameters is updated.

    Attributes:
      lr: multiplies the schedule.
      weight_decay: decoupled, scaled by the learning rate; None: optim.weight_decay.
      optimizer: adamw, sgd (without momentum) or adagrad.
      b1: adamw's first moment; None: optim.b1.
      b2: adamw's second moment; None: optim.b2.
      frozen: never updated.
      sparse: for tables that are only looked up: update the rows that a step reads and no others. "catch_up" first gives
        a row what dense updates would have done to it since it was last read; "lazy" leaves that out, moments
        and all (torch's SparseAdam), and so has no weight decay.
    """

    lr: float = 1.0
    weight_decay: float | None = None
    optimizer: Optimizer = "adamw"
    b1: float | None = None
    b2: float | None = None
    frozen: bool = False
    sparse: Sparse = "off"


@dataclass(frozen=True)
class NamedGroup:
    """A group of one's own.

    Attributes:
      name: how it is called in reports.
      pattern: a shell pattern over parameter paths, in which * matches / too.
    """

    name: str
    pattern: str
    group: GroupConfig = GroupConfig()


@dataclass(frozen=True)
class OptimConfig:
    """Schedule, clip and the group table.

    Attributes:
      lr: the peak of the schedule.
      schedule: what follows the warm-up: cosine, wsd (constant, then a linear decay) or constant.
      warmup: steps of linear warm-up.
      decay: share of all steps that wsd spends in its decay.
      final_lr: fraction of the peak at the end of cosine and wsd.
      weight_decay: of the groups that have none of their own.
      b1: decay of adamw's first moment.
      b2: decay of adamw's second moment.
      eps: added to the root of the second moment.
      clip: largest global norm of the gradients; None: no clipping.
    """

    lr: float = 3e-3
    schedule: Schedule = "cosine"
    warmup: int = 100
    decay: float = 0.2
    final_lr: float = 0.1
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    clip: float | None = 1.0
    embed: GroupConfig = GroupConfig()
    head: GroupConfig = GroupConfig()
    tied: GroupConfig = GroupConfig()
    memory: GroupConfig = GroupConfig()
    matrix: GroupConfig = GroupConfig()
    vector: GroupConfig = GroupConfig(weight_decay=0.0)
    groups: tuple[NamedGroup, ...] = ()


@dataclass(frozen=True)
class GroupRow:
    """One line of the group table; a frozen group has no learning rate and no decay."""

    group: str
    optimizer: str
    parameters: int
    paths: tuple[str, ...]
    peak_lr: float
    weight_decay: float
    sparse: Sparse = "off"


class GroupRule(NamedTuple):
    """A group's settings with the defaults filled in, and its learning rate at each update of the run.

    Attributes:
      rates: float32 [steps]: schedule · group.lr.
    """

    sparse: Sparse
    optimizer: Optimizer
    weight_decay: float
    b1: float
    b2: float
    eps: float
    rates: np.ndarray


class ClipState(NamedTuple):
    """Norm of the last gradients over all trained leaves, before clipping: float32 scalar."""

    gradient_norm: jax.Array


def with_vocabulary_groups(config: OptimConfig, other: OptimConfig) -> OptimConfig:
    """`config` with another's groups of what a vocabulary holds: embed, head, tied, memory, and named ones over paths in vocab/."""

    def named(of: OptimConfig, in_vocabulary: bool) -> tuple[NamedGroup, ...]:
        return tuple(g for g in of.groups if g.pattern.startswith("vocab") == in_vocabulary)

    return replace(
        config,
        embed=other.embed,
        head=other.head,
        tied=other.tied,
        memory=other.memory,
        groups=(*named(config, False), *named(other, True)),
    )


def assign(config: OptimConfig, infos: Iterable[ParamInfo]) -> dict[str, str]:
    """Path of each parameter → name of its one group.

    Raises:
      UserError: an unknown role; a path declared twice; a parameter that two named groups match; a
        named group that matches nothing, or whose name is taken; a default group that was changed
        but holds no parameter.
    """
    groups = _groups(config)
    infos = tuple(infos)
    labels: dict[str, str] = {}
    for info in infos:
        if info.role not in ROLES:
            raise UserError(
                f"parameter {info.path} has the role {info.role!r}{nearest(info.role, ROLES)}"
            )
        if info.path in labels:
            raise UserError(
                f"parameter {info.path} is declared twice; give each parameter its own path"
            )
        names = [named.name for named in config.groups if fnmatchcase(info.path, named.pattern)]
        if len(names) > 1:
            raise UserError(
                f"parameter {info.path} is matched by the groups {' and '.join(map(repr, names))}; "
                "narrow their patterns so that one matches"
            )
        labels[info.path] = label = names[0] if names else info.role
        if info.centred and groups[label].frozen:
            raise UserError(
                f"the group {label!r} freezes {info.path}, which vocab.head.centre moves after every step; unset one of them"
            )

    used = set(labels.values())
    for named in config.groups:
        if named.name not in used:
            raise UserError(
                f"optim.groups: {named.name!r} matches no parameter ({named.pattern!r})"
                f"{nearest(named.pattern, labels)}"
            )
    tied = [info.path for info in infos if info.role == "tied"]
    for role in ROLES:
        group = groups[role]
        if role in used or group == getattr(OptimConfig(), role):
            continue
        if tied and role in ("embed", "head"):
            message = (
                f"optim.{role} was changed, but the model is tied: both faces share the table "
                f"{tied[0]}, in the group 'tied' (use --optim.tied.…)"
            )
            if group.frozen:
                message += "; freezing one face of a tied table is impossible: untie it"
            raise UserError(message)
        raise UserError(
            f"optim.{role} was changed, but no parameter is in that group; groups of this model: "
            + ", ".join(sorted(used))
        )
    return labels


def check(config: OptimConfig, steps: int) -> None:
    """Refuses hyper-parameters that make no sense for a run of `steps` updates.

    Raises:
      UserError: names the field, its value and the values that would do.
    """

    def require(holds: bool, field: str, value: object, rule: str) -> None:
        if not holds:
            raise UserError(f"optim.{field} is {value}, but must be {rule}")

    if steps < 1:
        raise UserError(f"the run has {steps} steps, but needs at least 1")
    if config.schedule not in get_args(Schedule):
        raise UserError(
            f"optim.schedule is {config.schedule!r}{nearest(config.schedule, get_args(Schedule))}"
        )
    require(0 <= config.lr < math.inf, "lr", config.lr, "finite and at least 0")
    require(
        0 <= config.warmup <= steps, "warmup", config.warmup, f"from 0 to the run's {steps} steps"
    )
    require(0 < config.decay <= 1, "decay", config.decay, "above 0 and at most 1")
    require(0 <= config.final_lr <= 1, "final_lr", config.final_lr, "from 0 to 1")
    require(0 < config.eps < math.inf, "eps", config.eps, "finite and above 0")
    require(config.clip is None or config.clip > 0, "clip", config.clip, "above 0, or None")
    if config.schedule == "wsd":
        room = steps - config.warmup
        require(
            _decay_steps(config, steps) <= room,
            "decay",
            config.decay,
            f"at most {room / steps:.3g}: warm-up takes {config.warmup} of the run's {steps} steps",
        )
    for name, group in _groups(config).items():
        where = f"{name}." if name in ROLES else f"groups: {name}."
        if group.optimizer not in get_args(Optimizer):
            raise UserError(
                f"optim.{where}optimizer is {group.optimizer!r}"
                f"{nearest(group.optimizer, get_args(Optimizer))}"
            )
        require(0 <= group.lr < math.inf, f"{where}lr", group.lr, "finite and at least 0")
        _check_sparse(config, where, group)
        for field in ("b1", "b2", "weight_decay"):
            own = getattr(group, field)
            location, value = (
                (field, getattr(config, field)) if own is None else (where + field, own)
            )
            if field == "weight_decay":
                require(0 <= value < math.inf, location, value, "finite and at least 0")
                continue
            require(0 <= value < 1, location, value, "at least 0 and below 1")
            require(
                own is None or group.optimizer == "adamw",
                location,
                value,
                f"unset for {group.optimizer}",
            )


def _check_sparse(config: OptimConfig, where: str, group: GroupConfig) -> None:
    if group.sparse not in get_args(Sparse):
        raise UserError(
            f"optim.{where}sparse is {group.sparse!r}{nearest(group.sparse, get_args(Sparse))}"
        )
    if group.sparse == "off":
        return
    if group.frozen:
        raise UserError(f"optim.{where}sparse is set, but the group is frozen; unset one of them")
    decay = _weight_decay(config, group)
    if group.sparse == "lazy" and decay:
        raise UserError(
            f"optim.{where}sparse is lazy, but rows that are not read would miss their weight decay of {decay}: set "
            f"optim.{where}weight_decay to 0, or sparse to catch_up"
        )
    if decay * config.lr * group.lr >= 1:
        raise UserError(
            f"optim.{where}sparse: a decay of {decay} at a rate of {config.lr * group.lr} leaves nothing of a row; lower one"
        )


def schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """Learning rate of update `step` = 0, 1, …: linear warm-up, then what `config.schedule` names.

    Warm-up gives lr·(step+1)/warmup, so that no update is wasted on a rate of 0. cosine and wsd
    reach lr·final_lr at `steps`, one past the last update.

    Raises:
      UserError: as `check`.
    """
    check(config, steps)
    rest = steps - config.warmup
    if config.schedule == "cosine":
        main = optax.cosine_decay_schedule(config.lr, max(rest, 1), alpha=config.final_lr)
    elif config.schedule == "wsd":
        decay = _decay_steps(config, steps)
        main = optax.linear_schedule(config.lr, config.lr * config.final_lr, decay, rest - decay)
    else:
        main = optax.constant_schedule(config.lr)
    if config.warmup == 0:
        return main
    return optax.join_schedules(
        [lambda step: config.lr * (step + 1) / config.warmup, main], [config.warmup]
    )


def make_optimizer(
    config: OptimConfig, infos: Iterable[ParamInfo], steps: int
) -> optax.GradientTransformation:
    """The optimiser of a model whose parameters are `infos`, for a run of `steps` updates.

    `init(params)` and `update(grads, state, params)` take any tree whose leaves have exactly the
    declared paths (see `path_of`); updates have the gradients' tree, and −0.0 where frozen.

    Raises:
      UserError: as `check` and `assign`; from `init` and `update`, for a tree with other paths.
    """
    learning_rate = schedule(config, steps)
    labels = assign(config, infos)
    groups = _groups(config)
    live = {path: name for path, name in labels.items() if not groups[name].frozen}
    directions = {name: _direction(config, groups[name]) for name in sorted(set(live.values()))}
    trained = optax.chain(
        _clip(config.clip),
        optax.partition(directions, live),
        optax.scale_by_learning_rate(learning_rate),
    )

    def select(tree: Any) -> dict[str, Any]:
        leaves = by_path(tree)
        if leaves.keys() != labels.keys():
            raise UserError(
                "the tree's parameters are not the declared ones; "
                f"missing: {', '.join(sorted(labels.keys() - leaves.keys())) or 'none'}; "
                f"undeclared: {', '.join(sorted(leaves.keys() - labels.keys())) or 'none'}"
            )
        return {path: leaves[path] for path in live}

    def init(params: Any) -> Any:
        return trained.init(select(params))

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        moves, state = trained.update(select(grads), state, select(params))

        def move(key_path: tuple[Any, ...], grad: jax.Array) -> jax.Array:
            path = path_of(key_path)
            # −0.0, as adding 0.0 would turn a parameter of −0.0 into 0.0.
            return moves[path] if path in live else jnp.full_like(grad, -0.0)

        return jax.tree.map_with_path(move, grads), state

    return optax.GradientTransformation(init, update)


def gradient_norm(state: Any) -> jax.Array:
    """Norm of the last update's gradients, unclipped, frozen leaves left out: float32 scalar."""
    norm: jax.Array = optax.tree.get(state, "gradient_norm")
    return norm


def state_shardings(optimizer: optax.GradientTransformation, params: Any) -> Any:
    """Shardings of `optimizer.init(params)`: moments lie as their parameters, scalars everywhere.

    `params`: arrays, or `ShapeDtypeStruct`s with shardings. A state is made and restored with these,
    since what `jit` infers depends on the mesh: on automatic axes it would replicate the moments.
    """
    lies = {path: leaf.sharding for path, leaf in by_path(params).items()}
    some = next(iter(lies.values()))
    replicated = (
        NamedSharding(some.mesh, PartitionSpec()) if isinstance(some, NamedSharding) else some
    )

    def place(key_path: tuple[Any, ...], _: jax.ShapeDtypeStruct) -> Any:
        last = key_path[-1]
        return lies[last.key] if isinstance(last, DictKey) else replicated

    return jax.tree.map_with_path(place, jax.eval_shape(optimizer.init, params))


def sparse_rules(
    config: OptimConfig, infos: Iterable[ParamInfo], steps: int
) -> dict[str, GroupRule]:
    """By path, the rules of the parameters whose group is sparse. Call it outside jit."""
    groups = _groups(config)
    if all(group.sparse == "off" for group in groups.values()):
        return {}
    learning_rate, labels = schedule(config, steps), assign(config, infos)
    found = {path: groups[name] for path, name in labels.items() if groups[name].sparse != "off"}
    rates = np.asarray(jax.vmap(learning_rate)(np.arange(steps)), np.float32)
    return {
        path: GroupRule(
            group.sparse,
            group.optimizer,
            _weight_decay(config, group),
            config.b1 if group.b1 is None else group.b1,
            config.b2 if group.b2 is None else group.b2,
            config.eps,
            rates * np.float32(group.lr),
        )
        for path, group in found.items()
    }


def report(config: OptimConfig, infos: Iterable[ParamInfo]) -> list[GroupRow]:
    """The groups that hold parameters, default ones first; each path, a tied table's too, once."""
    infos = tuple(infos)
    labels = assign(config, infos)
    sizes = {info.path: math.prod(info.shape) for info in infos}
    rows = []
    for name, group in _groups(config).items():
        paths = tuple(path for path, label in labels.items() if label == name)
        if paths:
            rows.append(
                GroupRow(
                    group=name,
                    optimizer="none" if group.frozen else group.optimizer,
                    parameters=sum(sizes[path] for path in paths),
                    paths=paths,
                    peak_lr=0.0 if group.frozen else config.lr * group.lr,
                    weight_decay=0.0 if group.frozen else _weight_decay(config, group),
                    sparse=group.sparse,
                )
            )
    return rows


def _groups(config: OptimConfig) -> dict[str, GroupConfig]:
    groups: dict[str, GroupConfig] = {role: getattr(config, role) for role in ROLES}
    for named in config.groups:
        if named.name in groups:
            raise UserError(f"optim.groups: the name {named.name!r} is taken; choose another")
        groups[named.name] = named.group
    return groups


def _weight_decay(config: OptimConfig, group: GroupConfig) -> float:
    return config.weight_decay if group.weight_decay is None else group.weight_decay


def _decay_steps(config: OptimConfig, steps: int) -> int:
    return max(1, round(config.decay * steps))


def _direction(config: OptimConfig, group: GroupConfig) -> optax.GradientTransformation:
    """group.lr · (direction(g) + weight_decay · p), the sign and the schedule left out."""
    if group.optimizer == "adamw":
        direction = optax.scale_by_adam(
            b1=config.b1 if group.b1 is None else group.b1,
            b2=config.b2 if group.b2 is None else group.b2,
            eps=config.eps,
        )
    elif group.optimizer == "adagrad":
        # Optax adds its eps under the root; squared, it has the scale of Adam's.
        direction = optax.scale_by_rss(initial_accumulator_value=0.0, eps=config.eps**2)
    else:
        direction = optax.identity()
    decay = optax.add_decayed_weights(_weight_decay(config, group))
    return optax.chain(direction, decay, optax.scale(group.lr))


def _clip(max_norm: float | None) -> optax.GradientTransformation:
    """Optax's clip by global norm, with float32 squares, and the norm kept for the log."""

    def init(_: Any) -> ClipState:
        return ClipState(jnp.zeros((), jnp.float32))

    def update(grads: Any, _: Any, params: Any = None) -> tuple[Any, ClipState]:
        squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)]
        norm = jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))
        if max_norm is not None:
            scale = jnp.minimum(1.0, max_norm / norm)
            grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        return grads, ClipState(norm)

    return optax.GradientTransformation(init, update)
