"""The plan of a step from shapes alone: no compiler, milliseconds.

    events(Setup(model, 256, 8192, ep=64, pp=4, ...), CLUSTERS["gb200"])

lists what one GPU does in one step, in the language of `operations`: for moejax's own train step
(`Setup.of(config, num_gpus)`) what the compiled program does, and for pipelines, context
parallelism and other software what published systems do. The busiest pipeline stage is followed;
the bubble, and the host where it is slower than the GPU, are idle time.
"""

from collections.abc import Iterable, Sequence
from math import ceil

from moejax.plan.analytic.layers import Layer, make_layer
from moejax.plan.analytic.pieces import Piece, phased
from moejax.plan.analytic.setup import Setup
from moejax.plan.analytic.weights import (
    embed,
    gather_once,
    head,
    join,
    layer_weights,
    reduce_once,
    update,
)
from moejax.plan.hardware import Cluster
from moejax.plan.operations import (
    COLLECTIVE,
    GROUPED,
    IDLE,
    Done,
    Event,
    Loop,
    Run,
    Start,
    Work,
)
from moejax.plan.timeline import simulate

LAUNCHED = 33e-6
"""Seconds that the GPU waits for each kernel that the host launches behind a dropless dispatch,
whose row counts it has to read first: what brings the two marked pairs of benchmarks/published.py,
the same runs with partial and with full CUDA graphs, nearest to their published ratios. Grouped
products of Megatron Core outside of graphs are a kernel an expert, on several streams."""
EAGER = ("dispatch", "experts", "combine")  # what partial graphs leave out


def events(setup: Setup, cluster: Cluster) -> tuple[Event, ...]:
    """Returns the events of one step on one GPU."""
    forward, backward, both = _microbatch(setup, cluster)
    count = setup.microbatches
    found: list[Event] = []
    once = setup.zero < 3
    gather, reduce = (gather_once(setup, cluster), reduce_once(setup, cluster))
    # The weights' gather hides under the first forward, the gradients' sum under the last backward.
    if once:
        found += _starts(gather, "weights")
    found += forward
    if once:
        found += _dones(gather, "weights")
    if count > 1:
        found += backward if not setup.overlap else ()
        middle = count - 1 if setup.overlap else count - 2
        if middle:
            found.append(Loop("microbatch", middle, (*both,)))
        if not setup.overlap:
            found += forward
    found += _starts(reduce, "gradients") if once else ()
    found += backward
    found += _dones(reduce, "gradients") if once else ()
    found += _bubble(setup, cluster, forward, backward)
    found += update(setup, cluster)
    return tuple(found)


def _starts(works: Iterable[Work], key: str) -> list[Event]:
    return [Start(work, f"{key} {i}") for i, work in enumerate(works)]


def _dones(works: Iterable[Work], key: str) -> list[Event]:
    return [Done(f"{key} {i}") for i, _ in enumerate(works)]


def _microbatch(setup: Setup, cluster: Cluster):
    """Returns (forward, backward, both beside each other) of a microbatch on one stage."""
    model, pp = setup.model, setup.pp
    first, last = embed(setup, cluster), head(setup, cluster)
    forward = [Loop("embed", 1 / pp, _forward(first))]
    backward, both = [], [Loop("embed", 1 / pp, _forward(first))]
    for i, (kinds, count) in enumerate(model.stacks()):
        layers = [make_layer(setup, cluster, kind) for kind in kinds]
        ahead = sum((_layer_forward(layer, setup, cluster) for layer in layers), ())
        behind = sum((_layer_backward(layer, setup, cluster) for layer in layers[::-1]), ())
        forward.append(Loop(f"stack_{i} forward", count / pp, ahead))
        backward.insert(0, Loop(f"stack_{i} backward", count / pp, behind))
        merged = sum((_merged(layer, setup, cluster) for layer in layers), ())
        both.append(Loop(f"stack_{i}", count / pp, merged))
    if model.mtp_depth:
        layer = make_layer(setup, cluster, model.mtp_kind)
        extra, times = join(setup, cluster), model.mtp_depth / pp
        ahead = (*_forward(extra), *_layer_forward(layer, setup, cluster), *_forward(last))
        behind = (*_backward(last, setup), *_layer_backward(layer, setup, cluster))
        behind = (*behind, *_backward(extra, setup))
        forward.append(Loop("mtp forward", times, ahead))
        backward.insert(0, Loop("mtp backward", times, behind))
        merged = (*_forward(extra), *_merged(layer, setup, cluster), *_forward(last))
        merged = (*merged, *_backward(last, setup), *_backward(extra, setup))
        both.append(Loop("mtp", times, merged))
    for events in (forward, both):
        events.append(Loop("unembed forward", 1 / pp, _forward(last)))
    ends = [Loop("unembed backward", 1 / pp, _backward(last, setup))]
    starts = [Loop("embed backward", 1 / pp, _backward(first, setup))]
    backward = [*ends, *backward, *starts]
    both += [*ends, *starts]
    if setup.overlap:
        return _sent(forward, setup, cluster, 1), _sent(backward, setup, cluster, 1), (
            _sent(both, setup, cluster, 2)
        )  # fmt: skip
    forward, backward = (_sent(part, setup, cluster, 1) for part in (forward, backward))
    return forward, backward, (*forward, *backward)


def _sent(events: Sequence[Event], setup: Setup, cluster: Cluster, ways: int) -> tuple[Event, ...]:
    """Returns the events with what is sent to the next stage, chunk by chunk, beside them."""
    if setup.pp == 1:
        return tuple(events)
    wire = 2 * setup.here * setup.model.dim
    work = Work("stages", COLLECTIVE, collective="permute", role="pp", wire=wire,
                group=setup.group("pp", cluster))  # fmt: skip
    keys = [f"stage {i}" for i in range(setup.vpp * ways)]
    return (*(Start(work, key) for key in keys), *events, *(Done(key) for key in keys))


