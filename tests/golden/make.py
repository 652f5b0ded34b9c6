"""Makes the folders beside this file: tiny random models with what Hugging Face computes for them.

    python3.11 -m venv oracle
    oracle/bin/pip install torch==2.13.0 transformers==5.24.0 safetensors==0.8.0 numpy==2.4.6
    oracle/bin/python tests/golden/make.py [variant ...]

No test imports this file: torch is not among the dependencies of the tests. Each run writes the
same bytes. README.md says what each file holds; families.py lists the models.

The weights are drawn by their published names, written, and read back by transformers, in float32
with eager attention. A seed is rejected until every choice of the router is clear by MIN_GAP, so
that no rounding can flip one.
"""

import json
import logging
import re
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from families import VARIANTS, Variant
from quantized import fp8_pack, fp8_unpack, mxfp4_draw, mxfp4_unpack
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

HERE = Path(__file__).parent
MIN_GAP = 1e-3
EAGER = dict(attn_implementation="eager", experts_implementation="eager")
Tensors = dict[str, torch.Tensor]


def names_and_shapes(variant: Variant) -> tuple[dict, dict[str, torch.Size]]:
    """Returns HF's config.json of the variant, and the names and shapes of what HF would save."""
    config = AutoConfig.for_model(variant.model_type, **variant.config)
    model = AutoModelForCausalLM.from_config(config, **EAGER)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = load_file(f"{folder}/model.safetensors")
        config = json.loads(Path(folder, "config.json").read_text())
    shapes = {name: tensor.shape for name, tensor in sorted(saved.items())}
    if variant.mtp:
        layer, last = config["num_hidden_layers"], config["num_hidden_layers"] - 1
        hidden, vocab = config["hidden_size"], config["vocab_size"]
        new, old = f"model.layers.{layer}.", f"model.layers.{last}."
        block = {n.replace(old, new): s for n, s in shapes.items() if n.startswith(old)}
        norms = ("enorm", "hnorm", "shared_head.norm")
        shapes |= block | {f"{new}{n}.weight": torch.Size([hidden]) for n in norms}
        shapes[f"{new}eh_proj.weight"] = torch.Size([hidden, 2 * hidden])
        for name in ("embed_tokens", "shared_head.head"):
            shapes[f"{new}{name}.weight"] = torch.Size([vocab, hidden])
    return config, shapes


def draw(variant: Variant, shapes: dict[str, torch.Size], seed: int) -> Tensors:
    """Draws each tensor, in the order of the names, so that logits are of order 1."""
    generator = torch.Generator().manual_seed(seed)
    tied = variant.config.get("tie_word_embeddings", False)
    tensors = {}
    for name, shape in sorted(shapes.items()):
        value = torch.randn(shape, generator=generator)
        leaf = name.removesuffix(".weight").split(".")[-1]
        if "norm" in leaf:
            value = 1 + 0.3 * value
        elif leaf in ("bias", "e_score_correction_bias") or leaf.endswith("_bias"):
            value = 0.2 * value
        elif leaf in ("gate", "router"):  # of the router; an expert's is gate_proj
            value = 2 * value * shape[-1] ** -0.5
        elif leaf == "embed_tokens":
            value = 0.3 * value if tied else value
        elif leaf != "sinks":
            # Of all weights, only the experts of gpt_oss are stored [in, out].
            fan_in = shape[-1] if name.endswith(".weight") else shape[-2]
            value = value * fan_in**-0.5
        for part, factor in variant.gain.items():
            value = value * factor if part in name else value
        exact = any(part in name for part in variant.float32)
        tensors[name] = value if exact else value.bfloat16()
    if variant.mtp:  # the published checkpoint holds copies of what it shares with the main model
        prefix = f"model.layers.{variant.config['num_hidden_layers']}."
        tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return tensors


def quantize(variant: Variant, plain: Tensors, seed: int) -> tuple[Tensors, Tensors]:
    """Returns (tensors as stored, bfloat16 values that the quantised ones stand for)."""
    stored, meant = {}, {}
    generator = torch.Generator().manual_seed(seed)
    for name, value in plain.items():
        if variant.store == "mxfp4" and re.search(r"experts\.(gate_up|down)_proj$", name):
            blocks, scales = mxfp4_draw(value.shape, generator)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            meant[name] = mxfp4_unpack(blocks, scales)
        elif variant.store == "fp8" and re.search(r"_proj(_with_mqa)?\.weight$", name):
            stored[name], stored[f"{name}_scale_inv"] = fp8_pack(value.float(), generator)
            meant[name] = fp8_unpack(stored[name], stored[f"{name}_scale_inv"])
        else:
            stored[name] = value
    return stored, meant


