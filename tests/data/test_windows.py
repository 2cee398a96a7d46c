"""Windows and batches against a plain-Python reading of the stream (field report 25)."""

import json

import grain
import numpy as np
import pytest

from vocabjax.data.prepare import TokenStream
from vocabjax.data.windows import WindowSource, evaluation_batches, train_batches, windows_per_pass
from vocabjax.errors import UserError

END = 3
FIELDS = ("ids", "targets", "segment", "position")


def stream_of(tokens, end=END):
    return TokenStream(np.asarray(tokens, np.uint32), end, None)


def random_stream(n, seed=0, vocabulary=7):
    return stream_of(np.random.default_rng(seed).integers(0, vocabulary, n))


def plain_window(tokens, start, length, end):
    """The oracle: one token at a time."""
    rows = {field: [] for field in FIELDS}
    segment = position = 0
    for t in range(length):
        at = start + t
        real = at + 1 < len(tokens)
        if real and tokens[at] == end:
            segment, position = segment + 1, 0
        rows["ids"].append(int(tokens[at]) if real else 0)
        rows["targets"].append(int(tokens[at + 1]) if real else -100)
        rows["segment"].append(segment)
        rows["position"].append(position)
        position += 1
    return rows


@pytest.mark.parametrize("end", [END, 0, None])
@pytest.mark.parametrize("n", [2, 5, 6, 11, 12, 60])
def test_windows_equal_a_plain_loop(n, end):
    tokens = random_stream(n).tokens
    source = WindowSource(stream_of(tokens, end), 5, pad_last=True)
    assert len(source) == -(-(n - 1) // 5)
    for i in range(len(source)):
        expected = plain_window(tokens, i * 5, 5, end)
        window = source[i]
        assert tuple(window) == FIELDS
        for field in FIELDS:
            assert window[field].dtype == np.int32
            assert window[field].tolist() == expected[field], (i, field)


def test_training_takes_full_windows_only():
    assert [windows_per_pass(random_stream(n), 5) for n in (1, 5, 6, 10, 11)] == [0, 0, 1, 1, 2]
    with pytest.raises(IndexError):
        WindowSource(random_stream(10), 5)[1]


def test_documented_example():
    window = WindowSource(stream_of([END, 1, 2, END, 4, 5, 6]), 6)[0]
    assert window["segment"].tolist() == [1, 1, 1, 2, 2, 2]
    assert window["position"].tolist() == [0, 1, 2, 0, 1, 2]
    assert window["targets"].tolist() == [1, 2, END, 4, 5, 6]  # shifted once


def test_large_ids_reach_the_batch_whole():
    batch = next(train_batches(stream_of([65_535, 65_536, 69_999]), length=2, batch=1, seed=0))
    assert batch["ids"].tolist() == [[[65_535, 65_536]]]
    assert batch["targets"].tolist() == [[[65_536, 69_999]]]


def take(iterator, n):
    return [next(iterator) for _ in range(n)]


def assert_equal(first, second):
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        for field in FIELDS:
            np.testing.assert_array_equal(a[field], b[field], strict=True)


def numbered(windows, length):
    """A stream whose window i starts with token i · length: a window tells its number."""
    return stream_of(np.arange(windows * length + 1), end=None)


def starts(batches, length):
    return [int(i) // length for batch in batches for i in batch["ids"][..., 0].ravel()]


@pytest.mark.parametrize("batch", [1, 3, 7])
def test_every_pass_holds_every_window_once_in_its_own_order(batch):
    windows, length = 7, 4
    iterator = train_batches(numbered(windows, length), length=length, batch=batch, seed=5)
    order = starts(take(iterator, 3 * windows), length)
    passes = [tuple(order[p * windows : (p + 1) * windows]) for p in range(3 * batch)]
    assert all(sorted(one) == list(range(windows)) for one in passes)
    assert len(set(passes[:3])) > 1


def test_order_is_fixed_by_the_seed_and_seeds_do_not_share_passes():
    length, windows = 2, 20

    def passes(seed):
        iterator = train_batches(numbered(windows, length), length=length, batch=1, seed=seed)
        return [tuple(starts(take(iterator, windows), length)) for _ in range(3)]

    assert passes(0) == passes(0)
    assert not set(passes(0)) & set(passes(1))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_process_shards_join_to_the_global_batch(accumulate):
    stream, length, batch = random_stream(200), 5, 8
    arguments = {"length": length, "batch": batch, "accumulate": accumulate, "seed": 1}
    whole = take(train_batches(stream, **arguments), 12)
    assert whole[0]["ids"].shape == (accumulate, batch // accumulate, length)
    for count in (2, 4):
        shards = [
            take(train_batches(stream, **arguments, process_index=i, process_count=count), 12)
            for i in range(count)
        ]
        joined = [
            {field: np.concatenate([part[field] for part in parts], axis=1) for field in FIELDS}
            for parts in zip(*shards, strict=True)
        ]
        assert_equal(joined, whole)


def test_processes_load_disjoint_windows():
    stream = numbered(16, 3)
    shards = [
        starts([next(train_batches(stream, length=3, batch=16, seed=0, accumulate=2, **place))], 3)
        for place in ({"process_index": i, "process_count": 4} for i in range(4))
    ]
    assert sorted(number for shard in shards for number in shard) == list(range(16))


def test_microbatches_split_the_same_step():
    stream = random_stream(200)
    plain = take(train_batches(stream, length=5, batch=8, seed=1), 12)
    split = take(train_batches(stream, length=5, batch=8, accumulate=4, seed=1), 12)
    for one, four in zip(plain, split, strict=True):
        for field in FIELDS:
            np.testing.assert_array_equal(one[field].reshape(4, 2, 5), four[field])


# 13 windows, batches of 4: step 3 runs over the end of a pass, step 13 starts one exactly.
@pytest.mark.parametrize("killed_at", [0, 1, 2, 3, 4, 12, 13, 14])
def test_resume_gives_identical_batches(killed_at):
    arguments = {"length": 4, "batch": 4, "accumulate": 2, "seed": 9}
    stream = random_stream(13 * 4 + 1)
    first = train_batches(stream, **arguments)
    take(first, killed_at)
    state = json.loads(json.dumps(first.get_state()))
    expected = take(first, 20)
    second = train_batches(stream, **arguments)
    second.set_state(state)
    assert second.get_state() == state == {"next_index": killed_at}
    assert_equal(take(second, 20), expected)


def test_state_set_on_a_running_iterator():
    iterator = train_batches(random_stream(100), length=4, batch=4, seed=9)
    expected = take(iterator, 6)
    iterator.set_state({"next_index": 2})
    assert_equal(take(iterator, 4), expected[2:])


def test_resume_with_another_process_count():
    arguments = {"length": 4, "batch": 8, "seed": 2}
    stream = random_stream(120)
    four = train_batches(stream, **arguments, process_index=3, process_count=4)
    take(four, 5)
    expected = take(train_batches(stream, **arguments), 9)[5:]
    shards = []
    for i in range(2):
        two = train_batches(stream, **arguments, process_index=i, process_count=2)
        two.set_state(four.get_state())
        shards.append(take(two, 4))
    for step, whole in enumerate(expected):
        joined = np.concatenate([shard[step]["ids"] for shard in shards], axis=1)
        np.testing.assert_array_equal(joined, whole["ids"])


def test_orbax_saves_and_restores_the_iterator(tmp_path):
    from orbax.checkpoint import v1 as ocp

    arguments = {"length": 4, "batch": 4, "seed": 9}
    stream = random_stream(100)
    first = train_batches(stream, **arguments)
    assert isinstance(first, grain.DatasetIterator)
    take(first, 7)
    ocp.save_checkpointables(tmp_path / "checkpoint", {"data": first})
    second = train_batches(stream, **arguments)
    ocp.load_checkpointables(tmp_path / "checkpoint", {"data": second})
    assert_equal(take(second, 3), take(first, 3))


def test_one_window():
    iterator = train_batches(random_stream(6), length=5, batch=1, seed=0)
    first, second = take(iterator, 2)
    assert_equal([first], [second])


@pytest.mark.parametrize("length", [4, 5])
@pytest.mark.parametrize("n", [2, 5, 6, 31, 40])
def test_evaluation_covers_every_target_once(n, length):
    tokens = random_stream(n, vocabulary=50).tokens
    for batch, count in ((1, 1), (2, 1), (8, 1), (8, 4)):
        pairs = []
        shards = [
            evaluation_batches(
                stream_of(tokens), length=length, batch=batch, process_index=i, process_count=count
            )
            for i in range(count)
        ]
        assert len({len(shard) for shard in shards}) == 1
        for parts in zip(*shards, strict=True):
            assert {part["ids"].shape for part in parts} == {(batch // count, length)}
            targets = np.concatenate([part["targets"] for part in parts])
            ids = np.concatenate([part["ids"] for part in parts])
            real = targets != -100
            pairs += zip(ids[real].tolist(), targets[real].tolist(), strict=True)
        assert pairs == list(zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True))


def test_evaluation_can_be_repeated():
    batches = evaluation_batches(random_stream(31), length=5, batch=4)
    assert_equal(list(batches), list(batches))
    assert_equal(batches[:1], [batches[0]])


def test_filler_rows_carry_no_label():
    (batch,) = evaluation_batches(random_stream(8), length=5, batch=4)
    assert (batch["targets"][2:] == -100).all()
    assert (batch["targets"][1] != -100).sum() == 2


def test_batch_that_does_not_divide_names_sizes_that_do():
    arguments = {"length": 2, "seed": 0, "accumulate": 3, "process_count": 2}
    with pytest.raises(UserError, match="6 or 12"):
        train_batches(random_stream(99), batch=8, **arguments)
    with pytest.raises(UserError, match="would: 6"):
        train_batches(random_stream(99), batch=4, **arguments)
    with pytest.raises(UserError, match="4 or 8"):
        evaluation_batches(random_stream(99), length=2, batch=5, process_count=4)
    with pytest.raises(UserError, match="process 2 of 2"):
        train_batches(random_stream(99), batch=6, **arguments, process_index=2)


def test_too_little_text_gives_the_counts():
    with pytest.raises(
        UserError, match=r"30 training tokens make 5 windows of length 5.*batch of 8"
    ):
        train_batches(random_stream(30), length=5, batch=8, seed=0)
    with pytest.raises(UserError, match="1 tokens"):
        evaluation_batches(random_stream(1), length=5, batch=8)


# Documents with a prefix

BAR = 5  # ends a prefix


def prefixed(documents):
    tokens = [END]
    for document in documents:
        tokens += [*document, END]
    return TokenStream(np.asarray(tokens, np.uint32), END, None, BAR)


def random_documents(count, longest=9):
    """Tokens say where they stand: 100 · document + offset. Some documents have no prefix, some have two ends."""
    rng = np.random.default_rng(count)
    documents = []
    for number in range(1, count + 1):
        document = [100 * number + i for i in range(rng.integers(1, longest))]
        for at in rng.integers(0, 2 * len(document), 2):
            document[at : at + 1] = [BAR] if at < len(document) else []
        documents.append(document)
    return documents


def test_a_window_of_documents_ignores_prefixes_and_what_does_not_fit():
    documents = [[11, BAR, 12, 13], [21, 22, BAR, 23], [31, BAR, 32, 33, 34, 35, 36, 37], [41]]
    stream = prefixed(documents)
    source = WindowSource(stream, 7)
    expected = [
        # The second document would not end inside: it begins the next window.
        ([END, 11, BAR, 12, 13, 0, 0], [-100, -100, 12, 13, END, -100, -100]),
        ([END, 21, 22, BAR, 23, 0, 0], [-100, -100, -100, 23, END, -100, -100]),
        # The third is longer than a window: its beginning is kept.
        ([END, 31, BAR, 32, 33, 34, 35], [-100, -100, 32, 33, 34, 35, 36]),
        ([END, 41, 0, 0, 0, 0, 0], [-100] * 7),
    ]
    assert len(source) == windows_per_pass(stream, 7) == len(expected)
    for i, (ids, targets) in enumerate(expected):
        assert source[i]["ids"].tolist() == ids
        assert source[i]["targets"].tolist() == targets
        assert source[i]["segment"].tolist() == [1] * 7
        assert source[i]["position"].tolist() == list(range(7))


@pytest.mark.parametrize("length", [3, 10, 40])
@pytest.mark.parametrize("count", [1, 5, 30])
def test_each_target_after_a_prefix_is_read_once_with_all_of_its_document_before_it(count, length):
    documents = random_documents(count)
    expected = []
    for document in documents:
        read = [END, *document, END]
        end = read.index(BAR) if BAR in read else len(read)
        expected += [(read[: t + 1], read[t + 1]) for t in range(end, min(length, len(read) - 1))]
    found, source = [], WindowSource(prefixed(documents), length, pad_last=True)
    for window in (source[i] for i in range(len(source))):
        for t in np.flatnonzero(window["targets"] != -100):
            start = t - window["position"][t]
            found.append((window["ids"][start : t + 1].tolist(), int(window["targets"][t])))
    assert found == expected
    assert len(source) <= count


def test_windows_of_documents_end_where_a_stream_is_cut_off():
    whole = prefixed([[11, BAR, 12], [21, BAR, 22, 23]])
    cut = TokenStream(whole.tokens[:-2], END, None, BAR)
    source = WindowSource(cut, 9)
    assert len(source) == 1
    assert source[0]["targets"].tolist() == [-100, -100, 12, END, -100, -100, 22, -100, -100]


def test_batches_of_documents_are_shared_out_and_resumed_like_others():
    stream = prefixed(random_documents(60))
    arguments = {"length": 12, "batch": 4, "accumulate": 2, "seed": 1}
    whole = take(train_batches(stream, **arguments), 9)
    parts = [
        take(train_batches(stream, **arguments, process_index=i, process_count=2), 9)
        for i in range(2)
    ]
    joined = [
        {field: np.concatenate([one[field], two[field]], axis=1) for field in FIELDS}
        for one, two in zip(*parts, strict=True)
    ]
    assert_equal(joined, whole)
    first = train_batches(stream, **arguments)
    take(first, 5)
    second = train_batches(stream, **arguments)
    second.set_state(first.get_state())
    assert_equal(take(second, 4), whole[5:])
    batches = [
        evaluation_batches(stream, length=12, batch=4, process_index=i, process_count=2)
        for i in range(2)
    ]
    evaluated = [int((b["targets"] >= 0).sum()) for share in batches for b in share]
    source = WindowSource(stream, 12)
    assert sum(evaluated) == sum(int((source[i]["targets"] >= 0).sum()) for i in range(len(source)))
