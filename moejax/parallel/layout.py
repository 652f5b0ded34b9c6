"""Which layers each pipeline rank holds: a layout string, or layers spread evenly.

    Et*3|(tt|)*29m|L      over 8 ranks: 32 stages, stage i on rank i % 8 as its chunk i // 8

`E` embedding, `t` layer, `m` multi-token-prediction module, `L` head and loss, `|` end of a
stage, `x*n` and `(..)*n` repeats; commas and blanks are ignored, and a stage may be empty. (So the
strings of Megatron-LM's --pipeline-model-parallel-layout.) `E` and `L` say where activations enter
and leave; the weights of embedding and head rest split over all ranks, so that neither is a burden.

Outsiders need: `parse`, `balanced`, `Layout`, `Stage`, `place`, `Placement`.
"""

import dataclasses
from collections.abc import Sequence
from itertools import groupby

import numpy as np
from jaxtyping import Int32

LETTERS = "EtmL|"
LONGEST = 100_000
"""Letters that a string may unfold to: more is a slip of the hand."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """What one stage runs, in this order: the embedding, layers, MTP modules, head and loss."""

    embed: bool = False
    layers: tuple[int, ...] = ()
    mtp: tuple[int, ...] = ()
    loss: bool = False

    def __str__(self) -> str:
        return "E" * self.embed + _run("t", self.layers) + _run("m", self.mtp) + "L" * self.loss


@dataclasses.dataclass(frozen=True)
class Layout:
    """The stages in order; `str` writes the layout as a string that `parse` reads back."""

    stages: tuple[Stage, ...]
    pp: int

    @property
    def num_chunks(self) -> int:
        """Stages on each rank (the virtual pipeline degree)."""
        return len(self.stages) // self.pp

    def stage(self, rank: int, chunk: int) -> Stage:
        return self.stages[chunk * self.pp + rank]

    def __str__(self) -> str:
        out = ""
        for text, same in groupby(str(stage) + "|" for stage in self.stages[:-1]):
            times = len(list(same))
            body = text if len(text) == 1 else f"({text})"
            out += text if times == 1 else f"{body}*{times}"
        return out + str(self.stages[-1])


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the units of the model's stacks rest (see `place`)."""

    units: tuple[Int32[np.ndarray, "pp slots"], ...]
    """For each stack: which of its units rests in each slot of each rank; -1 is padding."""
    chunks: tuple[tuple[tuple[tuple[int, int], ...], ...], ...]
    """chunks[rank][chunk]: (stack, slot) of the units it runs, in order."""


def parse(text: str, num_layers: int, mtp_depth: int, pp: int, vpp: int = 0) -> Layout:
    """Returns the layout that a string describes; vpp=0 takes as many chunks as it gives.

    Raises ValueError, with a caret under the place where there is one, for a string that cannot
    be read or does not describe this model on so many ranks.
    """
    letters = _unfold(text)
    _check_order(text, letters)
    stages: list[list[str]] = [[]]
    for letter, _ in letters:
        if letter == "|":
            stages.append([])
        else:
            stages[-1].append(letter)
    _check_sizes(text, [letter for letter, _ in letters], num_layers, mtp_depth, pp, vpp)
    return _layout([("E" in s, s.count("t"), s.count("m"), "L" in s) for s in stages], pp)


def balanced(
    num_layers: int,
    mtp_depth: int,
    pp: int,
    vpp: int = 1,
    stacks: Sequence[tuple[Sequence[str], int]] = (),
) -> Layout:
    """Returns the layout used where no string is given: stages as even as can be.

    An MTP module counts as a layer and sits in the last stage. Where the stages do not divide the
    layers, the first and the last stage have the fewer, and those just before the last the more:
    later stages keep fewer microbatches. With fewer layers than stages some stages are empty.
    With `stacks`, as of `place`, units stay whole. vpp=0 stands for 1.
    """
    num = pp * max(vpp, 1)
    if num_layers < 1 or mtp_depth < 0 or num < 1:
        raise ValueError(
            f"no layout of {num_layers} layers and {mtp_depth} MTP modules over pp={pp}, "
            f"vpp={vpp}: there must be a layer and a stage"
        )
    units = [len(kinds) for kinds, count in stacks for _ in range(count)] or [1] * num_layers
    if sum(units) != num_layers:
        raise ValueError(f"the model's stacks hold {sum(units)} layers, not {num_layers}")
    counts = _most_even(units, mtp_depth, num)
    rows = [
        (i == 0, count, mtp_depth * (i == num - 1), i == num - 1) for i, count in enumerate(counts)
    ]
    return _layout(rows, pp)


