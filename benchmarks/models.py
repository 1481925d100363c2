"""The models. Those for a GPU compute their loss themselves, as the models of transformers do.

That is fair to accelerate, which casts the output of a model to float32: here one number, not all logits.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .sizes import PATCH, Size


class Block(nn.Module):
    def __init__(self, size: Size, *, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.is_causal = size.heads, is_causal
        self.before_attention, self.before_feedforward = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attend, self.project = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.widen, self.narrow = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attend(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.before_feedforward(x)), approximate="tanh"))


class GPT(nn.Module):
    """Predicts the next token; the head shares its weight with the embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size.classes, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.Sequential(*(Block(size, is_causal=True) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.apply(small)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.tokens(tokens) + self.places.weight))
        return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1), targets.flatten())


class ViT(nn.Module):
    """Classifies an image by the mean over its patches."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, size.width, PATCH, stride=PATCH)
        self.places = nn.Embedding(size.length, size.width)
        self.blocks = nn.Sequential(*(Block(size, is_causal=False) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.classes)
        self.apply(small)

    def forward(self, images: Tensor, kinds: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places.weight
        return F.cross_entropy(self.head(self.norm(self.blocks(x)).mean(1)), kinds)


def small(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def own_loss(model: Any, batch: Any) -> Tensor:
    return model(*batch)


def texts(size: Size, num: int, device: str) -> tuple[Tensor, Tensor]:
    """Random tokens, and the token after each."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(size.classes, (num, size.length + 1), generator=draw).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def images(size: Size, num: int) -> tuple[Tensor, Tensor]:
    """Random pixels in host memory."""
    draw, side = torch.Generator().manual_seed(0), PATCH * round(size.length**0.5)
    return torch.randn(num, 3, side, side, generator=draw), torch.randint(size.classes, (num,), generator=draw)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
