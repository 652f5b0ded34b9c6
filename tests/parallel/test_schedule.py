"""Schedules as tables: played with tokens, counted against closed forms, broken and found out."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.parallel.schedule import (
    SCHEDULES,
    Buffer,
    Schedule,
    assign_slots,
    bubble_share,
    check,
    ideal_time,
    in_flight,
    lockstep_time,
    main,
    make,
)

TRAIN = SCHEDULES[:3]
SIZES = (st.sampled_from(SCHEDULES), st.integers(1, 6), st.integers(1, 4), st.integers(1, 13))


class Ram:
    """One buffer of all ranks; the trash slot holds no token."""

    def __init__(self, buffer: Buffer, pp: int):
        assert buffer.write.dtype == buffer.read.dtype == np.int32
        for slots in (buffer.write, buffer.read):
            assert (slots >= 0).all() and (slots <= buffer.num).all()
        self.buffer, self.cells = buffer, [[None] * (buffer.num + 1) for _ in range(pp)]

    def read(self, tick: int, rank: int):
        return self.cells[rank][self.buffer.read[tick, rank]]

    def write(self, tick: int, rank: int, token):
        slot = self.buffer.write[tick, rank]
        assert token is None or slot < self.buffer.num, f"{token} goes to the trash"
        self.cells[rank][slot] = token if slot < self.buffer.num else None


def op_at(ops, tick: int, rank: int):
    chunk, microbatch = ops[tick, rank].tolist()
    return None if chunk < 0 else (chunk, microbatch)


def play(schedule: Schedule):
    """Plays the table as the pipeline does, with names in place of arrays."""
    slots, pp, last = assign_slots(schedule), schedule.pp, schedule.num_stages - 1
    x_in, dx_in, saved, between = (
        Ram(buffer, pp) for buffer in (slots.x_in, slots.dx_in, slots.saved, slots.between)
    )
    trains, splits = schedule.name != "forward", schedule.name == "zero_bubble"
    ran = []
    for tick in range(schedule.ticks):
        x_out, dx_out = [None] * pp, [None] * pp
        keep, leave, loss = [None] * pp, [None] * pp, [None] * pp
        for rank in range(pp):
            if (op := op_at(schedule.forward, tick, rank)) is not None:
                stage, microbatch = op[0] * pp + rank, op[1]
                ran.append(("forward", stage, microbatch))
                x = x_in.read(tick, rank)
                assert x == (("x", stage, microbatch) if stage else None)
                keep[rank] = ("saved", stage, microbatch) if trains else None
                if stage < last:
                    x_out[rank] = ("x", stage + 1, microbatch)
                elif trains:
                    loss[rank] = ("dx", stage, microbatch)
            else:
                assert x_in.read(tick, rank) is None
            if (op := op_at(schedule.backward, tick, rank)) is not None:
                stage, microbatch = op[0] * pp + rank, op[1]
                ran.append(("backward", stage, microbatch))
                assert dx_in.read(tick, rank) == ("dx", stage, microbatch)
                assert saved.read(tick, rank) == ("saved", stage, microbatch)
                dx_out[rank] = ("dx", stage - 1, microbatch) if stage else None
                leave[rank] = ("between", stage, microbatch) if splits else None
            if (op := op_at(schedule.weight, tick, rank)) is not None:
                stage, microbatch = op[0] * pp + rank, op[1]
                ran.append(("weight", stage, microbatch))
                kept = saved.cells[rank][slots.read_weight[tick, rank]]
                assert kept == ("saved", stage, microbatch)
                assert between.read(tick, rank) == ("between", stage, microbatch)
        for rank in range(pp):
            assert loss[rank] is None or dx_out[(rank + 1) % pp] is None
            x_in.write(tick, rank, x_out[rank - 1])
            dx_in.write(tick, rank, loss[rank] or dx_out[(rank + 1) % pp])
            saved.write(tick, rank, keep[rank])
            between.write(tick, rank, leave[rank])
    kinds = ["forward"] + ["backward"] * trains + ["weight"] * splits
    everything = [
        (k, i, m) for k in kinds for i in range(last + 1) for m in range(schedule.microbatches)
    ]
    assert sorted(ran) == sorted(everything), "each op runs once"
    return slots


@settings(deadline=None, max_examples=150)
@given(*SIZES)
def test_every_op_reads_what_it_should(name, pp, vpp, microbatches):
    schedule = make(name, pp, vpp, microbatches)
    slots = play(schedule)
    if name == "forward":
        assert (slots.dx_in.num, slots.saved.num, slots.between.num) == (0, 0, 0)
        return
    held = schedule.weight if name == "zero_bubble" else schedule.backward
    if name == "merged":  # what a backward reads stays until its tick is over
        held = np.concatenate([np.full_like(held[:1], -1), held[:-1]])
    assert slots.saved.num == in_flight(schedule, held).max(), "no slot more than needed"
    both = (schedule.forward[:, :, 1] >= 0) & (schedule.backward[:, :, 1] >= 0)
    assert (schedule.forward[both][:, 1] != schedule.backward[both][:, 1]).all()


@pytest.mark.parametrize(
    ("name", "pp", "rows"),
    [
        ("merged", 1, ["F0", "B0 F1", "B1 F2", "B2"]),
        ("1f1b", 1, ["F0", "B0", "F1", "B1", "F2", "B2"]),
        ("1f1b", 2, ["F0", "F1 | F0", "| B0", "B0 | F1", "F2 | B1", "B1 | F2", "| B2", "B2"]),
        ("merged", 2, ["F0", "F1 | F0", "F2 | B0 F1", "B0 | B1 F2", "B1 | B2", "B2"]),
        (
            *("zero_bubble", 2),
            ["F0", "F1 | F0", "| B0", "B0 | F1", "W0 | B1", "F2 | W0", "B1 | F2", "W1 | B2"]
            + ["B2 | W1", "W2 | W2"],
        ),
        ("forward", 2, ["F0", "F1 | F0", "F2 | F1", "| F2"]),
    ],
)
def test_tables_by_hand(name, pp, rows):
    schedule = make(name, pp, 1, 3)
    tables = ("B", schedule.backward), ("W", schedule.weight), ("F", schedule.forward)
    found = []
    for tick in range(schedule.ticks):
        ranks = [
            " ".join(f"{letter}{op[1]}" for letter, ops in tables if (op := op_at(ops, tick, rank)))
            for rank in range(pp)
        ]
        found.append(" | ".join(ranks).strip(" ") if any(ranks[1:]) else ranks[0])
    assert found == rows


def test_the_order_is_megatrons():
    pp, vpp, microbatches = 3, 2, 6
    for name in SCHEDULES:
        schedule = make(name, pp, vpp, microbatches)
        for rank in range(pp):
            for ops, turn in ((schedule.forward, 0), (schedule.backward, vpp - 1)):
                ran = [op for t in range(schedule.ticks) if (op := op_at(ops, t, rank))]
                for k, (chunk, microbatch) in enumerate(ran):
                    assert chunk == abs(turn - k % (pp * vpp) // pp)
                    assert microbatch == k // (pp * vpp) * pp + k % pp


@pytest.mark.parametrize("name", TRAIN)
@pytest.mark.parametrize(
    ("pp", "vpp", "microbatches"), [(1, 1, 3), (4, 1, 8), (4, 2, 8), (3, 3, 9)]
)
def test_what_ranks_keep_is_the_closed_form(name, pp, vpp, microbatches):
    schedule = make(name, pp, vpp, microbatches)
    most = in_flight(schedule, schedule.backward).max(0)
    if vpp == 1 and name != "merged":
        wanted = [pp - rank for rank in range(pp)]
    else:
        wanted = [(vpp - 1) * pp + 2 * (pp - rank - 1) + 1 for rank in range(pp)]
    assert most.tolist() == wanted
    slots = assign_slots(schedule)
    more = int(name == "merged")
    assert slots.saved.num == wanted[0] + more, "weight ops hold no more than rank 0's forwards do"
    if name != "zero_bubble":
        assert max(slots.x_in.num, slots.dx_in.num) <= 1, "messages wait for no more than a tick"


@settings(deadline=None, max_examples=100)
@given(*SIZES)
def test_time_is_the_closed_form(name, p, v, m):
    schedule, wait = make(name, p, v, m), (v - 1) * (p - m % p) * (m % p > 0)
    lockstep, ideal = lockstep_time(schedule), ideal_time(schedule)
    assert ideal <= lockstep
    if name == "forward":
        assert ideal == lockstep == m * v + p - 1 + wait
    elif name == "zero_bubble":
        # ZB-H1: idle by (p - 1)(F + B - W)
        assert ideal == lockstep >= 3 * m * v + p - 1
        if m % p == 0 and m >= (2 * p if v > 1 else p) or (v == 1 and m >= p):
            assert lockstep == 3 * m * v + p - 1
    elif name == "1f1b" and v == 1:
        assert ideal == 3 * (m + p - 1)
        assert lockstep == (4 * m + 3 * p - 4 if p > 1 else 3 * m)
    else:
        assert lockstep == 3 * (m * v + p - 1 + wait)
        assert wait or ideal == lockstep


def test_bubbles():
    """1F1B is idle by (p - 1) / (v m) of its work; ZB-H1 by a third of that."""
    for name, vpp, share in (("1f1b", 1, 3 / 16), ("1f1b", 2, 3 / 32), ("zero_bubble", 1, 1 / 16)):
        schedule = make(name, 4, vpp, 16)
        assert bubble_share(schedule, clock=ideal_time) == pytest.approx(share / (1 + share))
    schedule = make("1f1b", 4, 1, 16)
    assert bubble_share(schedule) == pytest.approx(1 - 48 / 72)
    # At other prices: two forwards of 2 and backwards of 5 on each of two ranks.
    schedule = make("1f1b", 2, 1, 2)
    assert lockstep_time(schedule, 2.0, 5.0) == 2 + 2 + 5 + 5 + 5 + 5
    assert ideal_time(schedule, 2.0, 5.0) == (2 + 1) * 7
    assert lockstep_time(make("zero_bubble", 1, 1, 2), 2.0, 5.0, 3.0) == 2 * (2 + 2 + 3)


def broken(name, pp, vpp, microbatches, edit):
    """Returns a made schedule after `edit` of copies of its arrays."""
    schedule = make(name, pp, vpp, microbatches)
    arrays = [ops.copy() for ops in (schedule.forward, schedule.backward, schedule.weight)]
    edit(*arrays)
    return dataclasses.replace(schedule, forward=arrays[0], backward=arrays[1], weight=arrays[2])


def move(ops, rank, start, end):
    ops[end, rank], ops[start, rank] = ops[start, rank].copy(), -1


def f_at(tick, rank, value):
    def edit(forward, backward, weight):
        forward[tick, rank] = value

    return edit


FAULTS = [
    (("1f1b", 2, 1, 3), f_at(0, 0, -1), "forward of rank 0, chunk 0, microbatch 0 never runs"),
    (
        ("1f1b", 2, 1, 3),
        f_at(7, 0, (0, 1)),
        "rank 0, chunk 0, microbatch 1 runs at tick 1 and at tick 7",
    ),
    (("1f1b", 2, 1, 3), f_at(7, 0, (0, 3)), r"tick 7, rank 0: forward of \(0, 3\), which is no"),
    (("1f1b", 2, 1, 3), f_at(7, 0, (-1, 2)), r"tick 7, rank 0: forward of \(-1, 2\), which is no"),
    (
        ("1f1b", 2, 1, 3),  # before its input has come
        lambda f, b, w: move(f, 1, 1, 0),
        "tick 0: forward of rank 1, chunk 0, microbatch 0 needs the forward of rank 0, chunk 0, "
        "microbatch 0, which runs at tick 0",
    ),
    (
        ("merged", 2, 1, 3),  # before the next stage's gradient has come
        lambda f, b, w: move(b, 0, 3, 2),
        "tick 2: backward of rank 0, chunk 0, microbatch 0 needs the backward of rank 1",
    ),
    (
        ("merged", 1, 1, 3),  # the loss's gradient serves from the next tick on
        lambda f, b, w: move(b, 0, 1, 0),
        "tick 0: backward of rank 0, chunk 0, microbatch 0 needs the forward of rank 0, chunk 0, "
        "microbatch 0, which runs at tick 0",
    ),
    (
        ("zero_bubble", 2, 1, 3),  # its backward leaves what it needs at the end of the tick
        lambda f, b, w: move(w, 1, 9, 7),
        "tick 7: weight of rank 1, chunk 0, microbatch 2 needs the backward of rank 1",
    ),
    (
        ("zero_bubble", 2, 1, 3),
        lambda f, b, w: w.__setitem__(slice(None), -1),
        "weight of rank 0, chunk 0, microbatch 0 never runs",
    ),
    (
        ("forward", 2, 1, 3),
        lambda f, b, w: b.__setitem__((3, 0), 0),
        "backward of rank 0, chunk 0, microbatch 0 runs in an evaluation",
    ),
    (
        ("1f1b", 2, 1, 3),
        lambda f, b, w: move(f, 0, 4, 2),
        "tick 2: with the forward of rank 0, chunk 0, microbatch 2 the rank holds 3 until their "
        "backward, more than 2",
    ),
    (
        ("zero_bubble", 2, 1, 3),
        lambda f, b, w: (move(w, 0, 4, 6), move(f, 0, 5, 4)),
        "tick 4: with the forward of rank 0, chunk 0, microbatch 2 the rank holds 3 until their "
        "last use, more than 2",
    ),
]


@pytest.mark.parametrize(("sizes", "edit", "says"), FAULTS)
def test_a_broken_table_is_refused(sizes, edit, says):
    with pytest.raises(ValueError, match=says):
        check(broken(*sizes, edit))


def written(name: str, vpp: int, microbatches: int, rows: list[str]) -> Schedule:
    """Returns the table of one rank, whose row `Fa0 Bb1` stands for a tick."""
    tables = {letter: np.full((len(rows), 1, 2), -1, np.int32) for letter in "FBW"}
    for tick, row in enumerate(rows):
        for letter, chunk, microbatch in row.split():
            tables[letter][tick, 0] = "ab".index(chunk), int(microbatch)
    return Schedule(name, 1, vpp, microbatches, *tables.values())


def test_two_gradients_may_not_arrive_at_once():
    check(written("merged", 2, 2, ["Fa0", "Fb0", "Fa1 Bb0", "Ba0 Fb1", "Bb1", "Ba1"]))
    wrong = written("merged", 2, 2, ["Fa0", "Fb0", "Fa1", "Bb0 Fb1", "Ba0", "Bb1", "Ba1"])
    with pytest.raises(
        ValueError, match="tick 3: rank 0 makes the loss's gradient of microbatch 1"
    ):
        check(wrong)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("2f2b", 1, 1, 1), "no pipeline schedule '2f2b'; choose one of 1f1b, zero_bubble"),
        (("1f1b", 2, 0, 1), "pp=2, vpp=0, 1 microbatches: each is 1 or more"),
    ],
)
def test_schedules_that_do_not_exist(arguments, says):
    with pytest.raises(ValueError, match=says):
        make(*arguments)


def test_the_pictures(tmp_path, capsys):
    assert main(["zero_bubble", "2", "1", "3"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert lines[:3] == [
        "zero_bubble: 2 ranks, 3 microbatches",
        "rank 0  F0 F1    B0 W0 F2 B1 W1 B2 W2 ",
        "rank 1     F0 B0 F1 B1 W0 F2 B2 W1 W2 ",
    ]
    assert lines[3].startswith("10 ticks; time 10 in lockstep, 10.0% of it idle; 10 without")
    assert main(["merged", "1", "1", "2"]) == 0
    assert "rank 0  F0 B0    F1 B1    \n" in capsys.readouterr().out, "backward, then forward"
    assert main(["1f1b", "3", "2", "40"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert sum(line.count("Fb") for line in lines) == sum(line.count("Ba") for line in lines) == 120
    assert max(map(len, lines[1:-3])) <= 80, "in pieces as wide as the terminal"
    assert main([f"--plot={tmp_path / 'it.png'}", "merged", "2", "2", "4"]) == 0
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")
    assert main(["zero_bubble", "2"]) == 2 and main(["1f1b", "2", "1", "none"]) == 2
    assert "usage: python -m moejax.parallel.schedule" in capsys.readouterr().err
