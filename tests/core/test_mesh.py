"""The fold: two readings of one grid, their common refinement, errors that show the way out."""

import dataclasses
from math import prod

import jax
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moejax.core.mesh import Fold, ParallelConfig, fold, fold_table, make_mesh

SIZES = st.sampled_from([1, 2, 3, 4])


def attention(pp=1, dp=1, cp=1, tp=1):
    return {"pp": pp, "dp": dp, "cp": cp, "tp": tp}


def experts(pp=1, edp=1, ep=1, etp=1):
    return {"pp": pp, "edp": edp, "ep": ep, "etp": etp}


def test_the_refinement_of_five_axes():
    grid = fold(attention(2, 4, 2, 2), experts(2, 2, 8, 1))
    assert grid.axes == (("pp", 2), ("dp_edp", 2), ("dp_ep", 2), ("cp_ep", 2), ("tp_ep", 2))
    assert grid["dp"] == ("dp_edp", "dp_ep")
    assert grid["ep"] == ("dp_ep", "cp_ep", "tp_ep")
    assert grid["etp"] == ()
    assert (grid.degree("ep"), grid.degree("etp")) == (8, 1)
    table = fold_table(grid)
    for role, degree in (("dp", 4), ("cp", 2), ("tp", 2), ("edp", 2), ("ep", 8), ("etp", 1)):
        lines = [line for line in table.split("\n") if role in line.split()]
        assert any(line.endswith(f"= {degree}") for line in lines), role


def test_strides_that_do_not_nest_name_the_nearest_that_do():
    with pytest.raises(ValueError) as caught:
        fold(attention(dp=3, tp=2), experts(ep=2, etp=3))
    text = str(caught.value)
    assert "dp=3, tp=2" in text and "ep=2, etp=3" in text and "\n" not in text
    assert "(ep=3, etp=2)" in text, "the swapped reading nests, and is the nearest"


def test_readings_of_different_sizes_are_refused():
    with pytest.raises(ValueError, match="covers 4 devices.*cover 8"):
        fold(attention(dp=4), experts(ep=8))


def test_zero_degrees_take_what_the_others_leave():
    readings = ParallelConfig(dp=0, tp=2, ep=4).readings(16)
    assert readings == (attention(dp=8, tp=2), experts(edp=4, ep=4))
    assert ParallelConfig(dp=2, tp=2, ep=2, etp=2).readings(999)[1] == experts(ep=2, etp=2)
    with pytest.raises(ValueError, match="experts reading.*the machine has 4"):
        ParallelConfig(dp=2, tp=2, ep=8).readings(16)


@pytest.mark.parametrize("bad", [{"tp": 0}, {"ep": -1}, {"zero": 2}, {"dp": -1}])
def test_impossible_degrees_are_refused(bad):
    (name,) = bad
    with pytest.raises(ValueError, match=f"parallel.{name}="):
        ParallelConfig(**bad)


def test_one_device_has_no_axes():
    grid = fold(attention(), experts())
    assert grid.axes == () and grid["ep"] == () and grid.degree("ep") == 1 and Fold()["tp"] == ()
    assert fold_table(grid) == "one device, no mesh"


def test_a_fold_larger_than_the_machine_is_refused():
    with pytest.raises(ValueError, match="needs 32 devices, this machine has 16"):
        make_mesh(fold(attention(dp=32), experts(ep=32)))


@given(pp=SIZES, dp=SIZES, cp=SIZES, tp=SIZES, edp=SIZES, ep=SIZES)
def test_each_mesh_axis_lies_in_one_axis_of_each_reading(pp, dp, cp, tp, edp, ep):
    assume(dp * cp * tp % (edp * ep) == 0)
    first, second = attention(pp, dp, cp, tp), experts(pp, edp, ep, dp * cp * tp // (edp * ep))
    try:
        grid = fold(first, second)
    except ValueError as error:
        assert "does not nest" in str(error)
        return
    world = prod(first.values())
    assert prod(size for _, size in grid.axes) == world
    ids = np.arange(world).reshape([size for _, size in grid.axes])
    for reading in (first, second):
        owned = [axis for role in reading for axis in grid[role]]
        assert owned == list(grid.all), "every axis once, in the order of the devices"
        assert [grid.degree(role) for role in reading] == list(reading.values())
        grouped = ids.reshape([grid.degree(role) for role in reading])
        assert (grouped == np.arange(world).reshape(list(reading.values()))).all()


def test_ep_is_cut_where_it_leaves_a_node():
    """ep=8 x etp=2 on nodes of 8: two nodes, in the order of the devices; the others see one ep."""
    whole = ParallelConfig(dp=4, tp=4, ep=8, etp=2)
    cut = fold(*dataclasses.replace(whole, node=8).readings(16))
    assert cut["ep_out"] == ("dp_ep_out",) and cut["ep_in"] == ("dp_ep_in", "tp_ep_in")
    assert cut["ep"] == cut["ep_out"] + cut["ep_in"] and cut.degree("ep") == 8
    assert cut["dp"] == ("dp_ep_out", "dp_ep_in") and cut["etp"] == ("tp_etp",)
    ids = np.arange(16).reshape([size for _, size in cut.axes])
    at = cut.all.index("dp_ep_out")
    assert [set(part.flat) for part in np.split(ids, 2, axis=at)] == [
        set(range(8)), set(range(8, 16)),
    ]  # fmt: skip
    assert "   = 8" in fold_table(cut)


@pytest.mark.parametrize("node", [0, 16, 32])
def test_ep_that_stays_in_a_node_is_not_cut(node):
    whole = ParallelConfig(dp=4, tp=4, ep=8, etp=2)
    grid = fold(*dataclasses.replace(whole, node=node).readings(16))
    assert grid == fold(attention(dp=4, tp=4), experts(ep=8, etp=2))
    assert grid["ep_out"] == () and grid["ep_in"] == grid["ep"]


def test_nodes_that_do_not_line_up_are_refused():
    with pytest.raises(ValueError, match=r"parallel.node=6: groups of ep=8 x etp=2 .* multiple of"):
        ParallelConfig(dp=16, ep=8, etp=2, node=6).readings(16)
    with pytest.raises(ValueError, match="nearest experts that do: .edp=12"):
        fold(*ParallelConfig(dp=4, tp=3, ep=12, node=4).readings(12))


def test_the_mesh_keeps_the_order_of_the_devices():
    grid = fold(attention(dp=4, tp=4), experts(edp=2, ep=4, etp=2))
    mesh = make_mesh(grid)
    assert mesh.axis_names == grid.all
    assert [d.id for d in mesh.devices.flat] == [d.id for d in jax.devices()[:16]]
