"""Order is a function of seed and row number: resumed, over epochs, for any process count."""

import itertools
import json
import time

import numpy as np
import pytest

from moejax.data import DataConfig, eval_batches, load_tokenizer, train_batches

LENGTH = 8
LETTERS = "abcdefghij"


def write_documents(folder, letters, length=LENGTH):
    """One document a letter, which with its eos fills a row exactly."""
    folder.mkdir(parents=True)
    for letter in letters:
        (folder / f"{letter}.txt").write_text(letter * (length - 1))
    return str(folder)


@pytest.fixture
def ten(tmp_path):
    """Ten samples, and a tokenizer of bytes alone."""
    source = write_documents(tmp_path / "ten", LETTERS)
    cfg = DataConfig(train=(source,), eval=(f"val={source}",), vocab_size=257)
    return cfg, load_tokenizer(cfg, tmp_path / "cache"), tmp_path / "cache"


def train(ten, **changes):
    cfg, tokenizer, cache_dir = ten
    arguments = {"batch_size": 2, "length": LENGTH, "seed": 7} | changes
    return train_batches(cfg, tokenizer, cache_dir=cache_dir, **arguments)


def names(ten, batch):
    """The letters of a batch's rows."""
    return [ten[1].decode([row[0]]) for row in batch["tokens"]]


def take(ten, batches, n):
    return [names(ten, batch) for batch in itertools.islice(batches, n)]


def same(left, right):
    return all(np.array_equal(left[name], right[name]) for name in left)


