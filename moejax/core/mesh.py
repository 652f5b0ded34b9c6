"""One grid of devices, read twice (parallel folding).

Attention reads the devices as (pp, dp, cp, tp), slowest first; the experts read the same
devices, in the same order, as (pp, edp, ep, etp). The mesh is the *common refinement* of the two
readings: put the axis boundaries of both on one ruler; the pieces between neighbouring cuts are
the mesh axes. Each lies inside exactly one axis of each reading and is named after the pair
(`dp_ep`, `tp_ep`). A *role* (`tp`, `ep`, ...) is then a tuple of mesh axes, `()` at degree 1, and
collectives take the tuple: no code asks `if ep > 1`.

Outsiders need: `ParallelConfig`, `Fold`, `fold`, `make_mesh`, `fold_table`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import log, prod
from operator import mul

import jax
from jax.sharding import AxisType, Mesh

ATTENTION = ("pp", "dp", "cp", "tp")
EXPERTS = ("pp", "edp", "ep", "etp")
Reading = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """Degrees of the two readings, and how weights rest."""

    dp: int = 1
    """Data-parallel degree of attention; 0: all devices that the other degrees leave."""
    tp: int = 1
    """Tensor-parallel degree (with sequence parallelism between) of attention and dense MLPs."""
    ep: int = 1
    """Expert-parallel degree: the experts are split over so many devices."""
    etp: int = 1
    """Tensor-parallel degree inside each expert."""
    edp: int = 0
    """Data-parallel degree of the experts; 0: all devices that ep and etp leave."""
    zero: int = 1
    """ZeRO stage. 0: weights and optimizer state replicated over data-parallel ranks; 1: both
    rest sharded, weights gathered once a step; 3: gathered again where each layer starts."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, low = getattr(self, field.name), int(field.name not in ("dp", "edp", "zero"))
            if value < low:
                raise ValueError(f"parallel.{field.name}={value} is below {low}")
        if self.zero not in (0, 1, 3):
            raise ValueError(f"parallel.zero={self.zero}: choose 0, 1 or 3")

    def readings(self, num_devices: int) -> tuple[dict[str, int], dict[str, int]]:
        """Returns the attention and the expert reading of `num_devices`, degrees of 0 filled in.

        Raises ValueError when the degrees cannot cover the devices.
        """
        world = self.dp * self.tp or num_devices
        dp, edp = world // self.tp, self.edp or world // (self.ep * self.etp)
        attention = {"pp": 1, "dp": dp, "cp": 1, "tp": self.tp}
        experts = {"pp": 1, "edp": edp, "ep": self.ep, "etp": self.etp}
        for name, reading in (("attention", attention), ("experts", experts)):
            if prod(reading.values()) != world:
                raise ValueError(
                    f"the {name} reading {_shown(reading)} covers {prod(reading.values())} "
                    f"devices, the other reading or the machine has {world}: change a degree "
                    f"(dp=0 and edp=0 fill in what the others leave)"
                )
        return attention, experts

    def num_devices(self) -> int:
        """The devices that the degrees ask for; 0 where dp leaves that to the machine."""
        return self.dp * self.tp


@dataclasses.dataclass(frozen=True)
class Fold:
    """Mesh axes and roles of a folded grid; `Fold()` is one device with no mesh.

    Hashable: modules keep it as a static attribute. `fold[role]` is a tuple of mesh axes.
    """

    axes: tuple[tuple[str, int], ...] = ()
    roles: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __getitem__(self, role: str) -> tuple[str, ...]:
        return dict(self.roles).get(role, ())

    @property
    def all(self) -> tuple[str, ...]:
        """Every mesh axis, slowest first."""
        return tuple(name for name, _ in self.axes)

    @property
    def batch(self) -> tuple[str, ...]:
        """The axes over which tokens enter: rows over dp, length over cp."""
        return self["dp"] + self["cp"]

    @property
    def tokens(self) -> tuple[str, ...]:
        """The axes over which the tokens of a residual stream are split: dp, cp, tp."""
        return self.batch + self["tp"]

    def degree(self, role: str) -> int:
        """The number of devices along a role."""
        sizes = dict(self.axes)
        return prod(sizes[axis] for axis in self[role])


def _shown(reading: Reading) -> str:
    return "(" + ", ".join(f"{role}={n}" for role, n in reading.items() if n > 1) + ")"


