"""python -m moejax.evaluate --from=FOLDER [--text=FILE] [--choices=FILE.jsonl] ...

How well a trained model predicts a text, and how often it finds the right one of several answers.

Text: every token is scored once, by the tokens before it in its window. Windows hold --context
tokens, each begins --stride behind the one before; a token is scored in the first that holds it.
Before the text stands the tokenizer's own begin-of-text token or, where it has none, the token that
ends a document.

Choices: lines {"question" or "prompt": text, "choices": [text, ...], "answer": index from 0}. A
choice is scored by the log-likelihood of its tokens after the question, a space between the two if
neither has one there. Reported are two accuracies: of the greatest sum, and of the greatest mean
per token. Ties go to the first. Of a question that is too long the end is kept.

    python -m moejax.evaluate --from=runs/demo --text=book.txt
    python -m moejax.evaluate --from=Qwen3-30B-A3B --tp=4 --ep=8 --choices=arc.jsonl
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, log
from pathlib import Path

import numpy as np
from jaxtyping import Float

from moejax import trained
from moejax.train.score import Row, make_token_nll, score, windows
from moejax.trained import Trained

MAX_CONTEXT = 2048  # of a window, where no --context is given


@dataclass(frozen=True)
class Fit:
    """How well a text was predicted."""

    nats: float
    num_tokens: int
    num_bytes: int

    def lines(self) -> list[str]:
        """Returns the three usual figures, a line each."""
        per_token = self.nats / self.num_tokens
        bits = self.nats / log(2) / self.num_bytes
        figures = {"nats per token": per_token, "bits per byte": bits, "perplexity": exp(per_token)}
        return [f"  {name:20}{value:.4f}" for name, value in figures.items()]


@dataclass(frozen=True)
class Question:
    """A question with its answers, one of which is right."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


def read_questions(path: str) -> list[Question]:
    """Returns the questions of a JSON-lines file.

    Raises FileNotFoundError, or ValueError naming the line that is none.
    """
    found = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            said = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON: {error}") from None
        if not isinstance(said, dict):
            raise ValueError(f"{where} is no JSON object")
        prompt, choices = said.get("question", said.get("prompt")), said.get("choices")
        if not isinstance(prompt, str):
            raise ValueError(f'{where} has no text "question" or "prompt"')
        texts = isinstance(choices, list) and all(isinstance(c, str) and c for c in choices)
        if not texts or len(choices) < 2:
            raise ValueError(f'{where} has no "choices": a list of two texts or more')
        answer = said.get("answer")
        if type(answer) is not int or not 0 <= answer < len(choices):
            raise ValueError(f'{where}: "answer" is {answer!r}, not 0 to {len(choices) - 1}')
        found.append(Question(prompt, tuple(choices), answer))
    if not found:
        raise ValueError(f"{path} holds no question")
    return found


def _read(path: str) -> str:
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None


def fit(model: Trained, text: str, context: int, stride: int) -> Fit:
    """Returns how well a text that is not empty is predicted."""
    begin = _begin(model)
    ids = begin + model.tokenizer.encode(text)
    rows = windows(ids, len(begin), context, stride)
    nlls = score(make_token_nll(model.layout), model.weights, rows, model.num_ranks)
    return Fit(float(sum(nll.sum() for nll in nlls)), len(ids) - len(begin), len(text.encode()))


def _begin(model: Trained) -> list[int]:
    return model.tokenizer.begin or [model.tokenizer.eos_id]


def row_of(model: Trained, prompt: str, choice: str, context: int) -> Row:
    """Returns the row in which a choice is scored: from its first token, as the whole is cut into
    tokens, that the prompt alone does not have."""
    encode, begin = model.tokenizer.encode, _begin(model)
    apart = not (prompt and not prompt[-1].isspace() and not choice[0].isspace())
    whole, alone = encode(prompt + ("" if apart else " ") + choice), encode(prompt)
    same = 0
    while same < min(len(alone), len(whole) - 1) and alone[same] == whole[same]:
        same += 1
    ids, first = begin + whole, len(begin) + same
    cut = max(len(ids) - context - 1, 0)
    return Row(ids[cut:], max(first - cut, 1))


def answers(
    model: Trained, questions: Sequence[Question], context: int
) -> tuple[list[Float[np.ndarray, " choices"]], list[Float[np.ndarray, " choices"]]]:
    """Returns, of each question, the log-likelihood of its choices: (sums, means per token)."""
    at = [(q, c) for q, question in enumerate(questions) for c in range(len(question.choices))]
    rows = {(q, c): row_of(model, questions[q].prompt, questions[q].choices[c], context)
            for q, c in at}  # fmt: skip
    order = sorted(at, key=lambda place: len(rows[place].ids))
    nlls = score(
        make_token_nll(model.layout), model.weights, [rows[i] for i in order], model.num_ranks
    )
    sums, means = ([np.zeros(len(q.choices)) for q in questions] for _ in range(2))
    for (q, c), nll in zip(order, nlls, strict=True):
        sums[q][c], means[q][c] = -nll.sum(), -nll.mean()
    return sums, means


def options() -> trained.Parser:
    """Returns the parser of this program."""
    made = trained.parser(__doc__ or "")
    add = made.add_argument
    add("--text", metavar="FILE", help="a text file, whose perplexity is reported")
    add("--choices", metavar="FILE", help="questions with choices, JSON lines")
    add("--context", type=int, default=0,
        help=f"tokens of a window (those the model was trained on, at most {MAX_CONTEXT})")
    add("--stride", type=int, default=0, help="tokens between two windows (half the context)")
    return made  # fmt: skip


def prepare(parsed: argparse.Namespace) -> Callable[[], None]:
    """Returns what prints the figures. Raises ValueError or FileNotFoundError for what is wrong."""
    if not (parsed.text or parsed.choices):
        raise ValueError("give --text=FILE, --choices=FILE.jsonl, or both")
    text = _read(parsed.text) if parsed.text else ""
    if parsed.text and not text:
        raise ValueError(f"{parsed.text} is empty")
    questions = read_questions(parsed.choices) if parsed.choices else []
    model = trained.load(parsed.where, parsed.parallel, parsed.dtype)
    context = parsed.context or min(model.length, MAX_CONTEXT)
    stride = parsed.stride or max(context // 2, 1)
    if not 1 <= stride <= context:
        raise ValueError(f"--context={context} and --stride={stride}: 1 <= stride <= context")
    return partial(evaluate, model, text, questions, context, stride, parsed)


def evaluate(
    model: Trained,
    text: str,
    questions: Sequence[Question],
    context: int,
    stride: int,
    parsed: argparse.Namespace,
) -> None:
    """Prints what was asked for."""
    if text:
        found = fit(model, text, context, stride)
        print(f"{parsed.text}: {found.num_tokens:,} tokens, {found.num_bytes:,} bytes;", end=" ")
        print(f"windows of {context} tokens, {stride} apart")
        print("\n".join(found.lines()))
    if questions:
        right = np.asarray([question.answer for question in questions])
        chance = np.mean([1 / len(question.choices) for question in questions])
        print(f"{parsed.choices}: {len(questions):,} questions; by chance {chance:.4f}")
        names = ("accuracy", "accuracy per token")
        for name, found in zip(names, answers(model, questions, context), strict=True):
            best = np.asarray([np.argmax(scores) for scores in found])
            print(f"  {name:20}{np.mean(best == right):.4f}")


if __name__ == "__main__":
    trained.program(prepare, options())