def published_config(variant: Variant, config: dict) -> dict:
    """Rewrites HF's keys as those of published files, if the variant asks for them."""
    config = config | {"dtype": "bfloat16"}
    if variant.published is None:
        return config
    config["torch_dtype"] = config.pop("dtype")
    del config["transformers_version"]
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    rope.pop("partial_rotary_factor", None)
    kind = rope.pop("rope_type")
    old = "type" if variant.model_type.startswith("deepseek") else "rope_type"
    config["rope_scaling"] = None if kind == "default" else {old: kind, **rope}
    if variant.model_type.startswith("deepseek"):
        for key in ("head_dim", "qk_head_dim", "rope_interleave", "output_router_logits"):
            config.pop(key, None)
    if variant.model_type == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    return dict(sorted((config | variant.published).items()))


def write_checkpoint(folder: Path, config: dict, tensors: Tensors, shards: int) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata)
        return
    names, files = sorted(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata)
        files |= dict.fromkeys(part, file)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def load(folder: str, changes: dict | None = None) -> torch.nn.Module:
    """Returns HF's model of a folder in float32; every tensor is used, but those of MTP layers."""
    config = AutoConfig.from_pretrained(folder)
    for key, value in (changes or {}).items():
        setattr(config, key, value)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, output_loading_info=True, **EAGER
    )
    beyond = f"model.layers.{config.num_hidden_layers}."
    unused = [k for k in info["unexpected_keys"] if not k.startswith(beyond)]
    wrong = [*unused, *info["missing_keys"], *info["mismatched_keys"], *info.get("error_msgs", ())]
    assert not wrong, wrong
    return model.eval()


def watch(model: torch.nn.Module) -> tuple[list, list]:
    """Returns lists that the next forward fills: the routers' outputs, the layers' outputs."""
    routed, layers = [], []
    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(lambda m, args, out: routed.append((m, *out)))
    for layer in getattr(model, "model", model).layers:
        layer.register_forward_hook(lambda m, args, out: layers.append(out))
    return routed, layers


