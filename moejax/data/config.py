"""What to train and evaluate on: the data section of the configuration.

Sequence length and batch size are not here: they belong to the training section, and reach the
loader as arguments.
"""

from dataclasses import dataclass

STDLIB = "stdlib"
"""The embedded source: the Python standard library's own `.py` files, found through sysconfig."""

HELDOUT = "heldout"
"""The evaluation source made of the documents kept out of every training source."""


@dataclass(frozen=True)
class DataConfig:
    """Sources, mixture, tokenizer. Validates itself; whether paths exist is seen when they open."""

    train: tuple[str, ...] = (STDLIB,)
    """Training sources: each a file, a folder, a glob, an fsspec url, or "stdlib". The format goes
    by the file's ending: .jsonl .ndjson .json (JSON lines), .parquet, anything else text, a
    document a file; .gz on top of the first or last of them."""

    weights: tuple[float, ...] = ()
    """Share of the rows that each source gives, in any unit; empty = as its share of the tokens."""

    eval: tuple[str, ...] = ("val=" + HELDOUT,)
    """Evaluation sets, each "name=source"; the source "heldout" is the held-out documents of the
    training sources, which then never train. Empty = no evaluation, nothing held out."""

    holdout: float = 0.05
    """Share of the training sources' documents held out, if some evaluation set is "heldout":
    chosen by a hash of a text file's path inside its source, or of a record's text."""

    text_column: str = "text"
    """The column of JSON lines and Parquet files that holds the text."""

    tokenizer: str = ""
    """A Hugging Face tokenizer.json, or a folder with one; empty = a byte-level BPE trained on the
    training documents."""

    vocab_size: int = 4096
    """Size of the trained BPE, its end-of-document token included; unused with a given one."""

    eos: str = ""
    """The end-of-document token of the given tokenizer; empty = the one it, or the
    tokenizer_config.json beside it, names."""

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError('data.train is empty; name at least one source, such as "stdlib"')
        if self.weights and len(self.weights) != len(self.train):
            raise ValueError(
                f"data.weights has {len(self.weights)} numbers for the {len(self.train)} sources "
                "of data.train; give one each, or none (as each one's share of the tokens)"
            )
        for weight in self.weights:
            if not 0 < weight < float("inf"):
                raise ValueError(
                    f"data.weights holds {weight}; weights are above 0 (drop the source instead)"
                )
        if not 0 < self.holdout < 1:
            raise ValueError(
                f"data.holdout={self.holdout} is not between 0 and 1; "
                'to hold nothing out, take "heldout" out of data.eval'
            )
        if not self.tokenizer and self.vocab_size < 257:
            raise ValueError(
                f"data.vocab_size={self.vocab_size} is below 257, the 256 bytes and the "
                "end-of-document token"
            )
        if self.eos and not self.tokenizer:
            raise ValueError(
                f"data.eos={self.eos!r} needs data.tokenizer; a trained BPE makes its own"
            )
        _ = self.eval_sources

    @property
    def eval_sources(self) -> dict[str, str]:
        """Evaluation set name -> source. Raises ValueError for a malformed or repeated entry."""
        sources: dict[str, str] = {}
        for entry in self.eval:
            name, _, source = entry.partition("=")
            if not name.isidentifier() or not source:
                raise ValueError(
                    f'data.eval holds {entry!r}; write "name=source", such as "val={HELDOUT}"'
                )
            if name in sources:
                raise ValueError(f"data.eval names {name!r} twice; give each set its own name")
            sources[name] = source
        return sources

    @property
    def held_out_share(self) -> float:
        """Share of the training sources' documents that never train; 0 without such a set."""
        return self.holdout if HELDOUT in self.eval_sources.values() else 0.0
