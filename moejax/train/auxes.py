"""What layers gave beside their output (aux): trees {stack or further module: {block: aux}}."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moejax.core import collectives


def _in_order(names: dict) -> list[str]:
    """Returns the names of stacks or blocks as the layers come: 2 before 10, "mtp_.." last."""
    return sorted(names, key=lambda name: (name.startswith("mtp"), len(name), name))


def by_layer(auxes: dict, name: str) -> Array:
    """Returns one aux of every MoE layer, stacked in the order of the layers: [layers, ...].

    A stack's have a leading dim of layers, a further module's have none.
    """
    found = []
    for stack in _in_order(auxes):
        each = [auxes[stack][block][name] for block in _in_order(auxes[stack])]
        if stack.startswith("mtp"):
            found += [a[None] for a in each]
        elif each:
            per_block = jnp.stack(each, axis=1)
            found.append(per_block.reshape(-1, *per_block.shape[2:]))
    return jnp.concatenate(found)


def by_block(tree: dict, name: str) -> dict:
    """Returns {stack: {block: the entry of that name}} of the blocks that have one."""
    return {
        stack: {block: node[name] for block, node in blocks.items()}
        for stack, blocks in tree.items()
        if all(name in node for node in blocks.values()) and blocks
    }


def load_added(buffers, auxes: dict, axes: tuple[str, ...]):
    """Returns the buffers with this microbatch's load, summed over the axes, added to that of those
    before it."""
    plain = by_block(auxes, "plain_load_E")
    if not plain:  # no loss reads it
        return buffers
    plain = collectives.psum(plain, axes)
    moes = by_block(buffers, "moe")
    return jax.tree.map(
        lambda moe, load: {"moe": moe | {"load_before": moe["load_before"] + load}},
        moes, plain, is_leaf=lambda node: "load_before" in node,
    )  # fmt: skip


def without(auxes: dict, name: str) -> dict:
    """Returns auxes that do not hold the entry of that name."""
    drop = lambda aux: {k: v for k, v in aux.items() if k != name}  # noqa: E731
    return {
        stack: {block: drop(aux) for block, aux in blocks.items()}
        for stack, blocks in auxes.items()
    }
