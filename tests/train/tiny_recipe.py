"""A recipe that trains in seconds: the demo's, shrunk. `--config.data.train` names the text."""

from dataclasses import replace

from configs.demo import demo
from moejax.config import Config
from moejax.core.mesh import ParallelConfig
from moejax.core.precision import PrecisionConfig


def tiny() -> Config:
    """Two layers of four experts, 30 steps, a checkpoint every 5."""
    base = demo()
    attention = replace(base.model.attention, num_heads=4, num_kv_heads=2, head_dim=8)
    balance = replace(base.model.moe.balance, bias_rate=1e-3)
    moe = replace(base.model.moe, num_experts=8, ffn_dim=16, balance=balance)
    model = replace(
        base.model, vocab_size=304, dim=32, num_layers=2, attention=attention, moe=moe
    )
    return replace(
        base,
        name="tiny",
        model=model,
        precision=PrecisionConfig(compute_dtype="float32"),
        data=replace(base.data, vocab_size=300, holdout=0.3),
        train=replace(
            base.train, steps=30, batch_size=8, sequence_length=32, eval_every=0,
            eval_batches=2, sample_tokens=0,
        ),
        optimizer=replace(base.optimizer, warmup_steps=5),
        checkpoint=replace(base.checkpoint, save_every=5),
    )  # fmt: skip


def tiny_fold8() -> Config:
    """The same, on 8 simulated devices."""
    base = tiny()
    moe = replace(base.model.moe, dispatch="all_to_all")
    return replace(
        base,
        model=replace(base.model, moe=moe),
        parallel=ParallelConfig(dp=4, tp=2, ep=4, zero=3),
    )
