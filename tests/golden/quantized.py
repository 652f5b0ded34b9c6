"""The two quantised weight formats of published checkpoints, packed and unpacked for make.py.

FP8 (DeepSeek-V3): `W = q * weight_scale_inv[i // 128, j // 128]`; the last blocks may be ragged.
MXFP4 (gpt-oss): along the input dim, 32 values share a scale 2**(s - 127); a byte of `_blocks`
holds two e2m1 values, the earlier in its low nibble. Stored [E, out, in / 32, 16].
"""

import torch
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

BLOCK = 128
MAX_E4M3 = 448.0


def fp8_pack(weight: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (q float8_e4m3fn of weight's shape, scale_inv float32 [rows / 128, cols / 128])."""
    rows, cols = (-(-n // BLOCK) for n in weight.shape)
    # Blocks of unlike size, so that a wrong block's scale is far off.
    scale = 2.0 ** -(2 * torch.rand(rows, cols, generator=generator))
    q = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scale_inv = torch.empty(rows, cols)
    for i in range(rows):
        for j in range(cols):
            at = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            block = weight[at] * scale[i, j]
            scale_inv[i, j] = block.abs().max() / MAX_E4M3
            q[at] = (block / scale_inv[i, j]).to(q.dtype)
    return q, scale_inv


def fp8_unpack(q: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """Returns the bfloat16 weight: the product is taken in float32, then rounded once.

    As DeepSeek's own converter does (github.com/deepseek-ai/DeepSeek-V3, inference/kernel.py). What
    transformers 5.24 does as it loads such a file differs: README.md, "FP8".
    """
    rows, cols = q.shape
    scale = scale_inv.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
    weight = (q.float() * scale).bfloat16()
    theirs = _dequantize_fp8_weight(q, scale_inv, [BLOCK, BLOCK], torch.float32)
    assert torch.equal(weight, theirs.bfloat16())
    return weight


def mxfp4_draw(shape: torch.Size, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws (blocks uint8 [E, out, in / 32, 16], scales uint8 [E, out, in / 32])."""
    experts, fan_in, fan_out = shape
    assert fan_in % 32 == 0
    grouped = (experts, fan_out, fan_in // 32)
    blocks = torch.randint(256, (*grouped, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(121, 126, grouped, generator=generator, dtype=torch.uint8)
    return blocks, scales


def mxfp4_unpack(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns bfloat16 [E, in, out] from the definition of e2m1; transformers must agree."""
    code = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).int()
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, (code & 1).float()
    size = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1))
    value = torch.where(sign == 1, -size, size) * 2.0 ** (scales.float() - 127)[..., None]
    value = value.flatten(-2).mT.bfloat16().contiguous()
    assert torch.equal(value, convert_moe_packed_tensors(blocks, scales))
    return value
