"""The parts a report's page is built from, as HTML text. Titles and values are escaped here."""

from collections.abc import Iterable, Sequence
from html import escape

from moejax.train.report.charts import Series


def section(title: str, note: str, content: str) -> str:
    """A card with a heading; nothing where there is no content. `content` is HTML."""
    if not content:
        return ""
    return (
        f'<section class="card"><h2>{escape(title)}<small>{escape(note)}</small></h2>'
        f"{content}</section>"
    )


def folded(title: str, content: str) -> str:
    """A card that shows its title, and its HTML content on a click."""
    return f'<details class="card"><summary>{escape(title)}</summary>{content}</details>'


def legend(series: Sequence[Series]) -> str:
    """The key to a chart's curves, for those that have a label."""
    items = "".join(
        f'<li class="{s.kind}" style="--c:{escape(s.color, quote=True)}">{escape(s.label)}</li>'
        for s in series
        if s.label
    )
    return f'<ul class="legend">{items}</ul>'


def key_values(rows: Iterable[tuple[str, str]]) -> str:
    """A table of two columns."""
    body = "".join(
        f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in rows
    )
    return f'<table class="keys">{body}</table>'