def test_each_epoch_visits_all_once_in_an_order_of_its_own(ten):
    with train(ten) as batches:
        assert batches.rows_per_epoch == 10 and batches.num_tokens == 80
        assert batches.num_bytes == 70
        order = [letter for batch in take(ten, batches, 15) for letter in batch]
    epochs = [order[:10], order[10:20], order[20:]]
    assert all(sorted(epoch) == list(LETTERS) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3


def test_resume_after_three_batches_equals_the_uninterrupted_run_for_three_epochs(ten):
    with train(ten) as uninterrupted:
        expected = list(itertools.islice(uninterrupted, 15))
    with train(ten) as stopped:
        for _ in range(3):
            next(stopped)
        state = json.loads(json.dumps(stopped.state()))
    with train(ten) as resumed:
        next(resumed)  # restoring forgets what was read ahead
        resumed.restore(state)
        for batch in expected[3:]:
            assert same(next(resumed), batch)


def test_resume_at_every_batch(ten):
    with train(ten) as batches:
        states, expected = [], []
        for _ in range(12):
            states.append(batches.state())
            expected.append(next(batches))
        for state, batch in zip(states[::-1], expected[::-1], strict=True):
            batches.restore(state)
            assert batches.state() == state
            assert same(next(batches), batch)


def test_rows_of_a_global_batch_are_the_same_for_any_process_count(ten):
    with train(ten, batch_size=4) as one:
        expected = list(itertools.islice(one, 6))
    for count in (2, 4):
        processes = [
            train(ten, batch_size=4, process_index=p, process_count=count) for p in range(count)
        ]
        for batch in expected:
            shares = [next(process) for process in processes]
            assert all(share["tokens"].shape == (4 // count, LENGTH) for share in shares)
            joined = {name: np.concatenate([s[name] for s in shares]) for name in batch}
            assert same(joined, batch)
        assert len({str(process.state()) for process in processes}) == 1
        for process in processes:
            process.close()


def test_each_microbatch_is_the_same_for_any_process_count(ten):
    """A batch of 8 rows in 2 microbatches: a process holds its part of each, not one of the two."""
    with train(ten, batch_size=8) as one:
        expected = next(one)["tokens"].reshape(2, 4, LENGTH)
    shares = []
    for p in range(2):
        with train(ten, batch_size=8, microbatches=2, process_index=p, process_count=2) as process:
            shares.append(next(process)["tokens"].reshape(2, 2, LENGTH))
    np.testing.assert_array_equal(np.concatenate(shares, axis=1), expected)
    with pytest.raises(ValueError, match="2 processes and 3 microbatches; take a multiple of 6"):
        train(ten, batch_size=8, microbatches=3, process_count=2)


def test_resume_on_another_process_count_and_batch_size_goes_on_with_the_next_row(ten):
    with train(ten, batch_size=2) as batches:
        expected = [letter for batch in take(ten, batches, 15) for letter in batch]
    with train(ten, batch_size=2) as batches:
        take(ten, batches, 3)
        state = batches.state()
    halves = [train(ten, batch_size=4, process_index=p, process_count=2) for p in range(2)]
    got = []
    for half in halves:
        half.restore(state)
    for _ in range(6):
        for half in halves:
            got += names(ten, next(half))
    assert got == expected[6:30]
    for half in halves:
        half.close()


def test_restored_validation_goes_on_at_its_offset(ten):
    cfg, tokenizer, cache_dir = ten
    batches = eval_batches(cfg, tokenizer, "val", batch_size=2, length=LENGTH, cache_dir=cache_dir)
    whole = list(batches)
    assert len(whole) == len(batches) == 5
    assert all(same(a, b) for a, b in zip(batches, whole, strict=True))  # again, the same
    assert sorted(letter for batch in whole for letter in names(ten, batch)) == list(LETTERS)
    rest = list(batches.batches(start=3))
    assert len(rest) == 2 and all(same(a, b) for a, b in zip(rest, whole[3:], strict=True))


def test_last_evaluation_batch_is_padded_and_every_target_is_there_once(ten):
    cfg, tokenizer, cache_dir = ten
    arguments = {"batch_size": 4, "length": LENGTH, "cache_dir": cache_dir}
    whole = list(eval_batches(cfg, tokenizer, "val", **arguments))
    assert [batch["tokens"].shape for batch in whole] == [(4, LENGTH)] * 3
    assert sum((batch["targets"] >= 0).sum() for batch in whole) == 10 * (LENGTH - 1)
    assert (whole[2]["segment_ids"][2:] == 0).all() and (whole[2]["targets"][2:] == -1).all()
    first = list(eval_batches(cfg, tokenizer, "val", max_batches=2, **arguments))
    assert len(first) == 2 and all(same(a, b) for a, b in zip(first, whole, strict=False))
    shares = [
        list(eval_batches(cfg, tokenizer, "val", process_index=p, process_count=2, **arguments))
        for p in range(2)
    ]
    for left, right, batch in zip(*shares, whole, strict=True):
        assert same({n: np.concatenate([left[n], right[n]]) for n in left}, batch)


def test_mixture_keeps_its_weights_and_reads_each_source_in_its_own_order(tmp_path):
    few = write_documents(tmp_path / "few", "ab")
    many = write_documents(tmp_path / "many", "cdefgh")
    cfg = DataConfig(train=(few, many), weights=(3.0, 1.0), eval=(), vocab_size=257)
    mixed = cfg, load_tokenizer(cfg, tmp_path), tmp_path
    with train(mixed) as batches:
        # 2 rows at a share of 3/4, 6 rows at 1/4: the few have been seen once after 2.7 rows.
        assert batches.rows_per_epoch == 2
        order = [letter for batch in take(mixed, batches, 40) for letter in batch]
        state = batches.state()
        after = take(mixed, batches, 5)
        batches.restore(state)
        assert take(mixed, batches, 5) == after
    assert sum(letter in "ab" for letter in order) == 60
    for start in range(0, 80, 4):  # at any time, not only in the end
        assert sum(letter in "ab" for letter in order[start : start + 4]) == 3
    from_many = [letter for letter in order if letter not in "ab"]
    assert len(from_many) == 20 and sorted(from_many[:6]) == list("cdefgh")


def test_mixture_without_weights_sees_its_sources_equally_often(tmp_path):
    few = write_documents(tmp_path / "few", "ab")
    many = write_documents(tmp_path / "many", "cdefgh")
    cfg = DataConfig(train=(few, many), eval=(), vocab_size=257)
    mixed = cfg, load_tokenizer(cfg, tmp_path), tmp_path
    with train(mixed) as batches:
        assert batches.rows_per_epoch == 8
        order = [letter for batch in take(mixed, batches, 8) for letter in batch]
    assert sorted(order) == sorted("abcdefgh" * 2)


def test_heldout_documents_never_train(tmp_path):
    words = [f"word{n}" for n in range(100, 400)]  # 4 to a row
    (tmp_path / "texts").mkdir()
    for word in words:
        (tmp_path / "texts" / word).write_text(word)
    cfg = DataConfig(train=(str(tmp_path / "texts"),), holdout=0.2, vocab_size=257)
    tokenizer = load_tokenizer(cfg, tmp_path)
    arguments = {"batch_size": 4, "length": 32, "cache_dir": tmp_path}
    with train_batches(cfg, tokenizer, seed=0, **arguments) as batches:
        steps = 3 * batches.rows_per_epoch // 4
        trained = documents(tokenizer, itertools.islice(batches, steps))
    held_out = documents(tokenizer, eval_batches(cfg, tokenizer, "val", **arguments))
    assert 30 < len(held_out) < 90
    assert sorted(held_out | trained) == sorted(words) and not held_out & trained


def documents(tokenizer, batches):
    """The whole documents among the pieces of these batches."""
    found = set()
    for batch in batches:
        for tokens, segments in zip(batch["tokens"], batch["segment_ids"], strict=True):
            for segment in range(1, segments.max() + 1):
                piece = tokens[segments == segment]
                text = tokenizer.decode(piece)
                if piece[-1] == tokenizer.eos_id and text.startswith("word"):
                    found.add(text)
    return found


def test_the_next_batches_are_read_while_a_step_runs(ten):
    with train(ten) as batches:
        asked, row = [], batches._row
        batches._row = lambda number: (asked.append(number), row(number))[1]
        next(batches)
        deadline = time.monotonic() + 20
        while len(asked) < 8 and time.monotonic() < deadline:  # the step
            time.sleep(0.01)
        assert sorted(asked)[:8] == list(range(8)) and len(asked) <= 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 8}, "has seed=7, this run has 8"),
        ({"length": 4}, "has length=8, this run has 4"),
    ],
)
def test_restore_refuses_a_position_of_other_rows(ten, change, message):
    with train(ten) as batches:
        state = batches.state()
    with train(ten, **change) as other, pytest.raises(ValueError, match=message):
        other.restore(state)


def test_restore_refuses_changed_data_but_not_touched_files(ten, tmp_path):
    with train(ten) as batches:
        state = batches.state()
    (tmp_path / "ten" / "a.txt").touch()
    with train(ten) as batches:
        batches.restore(state)
    (tmp_path / "ten" / "a.txt").write_text("A" * 7)
    with train(ten) as batches, pytest.raises(ValueError, match="has data=.*start a new run"):
        batches.restore(state)


def test_errors_before_anything_is_trained(ten):
    cfg, tokenizer, cache_dir = ten
    with pytest.raises(ValueError, match="global batch of 3 rows does not divide over 2 processes"):
        train(ten, batch_size=3, process_count=2)
    with pytest.raises(ValueError, match=r"rows of 81 tokens are longer than the whole of .*\(80"):
        train(ten, length=81)
    with pytest.raises(ValueError, match="no evaluation set 'test'; data.eval has: val"):
        eval_batches(cfg, tokenizer, "test", batch_size=2, length=8, cache_dir=cache_dir)
    missing = DataConfig(train=("/no/such/folder",), eval=())
    with pytest.raises(FileNotFoundError, match="'/no/such/folder' does not exist"):
        train((missing, tokenizer, cache_dir))