def place(layout: Layout, stacks: Sequence[tuple[Sequence[str], int]]) -> Placement:
    """Returns where each rank keeps the layers that it runs.

    The model keeps its layers in `stacks`: each (kinds, count) is a run of `count` equal units of
    len(kinds) layers, such as (("D",), 3), (("M",), 58). A rank has a row of slots for each stack,
    filled in the order of its chunks; ranks with fewer units have padding.

    Raises ValueError when the stacks hold more or fewer layers than the layout, or a stage ends
    inside a unit.
    """
    owner = [  # of each layer: its stack, its unit there, its place within
        (stack, unit, i)
        for stack, (kinds, count) in enumerate(stacks)
        for unit in range(count)
        for i in range(len(kinds))
    ]
    num_layers = sum(len(stage.layers) for stage in layout.stages)
    if len(owner) != num_layers:
        raise ValueError(
            f"the model's stacks hold {len(owner)} layers, the pipeline layout {num_layers}"
        )
    held: list[list[list[int]]] = [[[] for _ in range(layout.pp)] for _ in stacks]
    chunks: list[list[tuple[tuple[int, int], ...]]] = [[] for _ in range(layout.pp)]
    for i, stage in enumerate(layout.stages):
        rank, ran = i % layout.pp, []
        _check_whole(layout, i, owner, stacks)
        for layer in stage.layers:
            stack, unit, within = owner[layer]
            if within == 0:
                ran.append((stack, len(held[stack][rank])))
                held[stack][rank].append(unit)
        chunks[rank].append(tuple(ran))
    units = []
    for rows in held:
        table = np.full((layout.pp, max(map(len, rows))), -1, np.int32)
        for rank, row in enumerate(rows):
            table[rank, : len(row)] = row
        units.append(table)
    return Placement(tuple(units), tuple(map(tuple, chunks)))


def _run(letter: str, items: Sequence[int]) -> str:
    return letter * len(items) if len(items) < 3 else f"{letter}*{len(items)}"


def _layout(sizes: Sequence[tuple[bool, int, int, bool]], pp: int) -> Layout:
    stages, layer, module = [], 0, 0
    for embed, layers, mtp, loss in sizes:
        own = tuple(range(layer, layer + layers)), tuple(range(module, module + mtp))
        stages.append(Stage(embed, *own, loss))
        layer, module = layer + layers, module + mtp
    return Layout(tuple(stages), pp)


def _most_even(units: Sequence[int], mtp_depth: int, num: int) -> list[int]:
    """Returns the layers of each of `num` stages that leave the least sum of squared loads.

    Of equals, that which puts the most where it weighs the least.
    """
    ends = np.cumsum([0, *units])
    load = ends[None, :] - ends[:, None]  # of a stage from one end of a unit to another
    weigh = np.array([num * 2, *range(num - 1, 0, -1)])
    weigh[-1] = num * 3
    most = int(ends[-1]) + mtp_depth
    never = 2**62
    best = np.where(ends == 0, 0, never)  # of the stages so far, by where they end
    choices = []
    for i in range(num):
        loads = load + mtp_depth * (i == num - 1)
        cost = loads * loads * (3 * num * most + 1) + weigh[i] * loads
        total = np.where((load < 0) | (best[:, None] == never), never, best[:, None] + cost)
        choices.append(total.argmin(0))
        best = total.min(0)
    at, counts = len(units), []
    for choice in reversed(choices):
        counts.append(int(load[choice[at], at]))
        at = choice[at]
    return counts[::-1]


def _wrong(text: str, at: int, why: str) -> ValueError:
    return ValueError(f"pipeline layout: {why}\n    {text}\n    {' ' * at}^")


def _unfold(text: str) -> list[tuple[str, int]]:
    """Returns the letters with repeats written out, each with its place in the text."""
    open_at: list[int] = []
    levels: list[list[tuple[str, int]]] = [[]]
    last: list[tuple[str, int]] = []  # what a `*` repeats
    at = 0
    while at < len(text):
        char, start = text[at], at
        at += 1
        if char in ", \t":
            continue
        if char == "(":
            open_at.append(start)
            levels.append([])
            last = []
            continue
        if char == "*":
            while at < len(text) and text[at].isdecimal() and text[at].isascii():
                at += 1
            last = last * (_times(text, start, at, last) - 1)
        elif char == ")":
            if not open_at:
                raise _wrong(text, start, "this bracket closes none")
            open_at.pop()
            last = levels.pop()
        elif char in LETTERS:
            last = [(char, start)]
        else:
            raise _wrong(text, start, f"{char!r} is none of {' '.join(LETTERS)} ( ) * ,")
        levels[-1] += last
        last = [] if char == "*" else last
    if open_at:
        raise _wrong(text, open_at[-1], "this bracket is not closed")
    return levels[0]