def select(config, router: torch.nn.Module, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns (ids in rising order, gap) of each token by our own reading of the selection.

    The gap is that of the last score taken to the first one left, over experts and over groups.
    """
    groups, experts = 1, logits.shape[-1]
    if config.model_type == "gpt_oss":
        score = logits
    elif config.model_type in ("deepseek_v3", "glm4_moe"):
        score = logits.sigmoid() + router.e_score_correction_bias
        groups = config.n_group
    else:
        score = logits.softmax(-1)
        if getattr(config, "topk_method", None) == "group_limited_greedy":
            groups = config.n_group
    gap = torch.full(score.shape[:1], torch.inf)
    if groups > 1:
        inside = score.unflatten(-1, (groups, -1)).sort(-1, descending=True).values
        of_group = inside[..., : 2 if config.model_type != "deepseek_v2" else 1].sum(-1)
        ranked = of_group.sort(-1, descending=True).values
        if config.topk_group < groups:
            gap = ranked[:, config.topk_group - 1] - ranked[:, config.topk_group]
        kept = of_group >= ranked[:, config.topk_group - 1, None]
        score = score.where(kept.repeat_interleave(experts // groups, -1), -torch.inf)
    taken = config.num_experts_per_tok
    ranked, ids = score.sort(-1, descending=True)
    gap = torch.minimum(gap, ranked[:, taken - 1] - ranked[:, taken])
    return ids[:, :taken].sort(-1).values, gap


def routing(config, routed: list) -> Tensors:
    """Stacks the routers' outputs over layers, the choices of a token in rising order of id."""
    found = {"router_logits": [], "choices": [], "choice_weights": [], "choice_gap": []}
    for router, logits, weights, ids in routed:
        order = ids.argsort(-1)
        ours, gap = select(config, router, logits.detach().float())
        assert torch.equal(ours, ids.gather(-1, order)), "our selection is not theirs"
        rows = (logits, ids.gather(-1, order).int(), weights.gather(-1, order), gap)
        for key, row in zip(found, rows, strict=True):
            found[key].append(row.detach())
    return {key: torch.stack(rows) for key, rows in found.items()}


GRADIENTS = r"""model\.(norm\.weight|embed_tokens\.weight
|layers\.0\.self_attn\.((kv_b_proj|k_proj)\.(weight|bias)|sinks|o_proj\.bias
|(q_norm|k_norm|kv_a_layernorm|q_a_layernorm)\.weight)
|layers\.LAST\.(mlp\.((gate|router)\.(weight|bias)|shared_expert_gate\.weight|experts\..*)
|post_attention_layernorm\.weight))""".replace("\n", "")


def gradients(model: torch.nn.Module, prefix: str, last: int, choices: torch.Tensor) -> Tensors:
    """Collects gradients under published names; of the experts, that of the busiest of a layer."""
    busiest = int(choices.flatten().bincount().argmax())
    found = {}
    for name, parameter in model.named_parameters():
        if not re.fullmatch(GRADIENTS.replace("LAST", str(last)), name):
            continue
        grad = parameter.grad.clone()
        mixtral = model.config.model_type == "mixtral"
        name = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        if ".experts." not in name or model.config.model_type == "gpt_oss":
            # The MXFP4 ones are no parameters that anyone trains.
            if grad.numel() < 8192:
                found[prefix + name] = grad
            continue
        old = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        start, which = name.rsplit(".", 1)
        parts = grad[busiest].chunk(2) if which == "gate_up_proj" else [grad[busiest]]
        leaves = old[:2] if which == "gate_up_proj" else old[2:]
        for leaf, part in zip(leaves, parts, strict=True):
            found[f"{prefix}{start}.{busiest}.{leaf}.weight"] = part.clone()
    return found


def golden(variant: Variant, model: torch.nn.Module, ids: torch.Tensor) -> Tensors | None:
    """Returns what HF computes for the ids, or None if a choice of a router is not clear."""
    routed, layers = watch(model)
    logits = model(ids, use_cache=False).logits
    found = routing(model.config, routed)
    if found["choice_gap"].min() < MIN_GAP:
        return None
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    theirs = model(ids, labels=ids, use_cache=False).loss
    assert torch.isclose(loss, theirs, atol=1e-6), (loss, theirs)
    found |= {"input_ids": ids.int(), "logits": logits, "loss": loss}
    found["layer_outputs"] = torch.stack([x[0] for x in layers[: len(model.model.layers)]])
    last = max(i for i, x in enumerate(model.model.layers) if hasattr(x.mlp, "experts"))
    found |= gradients(model, "grad/", last, found["choices"][-1])
    if hasattr(model, "router_aux_loss_coef"):
        found["aux_loss"] = model(ids, output_router_logits=True, use_cache=False).aux_loss
    return {key: value.detach().contiguous() for key, value in found.items()}


def mtp_golden(model: torch.nn.Module, plain: Tensors, ids: torch.Tensor) -> Tensors | None:
    """Returns logits, loss, routing and gradients of the MTP layer, or None as `golden` does.

    At position i it takes h_i, the main model's hidden state after its final norm, and token i+1,
    and predicts token i+2: eh_proj(concat(enorm(embed(t_{i+1})), hnorm(h_i))) -> a decoder layer of
    MoE -> shared_head.norm -> shared_head.head. The embedding comes first, though equation 21 of
    the DeepSeek-V3 report (arXiv 2412.19437) writes the hidden state first: so do vLLM
    (vllm/model_executor/models/deepseek_mtp.py), SGLang (srt/models/deepseek_nextn.py) and Megatron
    (github.com/NVIDIA/Megatron-LM/issues/1588: the published weights follow this order). vLLM hands
    on h after the final norm, as transformers does (generation/candidate_generator.py).
    """
    config, main = model.config, model.model
    prefix = f"model.layers.{config.num_hidden_layers}."
    own = {k.removeprefix(prefix): v.float() for k, v in plain.items() if k.startswith(prefix)}
    layer = type(main.layers[-1])(config, config.num_hidden_layers)
    norms = {}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        norms[name] = type(main.norm)(config.hidden_size, config.rms_norm_eps)
        norms[name].load_state_dict({"weight": own[f"{name}.weight"]})
    block = {k: v for k, v in own.items() if k in layer.state_dict()}
    experts = [f"mlp.experts.{e}." for e in range(config.n_routed_experts)]
    gate_up = [torch.cat([own[e + "gate_proj.weight"], own[e + "up_proj.weight"]]) for e in experts]
    block["mlp.experts.gate_up_proj"] = torch.stack(gate_up)
    block["mlp.experts.down_proj"] = torch.stack([own[e + "down_proj.weight"] for e in experts])
    layer.load_state_dict(block)
    eh_proj = own["eh_proj.weight"].requires_grad_()
    model.zero_grad()
    routed, _ = watch(torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])}))
    hidden = main(ids, use_cache=False).last_hidden_state[:, :-1]
    ahead = main.embed_tokens(ids[:, 1:])
    x = torch.cat([norms["enorm"](ahead), norms["hnorm"](hidden)], -1) @ eh_proj.T
    steps = x.shape[1]
    mask = torch.full((steps, steps), -torch.inf).triu(1)[None, None]
    position = main.rotary_emb(x, torch.arange(steps)[None])
    x = layer(x, attention_mask=mask, position_embeddings=position)
    logits = model.lm_head(norms["shared_head.norm"](x))
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 2:].flatten())
    loss.backward()
    found = {f"mtp_{k}": v for k, v in routing(config, routed).items()}
    if found["mtp_choice_gap"].min() < MIN_GAP:
        return None
    theirs = their_mtp(model, own, layer, hidden, ids)
    assert torch.allclose(logits, theirs, atol=1e-5), (logits - theirs).abs().max()
    found |= {"mtp_logits": logits, "mtp_loss": loss}
    found[f"mtp_grad/{prefix}eh_proj.weight"] = eh_proj.grad
    for name, norm in norms.items():
        found[f"mtp_grad/{prefix}{name}.weight"] = norm.weight.grad
    found[f"mtp_grad/{prefix}mlp.gate.weight"] = layer.mlp.gate.weight.grad
    main_too = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    found |= {f"mtp_grad/{n}": model.get_parameter(n).grad for n in main_too}
    return {key: value.detach().contiguous() for key, value in found.items()}


