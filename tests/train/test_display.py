"""What the terminal shows: the right figures, within its width, and plain lines in a log."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from moejax.train import units
from moejax.train.display import Display, bars
from moejax.train.metrics import LogConfig

FACTS = {
    "num_params": 24_123_456,
    "active_params": 9_812_345,
    "device": "cpu",
    "num_devices": 8,
    "fold_table": "            pp  dp_edp   dp_ep\nmesh         1       2       4\n",
    "step_memory_bytes": 640 * 2**20,
    "peak_rss_bytes": 2 * 2**30,
    "trigram_val_loss": 3.552,
    "dense_matmul_flops_per_second": 2.35e11,
    "wall_seconds": 372,
}


def console(width: int, *, terminal: bool) -> Console:
    return Console(
        width=width, force_terminal=terminal, file=io.StringIO(), highlight=False, color_system=None
    )


def record(step: int, layers: int = 6, experts: int = 16) -> dict:
    load = np.full((layers, experts), 1 / experts)
    load[1, 0], load[1, 1] = 2 / experts, 0.0
    scalars = {"loss": 4.2131, "grad_norm": 0.81, "lr": 2.9e-4, "tokens_per_second": 12430.0}
    scalars |= {"matmul_share": 0.61, "imbalance": 1.25, "dropped": 0, "skipped": 2, "idle": 0}
    return {"step": step, **scalars, "moe": {"load": load}}


def panel(display: Display, target: Console) -> list[str]:
    with target.capture() as capture:
        target.print(display.render())
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capture.get()).splitlines()


@pytest.mark.parametrize(("layers", "experts"), [(6, 16), (2, 8), (48, 128), (100, 256)])
@pytest.mark.parametrize("width", [80, 60, 200])
def test_the_panel_fits_its_width_and_has_the_figures(
    layers: int, experts: int, width: int
) -> None:
    target, now = console(width, terminal=True), [0.0]
    display = Display(2000, console=target, clock=lambda: now[0])
    display.step(record(600, layers, experts))
    now[0] = 40.0
    display.evaluation(600, 4.35, "val")
    display.step(record(620, layers, experts) | {"idle": 3})
    lines = panel(display, target)
    assert max(map(len, lines)) <= width and len(lines) <= 8
    text = " ".join(lines)
    for part in ("620/2,000", "31 %", "46:00 left", "loss 4.213", "4.350 at 600", "12,430"):
        assert part in text
    assert "61 %" in text and "1.25" in text and "skipped 2" in text and "dropped" not in text
    assert "idle experts 3" in text
    assert "2.00" in text  # layer 1's busiest expert has twice its share


def test_one_bar_an_expert_while_there_is_room() -> None:
    target = console(80, terminal=True)
    display = Display(10, console=target)
    display.step(record(5, layers=3, experts=4))
    line = panel(display, target)[-1]
    assert "  0 ▄▄▄▄ 1.00" in line and "  1 █·▄▄ 2.00" in line


@pytest.mark.parametrize(("layers", "num_bars"), [(48, 48), (60, 30), (100, 34)])
def test_one_bar_a_layer_or_few_layers_where_experts_do_not_fit(layers: int, num_bars: int) -> None:
    target = console(80, terminal=True)
    display = Display(10, console=target)
    display.step(record(5, layers=layers, experts=128))
    line = panel(display, target)[-1]
    assert "busiest expert 2.00, layer 1 " in line
    drawn = line.split()[-1]
    even = num_bars - 1
    assert drawn == ("▄█" + "▄" * (even - 1) if num_bars == layers else "█" + "▄" * even)


def test_bars_show_the_ratio() -> None:
    assert bars([0.0, 0.25, 1.0, 2.0, 9.0, None, float("nan")]) == "·▁▄██··"


def test_a_log_gets_plain_lines_every_few_seconds() -> None:
    target, now = console(80, terminal=False), [0.0]
    with Display(100, LogConfig(print_every_s=10), console=target, clock=lambda: now[0]) as display:
        for step in range(1, 101):
            display.step(record(step))
            if step == 50:
                display.evaluation(50, 4.35, "val")
            now[0] += 1.0
    text = target.file.getvalue()
    lines = text.splitlines()
    assert "\x1b" not in text and text.isascii()
    shown = [line.split("/")[0] for line in lines if "/100 " in line]
    assert shown == ["1", "11", "21", "31", "41", "51", "61", "71", "81", "91", "100"]
    assert "step 50: val loss 4.3500" in lines
    assert "val 4.350" in lines[6] and "loss 4.213" in lines[6] and "0:49 left" in lines[6]


@pytest.mark.parametrize("terminal", [True, False])
def test_header_and_summary_at_80_columns(terminal: bool) -> None:
    target = console(80, terminal=terminal)
    display = Display(2000, console=target)
    display.header(FACTS)
    with display:
        display.step(record(2000))
        display.evaluation(2000, 3.25, "val")
    display.summary(FACTS, Path("runs/[red]demo/report.html"))
    text = target.file.getvalue()
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).splitlines()
    assert max(map(len, lines)) <= 80 + (0 if terminal else 10)
    for part in ("24.1 M parameters, 9.81 M", "8 x cpu", "235 GFLOP/s", "640 MiB", "dp_edp"):
        assert part in text
    for part in ("0.302 below the trigram baseline (3.552)", "6 min 12 s", "2.00 GiB", "[red]demo"):
        assert part in text


def test_a_live_run_in_a_terminal_leaves_its_last_panel() -> None:
    target = console(80, terminal=True)
    with Display(3, console=target) as display:
        for step in (1, 2, 3):
            display.step(record(step))
        display.note("saved a checkpoint")
    text = target.file.getvalue()
    assert "saved a checkpoint" in text and "step 3/3" in text and "100 %" in text


def test_missing_values_show_as_unknown() -> None:
    target = console(80, terminal=True)
    display = Display(10, console=target)
    display.header({})
    assert "compiling" in " ".join(panel(display, target))
    display.step({"step": 1, "loss": float("nan"), "tokens_per_second": None, "lr": None})
    assert "loss –" in " ".join(panel(display, target))
    display.summary({})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.count(24_123_456), "24.1 M"),
        (units.count(999), "999"),
        (units.count(999_960), "1.00 M"),
        (units.data_size(1536), "1.50 KiB"),
        (units.data_size(0), "0 B"),
        (units.flop_rate(5.35e11), "535 GFLOP/s"),
        (units.fixed(-0.3384, 3), "−0.338"),
        (units.share(0.614), "61 %"),
        (units.clock(59.6), "1:00"),
        (units.clock(90_061), "1 d 1:01:01"),
        (units.duration(59.97), "1 min 0 s"),
        (units.duration(11_040), "3 h 4 min"),
        (units.whole(float("nan")), "–"),
    ],
)
def test_quantities_as_written_for_a_person(text: str, expected: str) -> None:
    assert text == expected
