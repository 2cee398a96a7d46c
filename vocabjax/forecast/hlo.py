"""What a compiled program holds, sends, and how often: read from its text, as XLA for CPU, GPU and TPU prints it."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np

Shape = tuple[int, ...]

_TYPE = re.compile(r"\b(pred|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")
_COLLECTIVE = re.compile(
    r"^\s*(?:ROOT )?%\S+ = (?P<result>.+?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|"
    r"collective-broadcast|ragged-all-to-all)(?P<start>-start)?\("
)
_NAME = re.compile(r"^\s*(?:ROOT )?%(\S+) = ")
_OPERAND = re.compile(r" [a-z][\w-]*\(%([\w.-]+)")
_FOLLOWED = 8  # operands
_MADE = re.compile(r"^\s*(?:ROOT )?%\S+ = (.+?) [a-z][\w-]*\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) \(.*\{\s*$")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations)=(\{[^}]*\}|%[\w.-]+)"
)
_WHILE = re.compile(r" while\(.*?\bcondition=%([\w.-]+), body=%([\w.-]+)")
_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_FUSED = re.compile(r" fusion\(.*?\bcalls=%([\w.-]+)")
_CONSTANT = re.compile(r"= s32\[\]\S* constant\((\d+)\)")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_ORIGIN = re.compile(r'op_name="([^"]*)"')
_LISTS = re.compile(r"\b(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")
_IOTA = re.compile(r"\breplica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# The axes of a mesh, whose devices may be permuted; of an axis 'a', 'a':(2)4 is the part of size 4 after the first 2.
_BY_AXES = re.compile(
    r"\breplica_groups=mesh\[(?P<sizes>[^\]]*)\](?:, device_ids=\((?P<ids>.*?)\))? \{(?P<inside>[^}]*)\}"
)
_IOTA_IDS = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")


class Collective(NamedTuple):
    """One exchange between devices.

    Attributes:
      kind: as XLA calls it; a TPU's fused all-reduce-scatter is a reduce-scatter.
      arrays: (bytes per number, shape) of what one device has of it afterwards; several where some were combined.
      groups: ids of the devices that exchange with one another, (source, target) of a permutation; (): all of them.
      times: how often one run of the program does it, or one turn of an open loop.
      in_open_loop: whether a loop surrounds it whose length the program does not tell, as of decoding.
      origin: the scopes and functions in JAX that it, or else what it is given, comes from.
    """

    kind: str
    arrays: tuple[tuple[int, Shape], ...]
    groups: tuple[tuple[int, ...], ...]
    times: int
    in_open_loop: bool
    origin: str

    @property
    def bytes(self) -> int:
        """Of all results on one device, each time."""
        return sum(size * math.prod(shape) for size, shape in self.arrays)


def compiled_text(function: jax.stages.Wrapped, *args: object) -> str:
    """The optimised program that one device runs; shapes are those of its shards."""
    text = function.lower(*args).compile().as_text()
    assert text is not None
    return text


def buffers(text: str) -> set[Shape]:
    """The shape of every value in the program, those inside fusions included."""
    return {_shape(dims) for _, _, dims in _TYPE.findall(text)}


def results(text: str) -> set[tuple[Shape, str]]:
    """(shape, origin) of every value that stands in memory: what fusions pass on inside is left out."""
    inside = {match[1] for _, line in _lines(text) if (match := _FUSED.search(line))}
    found = set()
    for computation, line in _lines(text):
        if computation not in inside and (made := _MADE.match(line)):
            origin = _ORIGIN.search(line)
            for _, _, dims in _TYPE.findall(made[1]):
                found.add((_shape(dims), origin[1] if origin else ""))
    return found


def collectives(text: str) -> list[Collective]:
    """Every exchange of a program, once: what a TPU's fusions do of one asynchronous operation, a part each, is one."""
    found: dict[object, Collective] = {}
    times = _times(text)
    # What a TPU fuses has lost its name; the fusion that calls it has not.
    fused = {
        match[1]: _ORIGIN.search(line) for _, line in _lines(text) if (match := _FUSED.search(line))
    }
    defined = {
        (computation, made[1]): line
        for computation, line in _lines(text)
        if (made := _NAME.match(line))
    }
    for computation, line in _lines(text):
        match = _COLLECTIVE.match(line)
        if match is None:
            continue
        kind, origin = match["kind"], _ORIGIN.search(line) or fused.get(computation)
        arrays, groups = _results(match), _groups(line)
        if computation.startswith("all-reduce-scatter"):  # what it keeps is its part of that
            kind, devices = "reduce-scatter", len(groups[0])
            arrays = tuple((size, (math.prod(shape) // devices,)) for size, shape in arrays)
        where = origin[1] if origin else _origin_of_operands(defined, computation, line)
        channel = _CHANNEL.search(line)
        is_part = computation in fused and channel is not None
        if computation not in times:  # never left out in silence
            raise ValueError(
                f"cannot tell how often {computation} runs, which has {line.strip()[:200]}"
            )
        once, each = times[computation]
        for count, in_open_loop in ((once, False), (each, True)):
            if count:
                new = Collective(kind, arrays, groups, count, in_open_loop, where)
                # Elsewhere channels are not unique.
                found.setdefault((channel and channel[1], new) if is_part else len(found), new)
    return list(found.values())


def _origin_of_operands(defined: Mapping[tuple[str, str], str], computation: str, line: str) -> str:
    """Where a nameless operation's first operand comes from, or that one's: what compilers add has no name of its own."""
    for _ in range(_FOLLOWED):
        operand = _OPERAND.search(line)
        if operand is None or (computation, operand[1]) not in defined:
            return ""
        line = defined[computation, operand[1]]
        if origin := _ORIGIN.search(line):
            return origin[1]
    return ""


def axes_of(groups: tuple[tuple[int, ...], ...], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of a mesh along which the devices of any group differ; ids count through the mesh, its last axis fastest."""
    shape = tuple(mesh.values())
    if not groups:
        return tuple(name for name, size in mesh.items() if size > 1)
    differ = np.zeros(len(shape), bool)
    for group in groups:  # of a permutation, the pairs differ along one axis or another
        at = np.stack(np.unravel_index(np.array(group), shape))
        differ |= (at != at[:, :1]).any(1)
    return tuple(name for name, is_along in zip(mesh, differ, strict=True) if is_along)


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """(computation, line) of every operation."""
    computation = ""
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            computation = start[1]
        elif line.startswith(" "):
            yield computation, line


def _results(match: re.Match[str]) -> tuple[tuple[int, Shape], ...]:
    arrays = [
        (max(1, int(bits or 8) // 8), _shape(dims))
        for _, bits, dims in _TYPE.findall(match["result"])
    ]
    if match["start"]:
        if match["kind"] == "collective-permute":
            arrays = arrays[1:2]  # (operand, result, and two counters)
        elif match["kind"] != "all-reduce":
            arrays = arrays[len(arrays) // 2 :]  # (operands, results)
    return tuple(arrays)


def _groups(line: str) -> tuple[tuple[int, ...], ...]:
    if found := _LISTS.search(line):
        return tuple(_shape(group) for group in re.findall(r"\{([\d,]*)\}", found[1]))
    if found := _IOTA.search(line):
        count, size = _shape(found[1])[0], math.prod(_shape(found[1])[1:])
        ids = np.arange(count * size).reshape(_shape(found[2]))
        if found[3]:
            ids = ids.transpose(_shape(found[3]))
        return tuple(tuple(row) for row in ids.reshape(count, size).tolist())
    if found := _BY_AXES.search(line):
        return _groups_by_axes(found["sizes"], found["ids"], found["inside"])
    if "replica_groups=" in line and "replica_groups={}" not in line:
        # Not "all of them": a number that is not known must not look like one that is.
        raise ValueError(f"cannot read which devices exchange in {line.strip()[:300]}")
    return ()


def _groups_by_axes(sizes: str, ids: str | None, inside: str) -> tuple[tuple[int, ...], ...]:
    whole = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", sizes)}
    devices = _device_ids(ids, math.prod(whole.values()))
    # Every axis as (before, part, after), so that a part of an axis is a dimension of its own.
    split: dict[str, tuple[int, int, int]] = {name: (size, 1, 1) for name, size in whole.items()}
    for name, before, part in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", inside):
        first, size = int(before or 1), int(part or whole[name])
        split[name] = (first, size, whole[name] // (first * size))
    shape = [size for three in split.values() for size in three]
    within = [3 * index + 1 for index in range(len(split))]
    outside = [axis for axis in range(len(shape)) if axis not in within]
    rows = devices.reshape(shape).transpose(outside + within)
    width = math.prod(shape[axis] for axis in within)
    return tuple(tuple(row) for row in rows.reshape(-1, width).tolist())


def _device_ids(text: str | None, count: int) -> np.ndarray:
    """The devices of a mesh in its order: counted up where nothing is said, [4,2]T(1,0), or a list."""
    if text is None:
        return np.arange(count)
    if iota := _IOTA_IDS.fullmatch(text):
        ids = np.arange(count).reshape(_shape(iota[1]))
        return ids.transpose(_shape(iota[2])).ravel() if iota[2] else ids.ravel()
    return np.array(_shape(text))


class _Times(NamedTuple):
    """How often a computation runs: in a run of the program outside of open loops, and in each turn of one."""

    once: int
    each: int


def _times(text: str) -> dict[str, _Times]:
    """The times of each computation that is called: its callers', those of a loop's body multiplied by its length."""
    calls: dict[str, list[tuple[str, int | None]]] = {}
    constants: dict[str, list[int]] = {}
    loops: list[tuple[str, str, str, int | None]] = []
    for computation, line in _lines(text):
        constants.setdefault(computation, []).extend(map(int, _CONSTANT.findall(line)))
        if loop := _WHILE.search(line):
            known = _KNOWN.search(line)
            loops.append((computation, loop[1], loop[2], int(known[1]) if known else None))
        else:
            for names in _CALLED.findall(line):
                for name in re.findall(r"%([\w.-]+)", names):
                    calls.setdefault(name, []).append((computation, 1))
    for computation, condition, body, length in loops:
        # JAX's loops count from 0 up to the one constant that their condition holds.
        bounds = constants.get(condition, [])
        count = length if length is not None else bounds[0] if len(bounds) == 1 else None
        for name in (condition, body):
            calls.setdefault(name, []).append((computation, count))
    entry = re.search(r"^ENTRY %(\S+) ", text, re.MULTILINE)
    times = {"": _Times(1, 0)}  # lines of a program without a heading
    if entry:
        times[entry[1]] = _Times(1, 0)

    def of(name: str) -> _Times:
        if name not in times:
            times[name] = _Times(0, 0)  # nothing calls itself
            once = each = 0
            for caller, count in calls.get(name, []):
                outer = of(caller)
                if count is None:
                    each += outer.once + outer.each
                else:
                    once, each = once + count * outer.once, each + count * outer.each
            times[name] = _Times(once, each)
        return times[name]

    return {name: of(name) for name in {"", *times, *calls}}


def _shape(dims: str) -> Shape:
    return tuple(int(dim) for dim in dims.split(",") if dim)
