"""Logical and padded sizes, and which ids may be predicted (field reports 5, 11, 17)."""

import re

import numpy as np
import pytest
from meshes import layout_of

from vocabjax.errors import IdError, UserError
from vocabjax.mesh import Layout
from vocabjax.vocab.sizes import Sizes


@pytest.fixture(scope="module")
def one() -> Layout:
    return layout_of("none")


@pytest.mark.parametrize(
    ("size", "padded"), [(1, 64), (64, 64), (65, 128), (127, 128), (128, 128), (129, 192)]
)
def test_an_exact_multiple_does_not_grow(one, size, padded):
    sizes = Sizes.make(size, 64, (), one)
    assert (sizes.logical, sizes.padded, sizes.pad(size)) == (size, padded, padded)


@pytest.mark.parametrize("mesh", ["model=8 explicit", "data=2,model=4 auto", "data=8 explicit"])
@pytest.mark.parametrize("multiple", [1, 3, 64])
def test_rows_divide_over_the_shards_and_no_smaller_padding_does(mesh, multiple):
    layout = layout_of(mesh)
    unit = multiple * layout.shards("vocab")
    for size in (1, unit, unit + 1, 2 * unit - 1, 1000):
        padded = Sizes.make(size, multiple, (), layout).padded
        assert padded % unit == 0
        assert padded - unit < size <= padded


def test_allowed_ids_are_the_logical_ones_without_the_banned(one):
    sizes = Sizes.make(10, 4, (7, 2, 7), one)
    assert sizes.banned == (2, 7)
    assert np.flatnonzero(sizes.allowed_V).tolist() == [0, 1, 3, 4, 5, 6, 8, 9]
    assert sizes.allowed_V.shape == (12,)
    assert sizes.allowed_V.dtype == bool
    assert sizes.predictable == 8


@pytest.mark.parametrize(
    ("size", "multiple", "banned", "message"),
    [
        (0, 64, (), "vocab.size = 0 and vocab.multiple = 64 must be at least 1"),
        (10, 0, (), "vocab.size = 10 and vocab.multiple = 0 must be at least 1"),
        (10, 4, (3, 10), "vocab.banned: id 10 is outside [0, 10)"),
        (10, 4, (-1,), "vocab.banned: id -1 is outside [0, 10)"),
        (2, 4, (1, 0), "vocab.banned holds every id: nothing is left to predict"),
    ],
)
def test_settings_that_cannot_work_are_named(one, size, multiple, banned, message):
    with pytest.raises(UserError, match=re.escape(message)):
        Sizes.make(size, multiple, banned, one)


def test_a_banned_id_may_be_read_but_not_predicted(one):
    sizes = Sizes.make(10, 4, (7,), one)
    sizes.check_ids(np.array([[0, 7, 9]]))
    sizes.check_labels(np.array([[0, -100, 9]]))
    with pytest.raises(IdError, match=r"label 7 at position \(0, 2\) is an input-only id"):
        sizes.check_labels(np.array([[0, -100, 7]]))


@pytest.mark.parametrize("bad", [-1, 10, 11])
def test_padding_is_neither_an_id_nor_a_label(one, bad):
    sizes = Sizes.make(10, 4, (), one)
    with pytest.raises(IdError, match=rf"token id {bad} at position \(1, 0\) is outside \[0, 10\)"):
        sizes.check_ids(np.array([[0], [bad]]))
    with pytest.raises(IdError, match=rf"label {bad} at position \(1, 0\)"):
        sizes.check_labels(np.array([[0], [bad]]))
