"""The planner's command line: what it prints and writes, and one line for each mistake."""

import json

import pytest

from moejax.config import REPOSITORY, load_recipe
from moejax.plan.__main__ import main, options, target
from moejax.plan.estimate import estimate
from moejax.plan.search import price

QWEN = f"--config={REPOSITORY / 'configs/qwen3_moe.py'}"


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "give a --config=FILE.py"),
        (["--config=configs/nothing.py"], "no such file"),
        ([f"{QWEN}:qwen3_9b"], "no recipe 'qwen3_9b'"),
        ([f"{QWEN}:qwen3_30b_a3b"], "says no cluster: give --gpus"),
        ([f"{QWEN}:30b_a3b_h100x16", "--gpus=h900x8"], "names no cluster"),
        ([f"{QWEN}:30b_a3b_h100x16", "--gpus=h100x8"], "add --config.parallel.dp=0"),
        ([f"{QWEN}:30b_a3b_h100x16", "--gpu=h100x8"], "unknown option --gpu=h100x8"),
        ([f"{QWEN}:30b_a3b_h100x16", "--config.paralel.dp=0"], "the nearest is"),
        ([f"{QWEN}:30b_a3b_h100x16", "--config.parallel.ep=7"], "experts"),
        ([f"{QWEN}:30b_a3b_h100x16", "--top=0"], "a number from 1 on"),
        ([f"{QWEN}:30b_a3b_h100x16", "--config.train.microbatches=48"], "does not divide"),
        ([f"{QWEN}:h100x16", f"{QWEN}:h100x256", "--search"], "takes one --config"),
    ],
)
def test_mistakes_get_one_line_and_status_2(arguments, says, capsys, tmp_path):
    assert main([*arguments, "--analytic", f"--out={tmp_path}"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and said.err.count("\n") == 1
    assert says in said.err and not list(tmp_path.iterdir())


def test_a_plan_is_printed_and_written(capsys, tmp_path):
    assert main([f"{QWEN}:h100x16", "--analytic", f"--out={tmp_path}", "--worst-case"]) == 0
    said = capsys.readouterr().out
    assert "On 16 H100s this step fits" in " ".join(said.split()) and "zero gather" in said
    assert "To run an overflowed batch again takes" in " ".join(said.split())
    (record,) = json.loads((tmp_path / "plan.json").read_text())
    config, cluster, num_gpus = target(options([f"{QWEN}:h100x16"]), f"{QWEN[9:]}:h100x16")
    assert record["seconds"] == price(config, cluster, num_gpus).seconds
    again = estimate(config, config.fold_over(num_gpus), worst_case=True)
    assert record["memory_again"] == again.total and record["over_again"] == 0
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_another_cluster_and_flags_act_on_the_recipe(tmp_path):
    arguments = [
        f"{QWEN}:30b_a3b_h100x16", "--gpus=gb200x8", "--config.parallel.dp=0",
        "--config.parallel.ep=8",
    ]  # fmt: skip
    assert main([*arguments, "--analytic", f"--out={tmp_path}"]) == 0
    (record,) = json.loads((tmp_path / "plan.json").read_text())
    assert (record["cluster"], record["num_gpus"]) == ("gb200", 8)
    assert record["config"]["parallel"]["ep"] == 8


def test_several_recipes_are_compared_and_status_1_means_none_fits(capsys, tmp_path):
    v3 = f"--config={REPOSITORY / 'configs/deepseek_v3.py'}:v3"
    all_of = ["--gpus=h100x256", "--analytic"]
    both = [f"{QWEN}:235b_a22b_h100x256", v3, *all_of]
    assert main([*both, f"--out={tmp_path}"]) == 0
    assert "Plans" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "plan.json").read_text())) == 2
    assert main([v3, "--gpus=h100x256", "--analytic", f"--out={tmp_path}"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "exceeds what H100 GPUs hold by" in said and "Ways under it" in said


def test_a_search_writes_a_recipe_that_runs_as_it_is(capsys, tmp_path):
    arguments = [
        f"{QWEN}:30b_a3b_h100x16", "--gpus=h100x4", "--config.model.num_layers=4",
        "--config.train.batch_size=16", "--config.train.microbatches=4",
        "--config.parallel.ep=4",
    ]  # fmt: skip
    assert main([*arguments, "--search", "--analytic", f"--out={tmp_path}"]) == 0
    path = tmp_path / "qwen3_30b_a3b_planned_h100x4.py"
    config = load_recipe(str(path))
    (record,) = json.loads((tmp_path / "plan.json").read_text())
    assert config.name == path.stem and config.model.num_layers == 4
    kept = json.loads(json.dumps(record["config"]))
    assert config.parallel.ep == kept["parallel"]["ep"]
    assert config.train.microbatches == kept["train"]["microbatches"]
    config.fold_over(4)
    assert f"--config={path}" in "".join(capsys.readouterr().out.split())
    assert main([f"--config={path}", "--analytic", f"--out={tmp_path}"]) == 0


def test_help_is_the_module_s(capsys):
    assert main(["--help"]) == 0
    assert "--worst-case" in capsys.readouterr().out
