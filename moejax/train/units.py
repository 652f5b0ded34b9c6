"""How quantities are written for a person: counts, bytes, rates and durations.

Three significant digits, the unit spelled out, and a dash for what is not known (None or NaN).
"""

import math

UNKNOWN = "–"


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _scaled(value: float, base: float, prefixes: tuple[str, ...]) -> tuple[str, str]:
    """(digits, prefix): 24_100_000 with base 1000 gives ("24.1", "M")."""
    power = 0
    while abs(value) >= base * 0.9995 and power < len(prefixes) - 1:
        value, power = value / base, power + 1
    if power == 0 and float(value).is_integer():
        return f"{value:.0f}", prefixes[0]
    decimals = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{decimals}f}", prefixes[power]


def count(value: float | None) -> str:
    """A number of things: `24.1 M`."""
    if value is None or not _known(value):
        return UNKNOWN
    return " ".join(_scaled(value, 1000, ("", "k", "M", "B", "T"))).strip()


def data_size(num_bytes: float | None) -> str:
    """Bytes in binary units: `1.92 GiB`."""
    if num_bytes is None or not _known(num_bytes):
        return UNKNOWN
    return " ".join(_scaled(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB")))


def flop_rate(flops_per_second: float | None) -> str:
    """FLOP/s: `535 GFLOP/s`."""
    if flops_per_second is None or not _known(flops_per_second):
        return UNKNOWN
    digits, prefix = _scaled(flops_per_second, 1000, ("", "k", "M", "G", "T", "P", "E"))
    return f"{digits} {prefix}FLOP/s"


def whole(value: float | None) -> str:
    """A whole number with separators: `12,430`."""
    return UNKNOWN if value is None or not _known(value) else f"{value:,.0f}"


def fixed(value: float | None, decimals: int) -> str:
    """A number with a fixed count of decimals, the minus sign typographic: `−0.338`."""
    if value is None or not _known(value):
        return UNKNOWN
    return f"{value:,.{decimals}f}".replace("-", "−")


def share(value: float | None) -> str:
    """A fraction in percent: `61 %`."""
    return UNKNOWN if value is None or not _known(value) else f"{100 * value:.0f} %"


def clock(seconds: float | None) -> str:
    """A time to go, short: `0:07`, `12:05`, `3:04:05`, `2 d 3:04:05`."""
    if seconds is None or not _known(seconds):
        return UNKNOWN
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if hours == 0:
        return f"{minute}:{second:02d}"
    return f"{f'{days} d ' if days else ''}{hour}:{minute:02d}:{second:02d}"


def duration(seconds: float | None) -> str:
    """A time that passed: `42.0 s`, `6 min 12 s`, `3 h 4 min`."""
    if seconds is None or not _known(seconds):
        return UNKNOWN
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours} h {minute} min" if hours else f"{minute} min {second} s"