def _times(text: str, start: int, end: int, repeated: list[tuple[str, int]]) -> int:
    """Returns the number after the `*` at `start`."""
    if not repeated:
        raise _wrong(text, start, "there is nothing before this * to repeat")
    if end == start + 1:
        raise _wrong(text, start, "this * needs a number after it")
    times = int(text[start + 1 : end])
    if times == 0:
        raise _wrong(text, start + 1, "zero repeats; leave the part out")
    if times * len(repeated) > LONGEST:
        raise _wrong(text, start + 1, f"this unfolds to more than {LONGEST} letters")
    return times


def _check_order(text: str, letters: list[tuple[str, int]]) -> None:
    """Raises ValueError unless E is the first, L the last, and m are together before L."""
    places = {letter: [at for x, at in letters if x == letter] for letter in LETTERS}
    indices = {letter: [i for i, (x, _) in enumerate(letters) if x == letter] for letter in LETTERS}
    for letter, what in (("E", "embedding"), ("L", "loss")):
        if not places[letter]:
            end = len(text) if letter == "L" else 0
            raise _wrong(text, end, f"{letter} ({what}) is missing; it belongs here")
        if len(places[letter]) > 1:
            raise _wrong(text, places[letter][1], f"a second {letter}; there is one {what}")
    if indices["E"] != [0]:
        raise _wrong(text, places["E"][0], "E must be the first thing of the first stage")
    end = indices["L"][0]
    if any(i > end for i in indices["|"]):
        raise _wrong(text, places["L"][0], "L must be in the last stage")
    for letter, at in letters[end + 1 :]:
        raise _wrong(text, at, f"this {letter} comes after L; L is the last thing of all")
    last_layer = max(indices["t"], default=0)
    for i, at in zip(indices["m"], places["m"], strict=True):
        if i < last_layer:
            raise _wrong(text, at, "this m comes before the last t; MTP modules follow all layers")
        if any(indices["m"][0] < cut < i for cut in indices["|"]):
            raise _wrong(text, at, "this m is in another stage than the first; keep all m together")


def _check_sizes(
    text: str, letters: list[str], num_layers: int, mtp_depth: int, pp: int, vpp: int
) -> None:
    """Raises ValueError unless the string has this many layers, modules and stages."""
    layers, modules, stages = letters.count("t"), letters.count("m"), letters.count("|") + 1
    if layers != num_layers:
        raise ValueError(
            f"pipeline layout {text!r} has {layers} layers instead of {num_layers}: "
            f"{_mend(layers - num_layers, 't')}"
        )
    if modules != mtp_depth:
        raise ValueError(
            f"pipeline layout {text!r} has {modules} MTP modules instead of {mtp_depth}: "
            f"{_mend(modules - mtp_depth, 'm')}, or set the model's MTP depth to {modules}"
        )
    if stages % pp:
        low = stages - stages % pp
        near = f"{low + pp}" if low == 0 else f"{low} or {low + pp}"
        raise ValueError(
            f"pipeline layout {text!r} has {stages} stages, no multiple of pp={pp}: write {near} "
            f"stages (a stage may be empty), or choose a pp that divides {stages}"
        )
    if vpp and stages != pp * vpp:
        raise ValueError(
            f"pipeline layout {text!r} has {stages} stages, that is {stages // pp} chunks on each "
            f"of {pp} ranks, not vpp={vpp}: set vpp to {stages // pp}, or to 0 to take the string's"
        )


def _mend(excess: int, letter: str) -> str:
    return f"take out {excess} {letter}" if excess > 0 else f"add {-excess} {letter}"


def _check_whole(
    layout: Layout,
    index: int,
    owner: Sequence[tuple[int, int, int]],
    stacks: Sequence[tuple[Sequence[str], int]],
) -> None:
    """Raises ValueError when a stage begins inside a unit, so that another ends there."""
    layers = layout.stages[index].layers
    if layers and owner[layers[0]][2]:
        stack, _, within = owner[layers[0]]
        kinds, first = stacks[stack][0], layers[0] - within
        raise ValueError(
            f"pipeline layout {layout}: stage {index} begins with layer {layers[0]}, inside the "
            f"pattern {''.join(kinds)!r}: its {len(kinds)} layers, {first} to "
            f"{first + len(kinds) - 1}, must stay together in a stage"
        )
