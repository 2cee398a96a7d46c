"""The names of a tree's leaves: `vocab/input/table`, whatever tree they live in."""

from typing import Any

import jax
from jax.tree_util import GetAttrKey, keystr

from vocabjax.errors import UserError


def path_of(key_path: tuple[Any, ...]) -> str:
    """`vocab/input/table`, for a leaf of a nested dict, an `nnx.State` or a tree-mode module."""
    if key_path and key_path[-1] == GetAttrKey("value"):  # the array inside an nnx.Variable
        key_path = key_path[:-1]
    return keystr(key_path, simple=True, separator="/")


def by_path(tree: Any) -> dict[str, Any]:
    """Path → leaf, in the order of the tree. Raises UserError for two leaves of one path."""
    leaves = jax.tree.leaves_with_path(tree)
    named = {path_of(key_path): leaf for key_path, leaf in leaves}
    if len(named) != len(leaves):
        raise UserError("two leaves of the tree have the same path; rename one")
    return named
