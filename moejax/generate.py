"""python -m moejax.generate --from=FOLDER [PROMPT] [--max-tokens=N] [--temperature=T] ...

Prints how a trained model goes on with a prompt (without one: standard input, less its last end of
line), as the tokens come. It stops at the token that ends a document.

    python -m moejax.generate --from=runs/demo "def main("
    python -m moejax.generate --from=Qwen3-30B-A3B --tp=4 --ep=8 --temperature=0 < prompt.txt
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile

import numpy as np

from moejax import trained
from moejax.train.sample import NextLogits, continuation, make_next_logits, read_prompt
from moejax.trained import Trained


@dataclass
class Clock:
    """When the tokens came."""

    times: list[float] = field(default_factory=lambda: [time.monotonic()])

    def ticked(self, ids: Iterator[int]) -> Iterator[int]:
        """Yields the ids, and notes when each was there."""
        for token in ids:
            self.times.append(time.monotonic())
            yield token

    def line(self) -> str:
        """Returns how many tokens came, and how fast those did that waited for no compiler."""
        start, *came = self.times
        first = f", the first after {came[0] - start:.2f} s" if came else ""
        rest = len(came) - 2
        rate = f", then {rest / (came[-1] - came[1]):.1f} tokens/s" if rest > 0 else ""
        return f"[{len(came)} tokens{first}{rate}]"


def options() -> trained.Parser:
    """Returns the parser of this program."""
    made = trained.parser(__doc__ or "")
    add = made.add_argument
    add("prompt", nargs="?", help="the text to go on with; without it, standard input")
    add("--max-tokens", type=int, default=200, help="tokens at most (200)")
    add("--temperature", type=float, default=0.8,
        help="logits are divided by it (0.8); 0: always the likeliest token")
    add("--top-p", type=float, default=1.0,
        help="draw among the fewest likeliest tokens with this much probability (1: all)")
    add("--seed", type=int, default=0, help="the same seed draws the same tokens (0)")
    add("--samples", type=int, default=1, help="continuations, one after the other (1)")
    return made  # fmt: skip


def check(parsed: argparse.Namespace) -> None:
    """Raises ValueError for values that cannot be."""
    for name in ("max_tokens", "samples"):
        if getattr(parsed, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')}={getattr(parsed, name)} is below 1")
    if not 0 <= parsed.temperature < float("inf"):
        raise ValueError(f"--temperature={parsed.temperature} is not 0 or more")
    if not 0 < parsed.top_p <= 1:
        raise ValueError(f"--top-p={parsed.top_p} is not in (0, 1]")


def texts(
    model: Trained, next_logits: NextLogits, prompt: str, parsed: argparse.Namespace
) -> Iterator[tuple[Iterator[str], Clock]]:
    """Yields (pieces of text, as they come; their clock) of each sample; use up one before the
    next. The prompt is read once."""
    ids = model.tokenizer.begin + model.tokenizer.encode(prompt) or [model.tokenizer.eos_id]
    clock = Clock()
    read = read_prompt(next_logits, model.weights, ids)
    for number in range(parsed.samples):
        drawn = continuation(
            next_logits, model.weights, read, len(ids),
            generator=np.random.default_rng([parsed.seed, number]),
            vocab_size=model.tokenizer.vocab_size, temperature=parsed.temperature,
            top_p=parsed.top_p,
        )  # fmt: skip
        new = takewhile(lambda token: token not in model.ends, islice(drawn, parsed.max_tokens))
        yield model.tokenizer.decode_each(clock.ticked(new), ids), clock
        clock = Clock()


def prepare(parsed: argparse.Namespace) -> Callable[[], None]:
    """Returns what prints the samples. Raises ValueError or FileNotFoundError for what is wrong."""
    check(parsed)
    model = trained.load(parsed.where, parsed.parallel, parsed.dtype)
    prompt = sys.stdin.read().removesuffix("\n") if parsed.prompt is None else parsed.prompt
    return partial(generate, model, prompt, parsed)


def generate(model: Trained, prompt: str, parsed: argparse.Namespace) -> None:
    """Prints the samples to standard output, and how fast they came to standard error."""
    slots = len(model.tokenizer.encode(prompt)) + parsed.max_tokens + 1
    next_logits = make_next_logits(model.layout, slots)
    for number, (pieces, clock) in enumerate(texts(model, next_logits, prompt, parsed), 1):
        if parsed.samples > 1:
            print(f"=== {number} of {parsed.samples}")
        for piece in pieces:
            print(piece, end="", flush=True)
        print(flush=True)
        print(clock.line(), file=sys.stderr)


if __name__ == "__main__":
    trained.program(prepare, options())
