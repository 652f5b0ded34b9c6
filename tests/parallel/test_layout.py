"""Layout strings: those of published recipes, what is refused and where, even layouts, slots."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.parallel.layout import Layout, Stage, balanced, parse, place

V3 = (61, 1)


@pytest.mark.parametrize(
    ("text", "model", "pp", "vpp"),
    [
        ("Et*3|(tt|)*29,m|L", V3, 16, 2),
        ("Et*3|(tt|)*29m|L", V3, 8, 4),
        ("Et*4|(tttt|)*14tmL", V3, 4, 4),
        ("Et|(tt|)*30L", (61, 0), 16, 2),
        ("Et|(tt|)*30mL", V3, 16, 2),
        ("E|, |(t |)*2 (mL)", (2, 1), 5, 1),
        ("EtL", (1, 0), 1, 1),
    ],
)
def test_published_layouts_read_and_written(text, model, pp, vpp):
    layout = parse(text, *model, pp, vpp)
    assert layout == parse(text, *model, pp, 0) == parse(str(layout), *model, pp, vpp)
    assert (len(layout.stages), layout.num_chunks) == (pp * vpp, vpp)
    assert [i for s in layout.stages for i in s.layers] == list(range(model[0]))
    assert [i for s in layout.stages for i in s.mtp] == list(range(model[1]))
    assert [s.embed for s in layout.stages] == [True] + [False] * (pp * vpp - 1)
    assert [s.loss for s in layout.stages] == [False] * (pp * vpp - 1) + [True]


def test_a_layout_by_hand():
    layout = parse("Et*3|(tt|)*2t|m|L", 8, 1, 3, 2)
    assert layout.stages == (
        Stage(embed=True, layers=(0, 1, 2)),
        Stage(layers=(3, 4)),
        Stage(layers=(5, 6)),
        Stage(layers=(7,)),
        Stage(mtp=(0,)),
        Stage(loss=True),
    )
    assert layout.stage(1, 0) == Stage(layers=(3, 4)) and layout.stage(1, 1) == Stage(mtp=(0,))
    assert str(layout) == "Et*3|(tt|)*2t|m|L"
    assert str(parse("E|,|||t,*1L", 1, 0, 5)) == "E||*3tL", "empty stages"


@pytest.mark.parametrize(
    ("text", "at", "why"),
    [
        ("Et x", 3, "'x' is none of E t m L"),
        ("E(t|tL", 1, "not closed"),
        ("Et)*2L", 2, "closes none"),
        ("Et*L", 2, "needs a number"),
        ("Et*0L", 3, "zero repeats"),
        ("*3L", 0, "nothing before"),
        ("E(t*2)*2*2L", 8, "nothing before"),
        ("Et*99999999L", 3, "more than 100000"),
        ("tL", 0, "E (embedding) is missing"),
        ("tEL", 1, "E must be the first"),
        ("|EtL", 1, "E must be the first"),
        ("Et|EtL", 3, "a second E"),
        ("Et|", 3, "L (loss) is missing"),
        ("EtL|", 2, "L must be in the last stage"),
        ("Et|LtL", 5, "a second L"),
        ("Et|Lt", 4, "this t comes after L"),
        ("EtLm", 3, "this m comes after L"),
        ("Em|tL", 1, "before the last t"),
        ("Et|m|mL", 5, "keep all m together"),
    ],
)
def test_a_caret_points_at_the_fault(text, at, why):
    with pytest.raises(ValueError) as caught:
        parse(text, 1, 0, 1)
    message, line, caret = str(caught.value).split("\n")
    assert why in message
    assert line == " " * 4 + text and caret == " " * (4 + at) + "^"


@pytest.mark.parametrize(
    ("text", "model", "pp", "vpp", "says"),
    [
        ("Et|(tt|)*29L", (61, 0), 31, 1, "59 layers instead of 61: add 2 t"),
        ("Et*4|L", (3, 0), 2, 1, "4 layers instead of 3: take out 1 t"),
        ("EtmL", (1, 0), 1, 1, "1 MTP modules instead of 0: take out 1 m"),
        ("Et|t|L", (2, 0), 2, 0, "3 stages, no multiple of pp=2: write 2 or 4 stages"),
        ("Et|t|t|L", (3, 0), 2, 1, "4 stages, that is 2 chunks on each of 2 ranks, not vpp=1"),
    ],
)
def test_what_does_not_fit_says_by_how_much(text, model, pp, vpp, says):
    with pytest.raises(ValueError) as caught:
        parse(text, *model, pp, vpp)
    assert says in str(caught.value) and text in str(caught.value)


@given(st.integers(1, 70), st.integers(0, 3), st.integers(1, 8), st.integers(1, 4))
def test_layers_are_spread_evenly(num_layers, mtp_depth, pp, vpp):
    layout = balanced(num_layers, mtp_depth, pp, vpp)
    assert parse(str(layout), num_layers, mtp_depth, pp, vpp) == layout
    assert vpp > 1 or balanced(num_layers, mtp_depth, pp, 0) == layout
    *others, last = layout.stages
    weights = [len(s.layers) for s in others]
    if others:
        assert len(last.mtp) == mtp_depth and max(weights) - min(weights) <= 1
        each = (num_layers + mtp_depth) // (pp * vpp)
        assert len(last.layers) + mtp_depth == max(each, mtp_depth)
        if mtp_depth <= each:
            weights.append(each)
            assert max(weights) - min(weights) <= 1
            assert weights[0] == each or min(weights[:-1]) == each + 1


def test_the_first_and_the_last_stage_have_the_fewer():
    sizes = [[len(s.layers) for s in balanced(n, 0, 4).stages] for n in (2, 5, 6, 7, 8)]
    assert sizes == [[0, 1, 1, 0], [1, 1, 2, 1], [1, 2, 2, 1], [2, 2, 2, 1], [2, 2, 2, 2]]


def test_units_rest_in_slots():
    layout = parse("Et*3|t|tt|ttL", 8, 0, 2, 2)
    placement = place(layout, ((("D",), 3), (("M",), 1), (("m", "M"), 2)))
    dense, sparse, pairs = placement.units
    assert all(units.dtype == np.int32 for units in placement.units)
    np.testing.assert_array_equal(dense, [[0, 1, 2], [-1, -1, -1]])
    np.testing.assert_array_equal(sparse, [[-1], [0]])
    np.testing.assert_array_equal(pairs, [[0], [1]])
    assert placement.chunks == (
        (((0, 0), (0, 1), (0, 2)), ((2, 0),)),
        (((1, 0),), ((2, 0),)),
    )


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_every_layer_runs_once_and_in_order(sizes, pp, vpp, random):
    stacks = [("abc"[:width], count) for width, count in sizes]
    widths = [width for width, count in sizes for _ in range(count)]
    cuts = sorted(random.randrange(len(widths) + 1) for _ in range(pp * vpp - 1))
    counts = np.split(widths, cuts)
    layers = iter(range(sum(widths)))
    stages = [tuple(next(layers) for _ in range(int(own.sum()))) for own in counts]
    layout = Layout(
        tuple(Stage(i == 0, own, (), i == pp * vpp - 1) for i, own in enumerate(stages)), pp
    )
    placement = place(layout, stacks)
    ran = []
    for i in range(pp * vpp):
        for stack, slot in placement.chunks[i % pp][i // pp]:
            unit = placement.units[stack][i % pp, slot]
            start = sum(len(kinds) * count for kinds, count in stacks[:stack])
            width = len(stacks[stack][0])
            ran.append(tuple(range(start + unit * width, start + (unit + 1) * width)))
    assert [layer for unit in ran for layer in unit] == list(range(sum(widths)))
    for units, (_, count) in zip(placement.units, stacks, strict=True):
        assert sorted(units[units >= 0]) == list(range(count))
        assert (units >= 0).sum(1).max() == units.shape[1]


def test_a_unit_may_not_be_cut():
    with pytest.raises(
        ValueError, match=r"1 begins with layer 4, .*'mM': its 2 layers, 3 to 4, mu"
    ):
        place(balanced(7, 0, 2), (("D", 3), ("mM", 2)))
    with pytest.raises(ValueError, match="stacks hold 6 layers, the pipeline layout 7"):
        place(balanced(7, 0, 2), (("D", 6),))
    with pytest.raises(ValueError, match="stacks hold 6 layers, not 7"):
        balanced(7, 0, 2, 1, (("D", 6),))


@pytest.mark.parametrize(
    ("stacks", "pp", "vpp", "sizes"),
    [
        ((("mM", 18),), 4, 1, [8, 10, 10, 8]),
        ((("mM", 12),), 5, 1, [4, 4, 6, 6, 4]),
        ((("D", 3), ("mM", 2)), 2, 1, [3, 4]),
        ((("D", 3), ("M", 5)), 2, 2, [2, 2, 2, 2]),
        ((("mmmmmM", 4),), 4, 2, [0, 0, 0, 6, 6, 6, 6, 0]),
    ],
)
def test_even_layouts_keep_units_whole(stacks, pp, vpp, sizes):
    layout = balanced(sum(len(kinds) * count for kinds, count in stacks), 0, pp, vpp, stacks)
    place(layout, stacks)
    assert [len(stage.layers) for stage in layout.stages] == sizes
