"""A small GPT that learns to write English, character by character.

The text is CPython's own help topics, which every installation carries. ``train`` is the whole recipe of a run: the same lines under fp32, bf16 and fp16.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import mpbackend

SIDE_BY_SIDE = ("h100", "ascend-910b3")
"""Devices whose arithmetic ``mpbackend demo`` shows beside the runs."""


@dataclass(frozen=True)
class Config:
    """Size of the model and of a batch."""

    layers: int = 3
    heads: int = 4
    width: int = 128
    context: int = 96
    batch: int = 24
    vocabulary: int = 96


class Block(nn.Module):
    """Attention and a two-layer network, each with a norm in front and a residual around."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, time, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        hidden: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return hidden


class GPT(nn.Module):
    """Token and position embeddings, blocks, and logits from the token embedding."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, time) to logits (batch, time, vocabulary)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.token(tokens) + self.position(positions))
        return functional.linear(self.norm(x), self.token.weight)


def corpus() -> Tensor:
    """Return the text as tokens: printable ASCII, everything else a blank."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return torch.tensor([ord(c) - 31 if " " <= c <= "~" else 0 for c in text])


def batches(text: Tensor, config: Config, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``steps`` batches of inputs and next characters, the same for the same seed on every machine."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - config.context - 1, (config.batch,), generator=generator)
        rows = torch.stack([text[start : start + config.context + 1] for start in starts.tolist()])
        yield rows[:, :-1], rows[:, 1:]


def train(target: mpbackend.Target, plan: mpbackend.Plan, record: str, steps: int, seed: int = 1, config: Config = Config()) -> Iterator[float | None]:
    """Train under a plan; yield after each step its loss where the host knows it (every tenth step), else None."""
    torch.manual_seed(seed)
    model = GPT(config).to(target.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps + 1)
    data = batches(corpus(), config, steps, seed)
    with target.prepare(model, optimizer, plan=plan, clip_norm=1.0, scheduler=scheduler, record=record, seed=seed) as session:
        for number, (inputs, wanted) in enumerate(session.watch(data), 1):
            with session.autocast():
                logits = model(inputs.to(target.device))
                loss = functional.cross_entropy(logits.flatten(0, 1), wanted.to(target.device).flatten())
            session.backward(loss)
            session.step()
            yield loss.item() if number % 10 == 0 else None
