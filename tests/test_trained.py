"""Opening models: from a run, from one checkpoint, from Hugging Face; what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from moejax import evaluate, generate, trained
from moejax.core.mesh import ParallelConfig
from moejax.train import loop, setup
from tests.models import hf_folder
from tests.train.test_loop import config, folder
from tests.train.test_resume import CHILD

ROOT = Path(__file__).parent.parent
__all__ = ["folder"]  # a fixture


@pytest.fixture(scope="module")
def run(folder):
    """A run of a few steps."""
    made = setup.prepare(config(folder, "trained", steps=6))
    loop.train(made)
    return made


def test_a_run_is_opened_as_it_was_trained(run, tmp_path):
    """Weights to the bit, the tokenizer from the run's own folder, wherever that lies now."""
    moved = run.config.run_dir.rename(tmp_path / "moved")
    for where in (moved, moved / "checkpoints/6"):
        model = trained.load(str(where))
        assert model.tokenizer.fingerprint == run.tokenizer.fingerprint
        assert model.length == run.config.train.sequence_length
        for mine, right in zip(model.weights, (run.state.params, run.state.buffers), strict=True):
            jax.tree.map(np.testing.assert_array_equal, mine, right)
    narrow = trained.load(str(moved), dtype="bfloat16")
    moe = narrow.weights[0]["stack_0"]["block_0"]["moe"]
    assert moe["experts"]["w_in"].dtype == "bfloat16" and moe["w_router"].dtype == "float32"
    moved.rename(run.config.run_dir)


def test_what_is_no_model_is_refused_in_a_line(run, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is no folder: give a run folder, one"):
        trained.load("nowhere")
    with pytest.raises(FileNotFoundError, match="no checkpoint in .*; give a run folder"):
        trained.load(str(tmp_path))
    where = hf_folder(tmp_path / "hf", "qwen3_moe_untied")
    with pytest.raises(ValueError, match="vocab_size=.* does not divide over pp . tp = 3"):
        trained.load(str(where), ParallelConfig(tp=3, dp=1, ep=3, zero=0))
    (where / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="no file .*tokenizer.json"):
        trained.load(str(where))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of --from=FOLDER and --config=FILE.py"),
        (["--from=a", "--config=b"], "give one of --from=FOLDER and --config"),
        (["--from=a", "--frm=b"], "unknown option --frm"),
        (["--from=a", "--config.name=b"], "unknown option --config.name=b"),
        (["--from=a", "--dtype=int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--from=a", "--tp=3", "--ep=4"], "--tp=3, --ep=4: let one be a multiple of the other"),
        (["--config=configs/demo.py:nothing"], "no recipe 'nothing'"),
    ],
)
def test_a_wrong_option_is_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        trained.parse(evaluate.options(), arguments)
    assert "\n" not in str(caught.value)


def test_a_recipe_names_its_run():
    parsed = trained.parse(
        generate.options(), ["--config=configs/demo.py", "--config.runs_dir=there", "--ep=4", "x"]
    )
    assert parsed.where == "there/demo" and parsed.prompt == "x"
    assert (parsed.parallel.dp, parsed.parallel.ep) == (4, 4)


def program(name: str, *arguments: str, text: str = "") -> subprocess.CompletedProcess:
    environment = os.environ | CHILD | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", f"moejax.{name}", *arguments], env=environment, text=True,
        capture_output=True, timeout=240, input=text,
    )  # fmt: skip


def test_both_programs_run_from_the_command_line(run, tmp_path):
    where = f"--from={run.config.run_dir}"
    made = program("generate", where, "--max-tokens=5", "--ep=2", text="the cat\n")
    assert made.returncode == 0, made.stderr
    assert made.stdout.strip() and made.stderr.startswith("[") and "tokens" in made.stderr
    text, questions = tmp_path / "text.txt", tmp_path / "questions.jsonl"
    text.write_text("the cat sat on a mat\n" * 20)
    questions.write_text(json.dumps({"question": "the", "choices": ["cat", "zzz"], "answer": 0}))
    made = program("evaluate", where, f"--text={text}", f"--choices={questions}", "--context=20")
    assert made.returncode == 0, made.stderr
    for word in ("420 bytes; windows of 20 tokens, 10 apart", "nats per token", "bits per byte",
                 "perplexity", "1 questions; by chance 0.5000", "accuracy per token"):
        assert word in made.stdout  # fmt: skip
    for arguments in ([], [f"--text={tmp_path}/none"]):
        made = program("evaluate", where, *arguments)
        assert made.returncode == 2 and len(made.stderr.splitlines()) == 1, made.stderr
        assert made.stderr.startswith("error: ")


def test_importing_the_package_is_light_and_its_names_are_there():
    code = (
        "import sys, moejax; assert 'jax' not in sys.modules; "
        "from moejax import MoE, MoEConfig, ModelConfig, Transformer; "
        "assert Transformer.__module__ == 'moejax.model.transformer'; assert 'jax' in sys.modules; "
        "import pytest; pytest.raises(AttributeError, lambda: moejax.Nothing)"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)
