"""A traced function in two parts: what somebody waits for, and what can be done later.

The backward of a layer gives the gradient of its input, which the stage before waits for, and those
of its weights, which nobody does before the optimizer ("zero bubble": Qi et al. 2024). Both come
out of one traced program, y = x w giving dx = dy w^T and dw = x^T dy. The first part is all that dx
depends on; the second what else dw does. What crosses between them (dy; x, where the layer is
computed again) is given by the first part, to be kept. Not kept is what the second part has anyway
(weights, what the forward saved), what follows from weights and stream alone (a weight gathered or
cast, a mask), and what is a mere view of something else that is kept.

Where cheap arithmetic makes one array of two that would cross (an activation; the sum that is the
gradient of a norm's scale), the first part does it. So nothing costly is computed twice, with one
exception: a value that is equal on several devices (the psum of a statistic) is not kept, as
buffers hold what varies over all axes; the second part makes it again.

Outsiders need: `split`, `Split`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

CALLS = {
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
"""Equations that stand for others, which are taken apart one by one; by the name of their body."""
VIEWS = (
    "broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "reshape", "slice", "split",
    "squeeze", "transpose",
)  # fmt: skip
"""What is not worth keeping where what it is made of is no larger."""
CHEAP = (
    *VIEWS, "add", "add_any", "and", "div", "eq", "exp", "exp2", "ge", "gt", "integer_pow", "le",
    "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "one_minus_square",
    "or", "pow", "reduce_max", "reduce_sum", "rsqrt", "select_n", "sign", "sqrt", "square", "sub",
    "tanh",
)  # fmt: skip
"""What the first part does for the second where less crosses then."""


@dataclasses.dataclass(frozen=True)
class Split:
    """The two parts of a function of (known, kept, now), which are trees of arrays."""

    consts: list
    first: Jaxpr
    """(consts, known, kept, now) -> (first results, what crosses)."""
    second: Jaxpr
    """(consts, known, kept, what crosses) -> second results."""
    trees: tuple[Any, Any]
    """Of the results."""

    @property
    def crossing(self) -> list[Any]:
        """What the first part leaves for the second: avals."""
        return [v.aval for v in self.first.outvars[self.trees[0].num_leaves :]]

    def run_first(self, known, kept, now) -> tuple[Any, list]:
        """Returns (the first results, what crosses)."""
        found = self._run(self.first, (known, kept, now))
        count = self.trees[0].num_leaves
        return jax.tree.unflatten(self.trees[0], found[:count]), found[count:]

    def run_second(self, known, kept, crossing) -> Any:
        """Returns the second results."""
        found = self._run(self.second, (known, kept, crossing))
        return jax.tree.unflatten(self.trees[1], found)

    def _run(self, part: Jaxpr, given) -> list:
        arrays = [*self.consts, *jax.tree.leaves(given)]
        for array, var in zip(arrays, part.invars, strict=True):
            if _type(jax.typeof(array)) != _type(var.aval):
                raise TypeError(f"{jax.typeof(array)} given, it was split for {var.aval}")
        return jaxpr_as_fun(part)(*arrays)


def split(function: Callable, known, kept, now, axes: tuple[str, ...]) -> Split:
    """Returns the parts of `function(known, kept, now) -> (first results, second results)`.

    `known` and `kept` are given to both parts, `now` to the first. What follows from `known` alone
    does not cross. `axes`: all those over which a device's arrays may vary.
    """
    jaxpr, results = jax.make_jaxpr(function, return_shape=True)(known, kept, now)
    trees = tuple(map(jax.tree.structure, results))
    eqns, consts, outs = _flatten(jaxpr)
    both = [*consts, *jaxpr.invars[: len(jax.tree.leaves((known, kept)))]]
    free = [*consts, *jaxpr.invars[: len(jax.tree.leaves(known))]]
    count = trees[0].num_leaves
    first_outs, second_outs = outs[:count], outs[count:]

    def part(invars, outvars, eqns, live) -> tuple[Jaxpr, list[bool]]:
        names = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
        whole = Jaxpr([], invars, outvars, eqns, jaxpr.effects, names)
        return dce_jaxpr(whole, [True] * len(outvars), instantiate=live)

    every = [*consts, *jaxpr.invars]
    at_once = part(every, first_outs, eqns, True)[0].eqns
    there = {v for eqn in at_once for v in eqn.outvars} | set(every) - set(both)
    cut = _Cut(eqns, second_outs, set(both), set(free), frozenset(axes))
    later, crossing = cut.least(there)
    instantiate = [*(True for _ in both), *(False for _ in crossing)]
    second, used = part([*both, *crossing], second_outs, later, instantiate)
    crossing = [v for v, is_used in zip(crossing, used[len(both) :], strict=True) if is_used]
    first = part(every, [*first_outs, *crossing], eqns, True)[0]
    return Split(list(consts.values()), first, second, trees)


def _type(aval):
    return aval.shape, aval.dtype, aval.manual_axis_type.varying


def _flatten(jaxpr: Jaxpr) -> tuple[list[JaxprEqn], dict[Var, Any], list]:
    """Returns (equations with none of `CALLS` among them, constants, results). A body that is
    called twice gets variables of its own each time."""
    eqns, consts = [], {}

    def walk(jaxpr: Jaxpr, env: dict, scope) -> list:
        read = lambda v: v if isinstance(v, Literal) else env[v]  # noqa: E731
        for var, value in zip(jaxpr.constvars, jaxpr.consts, strict=True):
            env[var] = Var(var.aval)
            consts[env[var]] = value
        for eqn in jaxpr.eqns:
            info, invars = eqn.source_info, [read(v) for v in eqn.invars]
            names = info.name_stack if scope is None else scope + info.name_stack
            if eqn.primitive.name in CALLS:
                body = eqn.params[CALLS[eqn.primitive.name]]
                found = walk(body, dict(zip(body.invars, invars, strict=True)), names)
            else:
                found = [Var(v.aval) for v in eqn.outvars]
                info = info.replace(name_stack=names)
                eqns.append(eqn.replace(invars=invars, outvars=found, source_info=info))
            env.update(zip(eqn.outvars, found, strict=True))
        return [read(v) for v in jaxpr.outvars]

    return eqns, consts, walk(jaxpr, {v: v for v in jaxpr.invars}, None)


class _Cut:
    """What crosses from a first part to the second, which has `both` and makes `outs`."""

    def __init__(self, eqns: list[JaxprEqn], outs, both: set, free: set, axes: frozenset):
        self.eqns, self.both, self.axes = eqns, both, axes
        self.outs = {v for v in outs if not isinstance(v, Literal)} - both
        self.free = set(free)
        for eqn in eqns:
            if self.free.issuperset(_read(eqn)):
                self.free.update(eqn.outvars)

    def least(self, there: set) -> tuple[list[JaxprEqn], list]:
        """Returns (equations of the second part, variables that cross), both in order, for a first
        part that makes what is `there`, and of cheap results those by which less crosses."""
        later, crossing = self.at(there)
        reach = there | self.both | self.free  # what the first part has, or could cheaply make
        for eqn in list(later):
            if eqn.primitive.name not in CHEAP or not reach.issuperset(_read(eqn)):
                continue
            reach.update(eqn.outvars)
            if not self.free.issuperset(eqn.outvars):
                tried = self.at(there | set(eqn.outvars))
                if _num_bytes(tried[1]) < _num_bytes(crossing):
                    there = there | set(eqn.outvars)
                    later, crossing = tried
        number = {v: i for i, v in enumerate(v for eqn in self.eqns for v in eqn.outvars)}
        return later, sorted(crossing, key=lambda v: number.get(v, -1))  # alike in every process

    def at(self, there: set) -> tuple[list[JaxprEqn], set]:
        """Returns likewise for a first part that makes what is `there`, and nothing more."""
        wanted, later, crossing = set(self.outs), [], set()
        for eqn in reversed(self.eqns):
            mine = wanted.intersection(eqn.outvars)
            wanted -= mine
            if not mine:
                continue
            keeps = mine <= there and mine.isdisjoint(self.free) and all(map(self._varies, mine))
            if keeps and not self._is_view(eqn):
                crossing |= mine
                continue
            later.append(eqn)
            wanted |= _read(eqn) - self.both
        return later[::-1], crossing | wanted  # `wanted`: what is given to the first part alone

    def _varies(self, v) -> bool:
        return v.aval.manual_axis_type.varying == self.axes

    def _is_view(self, eqn: JaxprEqn) -> bool:
        made_of = _read(eqn) - self.free - self.both
        smaller = _num_bytes(made_of) <= _num_bytes(eqn.outvars)
        return eqn.primitive.name in VIEWS and smaller and all(map(self._varies, made_of))


def _read(eqn: JaxprEqn) -> set:
    return {v for v in eqn.invars if not isinstance(v, Literal)}


def _num_bytes(variables) -> int:
    return sum(v.aval.size * v.aval.dtype.itemsize for v in variables)