def _forward(pieces: Iterable[Piece], phase: str = "forward") -> tuple[Event, ...]:
    return tuple(phased(item, phase) for piece in pieces for item in piece.forward)


def _again(pieces: Iterable[Piece], setup: Setup) -> tuple[Event, ...]:
    """Returns what the backward computes again."""
    asked = set(setup.recompute)
    whole, most = "full" in asked, "selective" in asked  # most: all but what has travelled
    kept = [
        piece
        for piece in pieces
        if (whole and piece.again)
        or (most and piece.again and {item.name for item in piece.forward} != {"dispatch"})
        or set(piece.tags) & asked
    ]
    return _forward(kept, "recompute")


def _backward(pieces: Iterable[Piece], setup: Setup) -> tuple[Event, ...]:
    return tuple(
        phased(item, "backward") for piece in tuple(pieces)[::-1] for item in piece.backward
    )


def _layer_forward(layer: Layer, setup: Setup, cluster: Cluster) -> tuple[Event, ...]:
    body = (*layer_weights(setup, cluster, layer, "forward"), *_forward(layer.pieces))
    return _hosted(body, setup, "forward")


def _layer_backward(layer: Layer, setup: Setup, cluster: Cluster) -> tuple[Event, ...]:
    """Returns one layer's backward. XLA sums the experts' gradients over ranks beside the rest of
    it: what stands before the experts."""
    again = _again(layer.pieces, setup)
    summed = layer_weights(setup, cluster, layer, "reduce", ("edp",))
    travels = [e for e in summed if isinstance(e, Run) and e.work.kind == COLLECTIVE]
    body = (
        *layer_weights(setup, cluster, layer, "recompute" if again else "backward"),
        *again,
        *_backward((*layer.there, *layer.inside, *layer.back, *layer.after), setup),
        *_begin(tuple(travels), "experts"),
        *_backward(layer.before, setup),
        *_end("experts", tuple(travels)),
        *(e for e in summed if e not in travels),
        *layer_weights(setup, cluster, layer, "reduce", ("dp",)),
    )
    return _hosted(body, setup, "backward")


def _merged(layer: Layer, setup: Setup, cluster: Cluster) -> tuple[Event, ...]:
    """Returns one layer forward of a microbatch beside one backward of another: each's tokens
    travel while the other computes."""
    if not layer.there:
        return (*_layer_forward(layer, setup, cluster), *_layer_backward(layer, setup, cluster))
    ahead = {name: _forward(part) for name, part in layer._asdict().items()}
    back = {name: _backward(part, setup) for name, part in layer._asdict().items()}
    back["inside"] = (*_again(layer.inside, setup), *back["inside"])
    back["before"] = (*_again((*layer.before, *layer.after), setup), *back["before"])
    travels = _again((*layer.there, *layer.back), setup)
    body = (
        *back["after"], *_begin(back["back"], "1"),
        *ahead["before"], *_end("1", back["back"]), *_begin(ahead["there"], "2"),
        *travels, *back["inside"], *_end("2", ahead["there"]), *_begin(back["there"], "3"),
        *ahead["inside"], *_end("3", back["there"]), *_begin(ahead["back"], "4"),
        *back["before"], *_end("4", ahead["back"]),
        *ahead["after"],
    )  # fmt: skip
    weights = [
        event
        for phase in ("forward", "backward", "reduce")
        for event in layer_weights(setup, cluster, layer, phase)
    ]
    return _hosted((*weights, *body), setup, "backward")


def _begin(events: tuple[Event, ...], key: str) -> list[Event]:
    return [Start(e.work, f"{key} {i}") for i, e in enumerate(events) if isinstance(e, Run)]


def _end(key: str, events: tuple[Event, ...]) -> list[Event]:
    return [Done(f"{key} {i}") for i, e in enumerate(events) if isinstance(e, Run)]


def _hosted(body: tuple[Event, ...], setup: Setup, phase: str) -> tuple[Event, ...]:
    """Returns the body, and what the GPU waits in it for kernels that the host launches."""
    if setup.graphs == "full":
        return body
    works = [e.work for e in body if isinstance(e, Run | Start)]
    launches = sum(
        work.groups if work.kind == GROUPED else 1
        for work in works
        if work.name in EAGER or setup.graphs == "none"
    )
    wait = LAUNCHED * launches
    return (*body, Run(Work("host", IDLE, phase, role="launches", wait=wait)))


def _bubble(setup: Setup, cluster: Cluster, forward, backward) -> tuple[Event, ...]:
    """Returns the idle time of a pipeline: filling and emptying it, (pp - 1) / vpp microbatches,
    and layers that do not divide over stages, by which the busiest one is behind the mean."""
    if setup.pp == 1:
        return ()
    whole = simulate((*forward, *backward), cluster).seconds
    kinds = setup.model.all_kinds()
    parts = {name: simulate(e.body, cluster).seconds for e in (*forward, *backward)
             if isinstance(e, Loop) and (name := e.name)}  # fmt: skip
    last = f"stack_{len(setup.model.stacks()) - 1}"
    layer = (parts[f"{last} forward"] + parts[f"{last} backward"]) / len(
        setup.model.stacks()[-1][0]
    )
    busiest = max(ceil(len(kinds) / setup.pp) * layer, whole)
    wait = (setup.pp - 1) / setup.vpp * busiest
    behind = (busiest - whole) * setup.microbatches
    found = [Run(Work("pipeline", IDLE, "backward", role="bubble", wait=wait))]
    if behind > 0:
        found.append(Run(Work("pipeline", IDLE, "backward", role="uneven", wait=behind)))
    return tuple(found)
