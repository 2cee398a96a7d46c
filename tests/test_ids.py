"""Bad ids and labels are named by position and value (field report 1, the host's side)."""

import numpy as np
import pytest

from vocabjax.errors import IdError, UserError
from vocabjax.ids import check_ids, check_labels


@pytest.mark.parametrize("bad", [-1, 17, 24, -100])
def test_bad_id_is_named(bad):
    ids_BT = np.zeros((2, 3), np.int32)
    ids_BT[1, 2] = bad
    with pytest.raises(IdError, match=rf"token id {bad} at position \(1, 2\) is outside \[0, 17\)"):
        check_ids(ids_BT, 17)


def test_first_of_several_offenders_is_named():
    with pytest.raises(IdError, match=r"99 at position \(1,\)"):
        check_ids([0, 99, -5], 17)


def test_edges_pass():
    check_ids([0, 16], 17)
    check_labels([0, 16, -100], 17)
    check_ids(np.zeros((0,), np.int32), 17)


@pytest.mark.parametrize("bad", [-1, -101, 17])
def test_bad_label_is_named(bad):
    with pytest.raises(IdError, match=rf"label {bad} at position \(0, 1\)"):
        check_labels(np.array([[-100, bad]]), 17)


def test_label_that_may_not_be_predicted():
    predictable = np.array([True, False, True])
    check_labels([0, 2, -100], 3, predictable)
    with pytest.raises(IdError, match=r"label 1 at position \(2,\) is an input-only id"):
        check_labels([0, -100, 1], 3, predictable)


def test_ids_must_be_integers():
    with pytest.raises(UserError, match="float64"):
        check_ids([0.5], 3)
