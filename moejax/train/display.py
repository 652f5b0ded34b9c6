"""What a person at the terminal sees of a run: facts, progress, and how it ended.

`Display` draws a live panel where stdout is a terminal, and prints one plain line every few seconds
where it is not (a CI log, a file). The panel is a progress bar, the loss, the speed, and the
balance of the experts: one small bar an expert, full height at twice its even share, for each MoE
layer while that fits, else one bar a layer for its busiest expert.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from moejax.train import units
from moejax.train.metrics import LogConfig

BARS = "▁▂▃▄▅▆▇█"
LABEL_WIDTH = 8
MAX_LAYER_ROWS = 4
# Shown where they are not 0.
COUNTED = {"dropped": "dropped", "skipped": "skipped", "idle": "idle experts"}


def bars(ratios: Sequence[float | None]) -> str:
    """One bar a ratio to the even share: half height at 1, full height from 2 on, a dot at 0."""
    return "".join(
        "·" if not ratio or ratio != ratio else BARS[min(7, max(0, round(ratio * 4) - 1))]
        for ratio in ratios
    )


class Display:
    """Shows one training run of `num_steps` steps, resumed after `start_step` of them.

    A context manager: the live panel stands between enter and exit; `header` is called before,
    `summary` after. A process that shall be silent passes `Console(quiet=True)`.
    """

    def __init__(
        self,
        num_steps: int,
        config: LogConfig | None = None,
        *,
        start_step: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_steps = num_steps
        self._every_s = (config or LogConfig()).print_every_s
        self._start_step = start_step
        self._console = console or Console(highlight=False)
        self._clock = clock
        self._step = start_step
        self._record: Mapping[str, Any] = {}
        self._load: Sequence[Sequence[float]] = ()
        self._evaluations: dict[str, tuple[int, float]] = {}
        self._first: tuple[int, float] | None = None
        self._step_at = 0.0
        self._printed_at: float | None = None
        self._live: Live | None = None

    def header(self, facts: Mapping[str, Any]) -> None:
        """Prints what is known before the first step: model, machine, memory, the fold's table.

        `facts` has the names of `facts.json`; what it lacks is left out.
        """
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for label, text in _facts(facts):
            table.add_row(label, Text(text))
        self._console.print(Padding(table, (0, 0, 0, 1)))
        if facts.get("fold_table"):
            self._console.print()
            # A table is read in columns: clipping it at the window's edge keeps them, folding does
            # not. In a log nothing is clipped.
            fold_table = Text(str(facts["fold_table"]).rstrip("\n"), no_wrap=True)
            clipped = self._console.is_terminal
            self._console.print(fold_table, overflow="crop", crop=clipped, soft_wrap=not clipped)
        self._console.print()

    def step(self, record: Mapping[str, Any]) -> None:
        """Shows the record of a step that has ended."""
        now = self._clock()
        self._step = int(record["step"])
        self._record = record
        self._step_at = now
        moe = record.get("moe") or {}
        if "load" in moe:
            self._load = [list(map(float, row)) for row in moe["load"]]
        first = self._first is None
        if self._first is None:
            self._first = (self._step, now)
        if self._live is not None:
            return
        due = self._printed_at is None or now - self._printed_at >= self._every_s
        if first or due or self._step >= self._num_steps:
            self._printed_at = now
            self._console.print(self._line(), soft_wrap=True, markup=False)

    def evaluation(self, step: int, val_loss: float, name: str) -> None:
        """Shows the loss (nats per token) of evaluation set `name` after `step` steps."""
        # A new dict, not a new key: the live panel may be walking the old one in its own thread.
        self._evaluations = {**self._evaluations, name: (step, float(val_loss))}
        if self._live is None:
            self._console.print(
                f"step {step}: {name} loss {val_loss:.4f}", soft_wrap=True, markup=False
            )

    def note(self, text: str) -> None:
        """Prints a line that stays: a checkpoint, a skipped step, a signal."""
        self._console.print(text, soft_wrap=True, markup=False)

    def summary(self, facts: Mapping[str, Any], report: Path | None = None) -> None:
        """Prints how the run ended: losses, the trigram baseline, time, memory, the report."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for label, text in self._outcome(facts):
            table.add_row(label, Text(text))
        if report is not None:
            table.add_row("report", Text(str(report)))
        self._console.print()
        self._console.print(Padding(table, (0, 0, 0, 1)))

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.quiet:
            self._live = Live(
                console=self._console,
                get_renderable=self.render,
                refresh_per_second=4,
                transient=False,
            )
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def render(self) -> RenderableType:
        """The panel as it stands; never wider than the terminal."""
        width = self._console.width
        top = Table.grid(expand=True, padding=(0, 1))
        top.add_column(no_wrap=True)
        top.add_column(ratio=1)
        top.add_column(justify="right", no_wrap=True)
        top.add_column(justify="right", no_wrap=True)
        top.add_row(
            Text(f" step {self._step:,}/{self._num_steps:,}", style="bold"),
            ProgressBar(
                total=max(self._num_steps, 1),
                completed=self._step,
                complete_style="blue",
                finished_style="blue",
            ),
            f"{100 * self._step / max(self._num_steps, 1):.0f} %",
            Text(f"{units.clock(self._eta_s())} left ", style="dim"),
        )
        if not self._record:
            return Group(top, Text(" compiling the first step", style="dim"))
        return Group(top, *self._figures(), *self._balance(width))

    def _figures(self) -> list[Text]:
        record = self._record
        quality = [("loss", units.fixed(record.get("loss"), 3))]
        for name, (step, loss) in self._evaluations.items():
            quality.append((name, f"{units.fixed(loss, 3)} at {step:,}"))
        quality.append(("lr", _short(record.get("lr"))))
        quality.append(("grad norm", units.fixed(record.get("grad_norm"), 2)))
        speed = [("tokens/s", units.whole(record.get("tokens_per_second")))]
        if record.get("matmul_share") is not None:
            speed.append(("of matmul peak", units.share(record["matmul_share"])))
        if record.get("imbalance") is not None:
            speed.append(("experts max/mean", units.fixed(record["imbalance"], 2)))
        for name, label in COUNTED.items():
            if record.get(name):
                speed.append((label, units.whole(record[name])))
        return [_pairs(quality), _pairs(speed)]

    def _balance(self, width: int) -> list[Text]:
        """Bars an expert for each layer, as many layers a row as fit; else one bar a layer."""
        if not self._load:
            return []
        ratios = [[share * len(row) for share in row] for row in self._load]
        busiest = [max(row) for row in ratios]
        cell = len(ratios[0]) + LABEL_WIDTH + 3
        per_row = (width - 1) // cell
        num_rows = -(-len(ratios) // per_row) if per_row else MAX_LAYER_ROWS + 1
        if num_rows > MAX_LAYER_ROWS:
            worst = max(range(len(busiest)), key=busiest.__getitem__)
            text = Text(f" busiest expert {busiest[worst]:.2f}, layer {worst}  ", no_wrap=True)
            # Neighbouring layers share a bar where there are more layers than columns.
            span = -(-len(busiest) // max(1, width - 1 - len(text)))
            groups = range(0, len(busiest), span)
            text.append(bars([max(busiest[i : i + span]) for i in groups]), style="cyan")
            return [text]
        lines = []
        for start in range(0, len(ratios), per_row):
            line = Text(no_wrap=True)
            for layer in range(start, min(start + per_row, len(ratios))):
                line.append(f" {layer:>3} ", style="dim")
                line.append(bars(ratios[layer]), style="cyan")
                line.append(f" {busiest[layer]:<5.2f}")
            lines.append(line)
        return [Text(" expert load by layer, and its max/mean", style="dim"), *lines]

    def _line(self) -> str:
        record = self._record
        parts = [f"{self._step}/{self._num_steps}", f"loss {_plain(record.get('loss'), 3)}"]
        for name, (_, loss) in self._evaluations.items():
            parts.append(f"{name} {_plain(loss, 3)}")
        parts.append(f"{units.whole(record.get('tokens_per_second'))} tok/s")
        if record.get("matmul_share") is not None:
            parts.append(f"{100 * record['matmul_share']:.0f}% peak")
        if record.get("imbalance") is not None:
            parts.append(f"max/mean {_plain(record['imbalance'], 2)}")
        for name, label in COUNTED.items():
            if record.get(name):
                parts.append(f"{label} {record[name]}")
        eta_s = self._eta_s()
        if eta_s is not None:
            parts.append(f"{units.clock(eta_s)} left")
        return "  ".join(parts)

    def _eta_s(self) -> float | None:
        """Seconds to go, from the steps after the first shown one (which holds the compile)."""
        if self._step >= self._num_steps:
            return 0.0
        if self._first is None or self._step <= self._first[0]:
            return None
        rate_s = (self._step_at - self._first[1]) / (self._step - self._first[0])
        return rate_s * (self._num_steps - self._step)

    def _outcome(self, facts: Mapping[str, Any]) -> list[tuple[str, str]]:
        rows = [("steps", f"{self._step:,} of {self._num_steps:,}")]
        if self._record:
            rows.append(("train loss", f"{units.fixed(self._record.get('loss'), 3)} nats/token"))
        trigram = facts.get("trigram_val_loss")
        for name, (_, loss) in self._evaluations.items():
            text = f"{loss:.3f} nats/token"
            if trigram is not None:
                side = "below" if loss < trigram else "above"
                text += f", {abs(trigram - loss):.3f} {side} the trigram baseline ({trigram:.3f})"
            rows.append((f"{name} loss", text))
        if facts.get("wall_seconds") is not None:
            rows.append(("wall time", units.duration(facts["wall_seconds"])))
        if facts.get("peak_rss_bytes") is not None:
            rows.append(("peak memory", units.data_size(facts["peak_rss_bytes"])))
        return rows


def _facts(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    if facts.get("num_params") is not None:
        text = f"{units.count(facts['num_params'])} parameters"
        if facts.get("active_params") not in (None, facts["num_params"]):
            text += f", {units.count(facts['active_params'])} of them active for a token"
        rows.append(("model", text))
    if facts.get("device") is not None:
        num_devices = facts.get("num_devices", 1)
        text = f"{num_devices} x {facts['device']}" if num_devices != 1 else str(facts["device"])
        if facts.get("dense_matmul_flops_per_second") is not None:
            rate = units.flop_rate(facts["dense_matmul_flops_per_second"])
            text += f", dense matmul measured at {rate}"
        rows.append(("machine", text))
    if facts.get("step_memory_bytes") is not None:
        rows.append(
            ("memory", f"{units.data_size(facts['step_memory_bytes'])} for the compiled step")
        )
    if facts.get("tokenizer_vocab") is not None:
        rows.append(("tokenizer", f"{facts['tokenizer_vocab']:,} tokens"))
    if facts.get("train_tokens") is not None:
        rows.append(("data", f"{units.count(facts['train_tokens'])} tokens to train on"))
    if facts.get("trigram_val_loss") is not None:
        rows.append(("to beat", f"{facts['trigram_val_loss']:.3f} nats/token, a trigram model"))
    return rows


def _pairs(pairs: Sequence[tuple[str, str]]) -> Text:
    line = Text(" ")
    for name, value in pairs:
        line.append(f"{name} ", style="dim")
        line.append(f"{value}   ")
    line.rstrip()
    return line


def _short(value: float | None) -> str:
    return units.UNKNOWN if value is None else f"{value:.1e}"


def _plain(value: float | None, decimals: int) -> str:
    """ASCII digits, for logs."""
    return "nan" if value is None else f"{value:.{decimals}f}"
