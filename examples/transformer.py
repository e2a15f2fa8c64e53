"""A transformer for sequences of bytes as they are built today, for language_model.py and language_model_plain.py."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZES = {
    "1m": (128, 5, 4),
    "3m": (192, 7, 6),
    "10m": (320, 8, 5),
    "30m": (512, 10, 8),
    "100m": (768, 14, 12),
    "300m": (1024, 24, 16),
}
"""Width, blocks and heads of a model with about as many million parameters as its name says."""
VOCABULARY = 256


class Transformer(nn.Module):
    """Decoder-only, with pre-normalization by RMSNorm, rotary positions and SwiGLU, as Llama (Touvron et al. 2023).

    Args:
        width: of the embedding; a multiple of twice the number of heads.
        blocks: self-attention and feed-forward, each with a residual connection.
        heads: of each block's attention.
        length: the longest sequence, in bytes.
    """

    def __init__(self, width: int, blocks: int, heads: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.RMSNorm(width)
        self.logits = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("rotations", rotations(length, width // heads), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:  # GPT-2's (Radford et al. 2019): what ends in a residual sum starts smaller
                scale = 1 / math.sqrt(2 * blocks) if name.endswith("out.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, inputs: Tensor) -> Tensor:
        """Bytes (samples, length) to logits (samples, length, 256) of the byte that follows each."""
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x, self.rotations[:, : inputs.shape[1]])  # type: ignore[index]  # a buffer is a tensor
        logits: Tensor = self.logits(self.norm(x))
        return logits


class Block(nn.Module):
    """Self-attention, then a feed-forward layer of 8/3 of the width, which SwiGLU's third matrix makes up for."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        hidden = 32 * round(width * 8 / 3 / 32)
        self.gate_and_up = nn.Linear(width, 2 * hidden, bias=False)
        self.feed_forward_out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        """Vectors (samples, length, width) to the same shape; `rotations` are cosine and sine by place."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key = rotate(qkv[0], rotations), rotate(qkv[1], rotations)
        attended = F.scaled_dot_product_attention(query, key, qkv[2], is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_and_up(self.feed_forward_norm(x)).chunk(2, dim=2)
        out: Tensor = x + self.feed_forward_out(F.silu(gate) * up)
        return out


def rotations(length: int, size: int) -> Tensor:
    """Return cosine and sine of each place's angles, shape (2, length, size / 2) (Su et al. 2021, section 3.2.2)."""
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(length), frequencies)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotate each pair of a vector's halves by its place's angles; `x` has shape (samples, heads, length, size)."""
    cosine, sine = rotations.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return two groups: matrices, which decay, and the norms' vectors, which do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
