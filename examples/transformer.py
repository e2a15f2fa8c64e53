"""A small transformer that predicts the next byte, for next_byte.py and next_byte_plain.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.datasets.text import LONGEST, VOCABULARY


class Transformer(nn.Module):
    """Decoder-only; normalizes before each layer, as GPT-2 does (Radford et al., 2019); without dropout.

    Args:
        width: of the embedding; a multiple of the number of heads.
        layers: self-attention and feed-forward, each with a residual connection.
        heads: of each layer's attention.
    """

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(0.02 * torch.randn(LONGEST, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, VOCABULARY)

    def forward(self, inputs: Tensor) -> Tensor:
        """Bytes (lines, length) to logits (lines, length, 256) of the byte that follows each."""
        length = inputs.shape[1]
        x = self.tokens(inputs) + self.places[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=inputs.device)
        logits: Tensor = self.logits(self.norm(self.layers(x, mask=mask, is_causal=True)))
        return logits


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return two groups: matrices, which decay, and vectors (biases and norms), which do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