def _ends(reading: Reading) -> list[int]:
    return list(accumulate(list(reading.values())[::-1], mul))


def _strides(reading: Reading) -> list[int]:
    """Device strides at which the reading's axes begin and end: 1 .. number of devices."""
    return [1, *_ends(reading)]


def _role_at(reading: Reading, stride: int) -> str:
    """The role whose axis covers the devices `stride` apart."""
    roles = list(reading)[::-1]
    return next(
        role for role, end in zip(roles, _ends(reading), strict=True) if stride < end
    )


def _cuts(attention: Reading, experts: Reading) -> list[int]:
    return sorted({*_strides(attention), *_strides(experts)}, reverse=True)


def _nests(attention: Reading, experts: Reading) -> bool:
    return all(outer % inner == 0 for outer, inner in pairwise(_cuts(attention, experts)))


def _nearest(attention: Reading, experts: Reading) -> list[Reading]:
    """Expert readings that nest with `attention`, nearest (in log degrees) first."""
    per_stage = prod(experts.values()) // experts["pp"]
    sizes = [n for n in range(1, per_stage + 1) if per_stage % n == 0]
    found = [
        {**experts, "edp": edp, "ep": ep, "etp": per_stage // edp // ep}
        for edp in sizes
        for ep in sizes
        if per_stage % (edp * ep) == 0
    ]
    found = [reading for reading in found if _nests(attention, reading)]
    return sorted(found, key=lambda r: sum(abs(log(r[k] / experts[k])) for k in experts))


def fold(attention: Reading, experts: Reading) -> Fold:
    """Returns the common refinement of the two readings (role -> degree, slowest first).

    Raises ValueError when they cover different device counts, or when their strides do not nest;
    the message then names the nearest expert readings that do.
    """
    if prod(attention.values()) != prod(experts.values()):
        raise ValueError(
            f"attention {_shown(attention)} covers {prod(attention.values())} devices, "
            f"experts {_shown(experts)} cover {prod(experts.values())}"
        )
    if not _nests(attention, experts):
        near = " or ".join(_shown(reading) for reading in _nearest(attention, experts)[:2])
        raise ValueError(
            f"the fold of attention {_shown(attention)} and experts {_shown(experts)} does not "
            f"nest (a device stride of one does not divide the other's); nearest experts that "
            f"do: {near}"
        )
    axes: dict[str, int] = {}
    roles: dict[str, tuple[str, ...]] = {role: () for role in (*attention, *experts)}
    for outer, inner in pairwise(_cuts(attention, experts)):
        owners = dict.fromkeys((_role_at(attention, inner), _role_at(experts, inner)))
        name = "_".join(owners)
        axes[name] = outer // inner
        for role in owners:
            roles[role] += (name,)
    return Fold(tuple(axes.items()), tuple(roles.items()))


def make_mesh(folded: Fold, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh of a fold over `devices` (default: the first ones of `jax.devices()`).

    One device gets an axis that no role has, for a mesh without axes does not know its device.
    Raises ValueError when there are fewer devices than the fold has.
    """
    names, sizes = folded.all or ("one",), [size for _, size in folded.axes] or [1]
    devices = jax.devices() if devices is None else devices
    if len(devices) < prod(sizes):
        raise ValueError(f"the fold needs {prod(sizes)} devices, this machine has {len(devices)}")
    return jax.make_mesh(
        sizes, names, devices=devices[: prod(sizes)], axis_types=(AxisType.Auto,) * len(sizes)
    )


def fold_table(folded: Fold) -> str:
    """Returns the fold as text: a column a mesh axis, a row a role of each reading."""
    if not folded.axes:
        return "one device, no mesh"
    width = max(9, *(len(name) + 2 for name in folded.all))
    head = "".join(f"{name:>{width}}" for name in folded.all)
    lines = [f"{'':17}{head}", f"{'mesh':17}" + "".join(f"{n:{width}}" for _, n in folded.axes)]
    for reading, roles in (("attention", ATTENTION), ("experts", EXPERTS)):
        for i, role in enumerate(roles):
            cells = [role if axis in folded[role] else "." for axis in folded.all]
            row = "".join(f"{cell:>{width}}" for cell in cells)
            lines.append(f"{'' if i else reading:11}{role:6}{row}   = {folded.degree(role)}")
    return "\n".join(lines)