def their_mtp(model, own: Tensors, layer, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The same logits by the MTP module of transformers, which names its parts otherwise."""
    theirs = MtpModel(model, 1).eval()
    state = {f"mtp_block.{k}": v for k, v in layer.state_dict().items()}
    state |= {f"{k}.weight": own[f"{k}.weight"] for k in ("enorm", "hnorm", "eh_proj")}
    state["post_norm.weight"] = own["shared_head.norm.weight"]
    theirs.layers[0].load_state_dict(state)
    position = torch.arange(1, ids.shape[1])[None]
    return model.lm_head(theirs.forward_layer(0, hidden, position, None, input_ids=ids[:, 1:]))


def make(variant: Variant) -> None:
    """Writes the folder of a variant, with the first seed whose choices are all clear."""
    base, shapes = names_and_shapes(variant)
    config = published_config(variant, base)
    start = 1000 * sum(variant.name.encode())
    for seed in range(start, start + 500):
        plain = draw(variant, shapes, seed)
        stored, meant = quantize(variant, plain, seed)
        plain |= meant
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(variant.config["vocab_size"], (2, variant.length), generator=generator)
        with tempfile.TemporaryDirectory() as folder:
            unquantized = {k: v for k, v in config.items() if k != "quantization_config"}
            write_checkpoint(Path(folder), unquantized, plain, variant.shards)
            model = load(folder)
            found = golden(variant, model, ids)
            if found is not None and variant.mtp:
                more = mtp_golden(model, plain, ids)
                found = None if more is None else found | more
            if found is None:
                continue
            for changes in variant.ablate:
                changed = load(folder, changes)(ids, use_cache=False).logits - found["logits"]
                assert changed.abs().max() > 1e-3, (variant.name, changes, changed.abs().max())
        break
    else:
        raise RuntimeError(f"{variant.name}: no seed makes every choice clear")
    folder = HERE / variant.name
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    write_checkpoint(folder, config, stored, variant.shards)
    save_file(found, folder / "golden.safetensors")
    if meant:
        some = r"layers\.0\.(mlp\.experts|mlp\.(gate|down)_proj|self_attn)|experts\.0\."
        shown = {k: v for k, v in meant.items() if re.search(some, k)}
        save_file(shown, folder / "dequantized.safetensors", {"format": "pt"})
    size = sum(file.stat().st_size for file in folder.iterdir())
    spread, gap = found["logits"].std(), found["choice_gap"].min()
    print(
        f"{variant.name:22} seed {seed - start:3} {size / 1024:4.0f} KiB  loss {found['loss']:.3f}"
        f"  logits {spread:.2f}  gap {gap:.1e}  {variant.shows}"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    wanted = sys.argv[1:] or [v.name for v in VARIANTS]
    unknown = set(wanted) - {v.name for v in VARIANTS}
    if unknown:
        sys.exit(f"no variant {sorted(unknown)}; there are {[v.name for v in VARIANTS]}")
    for each in VARIANTS:
        if each.name in wanted:
            make(each)
