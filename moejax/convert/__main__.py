"""Checkpoints of other formats, and of dense models, as runs of ours; and runs as checkpoints.

    python -m moejax.convert hf-to-moejax SRC OUT [--dtype auto|bfloat16|float16|float32]
    python -m moejax.convert moejax-to-hf RUN OUT [--like SRC] [--dtype bfloat16|...]
    python -m moejax.convert upcycle RUN OUT --experts E --top-k K [--granularity G] [...]

None of them holds more than a few slices of a layer in memory, whatever the size of the model, and
none writes into a folder that is there already.
"""

import argparse
import sys
from collections.abc import Sequence

import jax

from moejax.convert import output, to_hf, to_run, upcycle


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m moejax.convert", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("hf-to-moejax", help="a Hugging Face folder as a run of ours")
    one.add_argument("source", metavar="SRC", help="folder with config.json and *.safetensors")
    one.add_argument("out", metavar="OUT", help="run folder to make, for init.from_run")
    one.add_argument(
        "--dtype", default="auto", choices=to_run.DTYPES,
        help="of the weights at rest; auto: of each array, what holds its tensors exactly",
    )  # fmt: skip
    one.add_argument(
        "--vocab-multiple", type=int, default=1, metavar="N",
        help="pad the vocabulary to a multiple, as model.vocab_multiple of the run (for its tp)",
    )  # fmt: skip
    one = commands.add_parser("moejax-to-hf", help="a run of ours as a Hugging Face folder")
    one.add_argument("run", metavar="RUN", help="run folder, or one checkpoint in it")
    one.add_argument("out", metavar="OUT", help="folder to make")
    one.add_argument(
        "--like", metavar="SRC", help="the checkpoint that the run came from, if it does not say"
    )
    one.add_argument(
        "--dtype", default="", choices=to_hf.DTYPES, help="of the weights (default: the origin's)"
    )
    one = commands.add_parser(
        "upcycle", help="a run's dense model with experts", description=upcycle.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    one.add_argument("run", metavar="RUN", help="run folder, or one checkpoint in it")
    one.add_argument("out", metavar="OUT", help="run folder to make, for init.from_run")
    one.add_argument("--experts", type=int, required=True, metavar="E", help="experts of a layer")
    one.add_argument("--top-k", type=int, required=True, metavar="K", help="experts of a token")
    one.add_argument("--granularity", type=int, default=1, metavar="G", help="parts of an MLP")
    one.add_argument(
        "--softmax", choices=("after", "before"), default="after",
        help="the top-k: weights that sum to 1, or those of a softmax over all experts",
    )  # fmt: skip
    one.add_argument("--scaling", choices=upcycle.SCALINGS, default="exact")
    one.add_argument("--seed", type=int, default=0, help="of the routers")
    return parser


def _run(args: argparse.Namespace) -> output.Amount:
    if args.command == "hf-to-moejax":
        return to_run.convert(args.source, args.out, args.dtype, args.vocab_multiple)
    if args.command == "moejax-to-hf":
        return to_hf.convert(args.run, args.out, args.like, args.dtype)
    after = args.softmax == "after"
    plan = upcycle.Plan(
        args.experts, args.top_k, args.granularity, after, args.scaling, args.seed
    )
    return upcycle.convert(args.run, args.out, plan)


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 0 done, 2 for what cannot be converted (one line on stderr)."""
    args = _parser().parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")  # shapes alone
    try:
        done = _run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: {done}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
