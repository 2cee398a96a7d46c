"""Counts and texts of ids."""

import jax
import numpy as np
import pytest
from meshes import layout_of, put
from tokenizers import Tokenizer

from vocabjax.data import tokenizer as tokenizing
from vocabjax.errors import UserError
from vocabjax.vocab.lexicon import Constant, Lexicon


def test_ranks_sort_by_count_and_ties_by_id() -> None:
    ranks = Lexicon(np.array([5, 0, 7, 5, 7])).ranks(7, "x")
    assert ranks.tolist() == [2, 4, 0, 3, 1, 5, 6]


def test_what_is_not_known_is_asked_for() -> None:
    with pytest.raises(UserError, match=r"head adaptive needs .*counts_V"):
        Lexicon().ranks(5, "head adaptive")
    with pytest.raises(UserError, match=r"engram needs .*texts"):
        Lexicon().spelling(5, "engram")


def test_ids_without_a_text_spell_like_no_other() -> None:
    spelled = Lexicon(texts=["a", "b"]).spelling(4, "x")
    assert spelled[:2] == ["a", "b"]
    assert len(set(spelled)) == 4


def test_a_byte_level_tokenizer_spells_text_where_it_is_text() -> None:
    tokenizer = tokenizing.train_bpe(["the cat, the cat, é é"], 300, "<end>")
    spelled = tokenizing.texts(tokenizer)
    assert len(spelled) == tokenizing.size(tokenizer)
    assert len(set(spelled)) == len(spelled)
    assert spelled[tokenizer.token_to_id("<end>")] == "<end>"
    assert " the" in spelled
    half_of_e_acute = tokenizer.token_to_id("Ã")
    assert spelled[half_of_e_acute] == "\0Ã"


def test_ids_that_a_sparse_tokenizer_lacks_spell_like_no_other() -> None:
    tokenizer = Tokenizer.from_str(
        '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 3}, "unk_token": "a"}, "added_tokens": []}'
    )
    spelled = tokenizing.texts(tokenizer)
    assert (spelled[0], spelled[3], len(set(spelled))) == ("a", "b", 4)


@pytest.mark.parametrize("mesh", ["none", "data=2,model=4 explicit", "data=2,seq=2,model=2 auto"])
def test_a_constant_is_looked_up_where_the_ids_lie(mesh: str) -> None:
    layout = layout_of(mesh)
    constant = Constant(np.array([7, 5, 3]))
    ids = np.array([[0, 1], [2, 3], [-1, 2], [1, 1]], np.int32)
    with jax.set_mesh(layout.mesh):
        found = jax.jit(lambda ids: constant.of(layout, ids))(put(layout, ids, "batch", "seq"))
    np.testing.assert_array_equal(found, [[7, 5], [3, -1], [-1, 3], [5, 5]])


def test_equal_constants_are_one_setting() -> None:
    one, two, other = (Constant(np.array(values)) for values in ([1, 2], [1, 2], [[1, 2]]))
    assert (one, hash(one)) == (two, hash(two))
    assert one != other
