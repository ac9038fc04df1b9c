"""Workloads that audits are tested on; each does one thing that another device takes differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.gpt import GPT, Config
from mpbackend.observe.audit_workload import Workload

Pair = tuple[nn.Module, Callable[[], Tensor]]

GPT2 = Config(layers=12, heads=12, width=768, context=1024, batch=4, vocabulary=50257)
TINY = Config(layers=1, heads=2, width=16, context=8, batch=2, vocabulary=17)


def language_model(config: Config, device: torch.device) -> Workload:
    torch.manual_seed(0)
    model = GPT(config).to(device)
    tokens = torch.randint(config.vocabulary, (config.batch, config.context)).to(device)
    return Workload(model, lambda: functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()), tokens=tokens.numel())


def gpt2(device: torch.device) -> Workload:
    return language_model(GPT2, device)


def tiny(device: torch.device) -> Workload:
    return language_model(TINY, device)


def twice(device: torch.device) -> Pair:
    """The same layer two times."""
    layer = nn.Linear(8, 8).to(device)
    x = torch.ones(4, 8, device=device)
    return layer, lambda: layer(layer(x)).float().sum()


class Faulty(nn.Module):
    """A probability by sigmoid, a sum by scatter, and rows replaced by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        summed = torch.zeros(8, 16, device=x.device).scatter_add_(0, torch.zeros(8, 16, dtype=torch.int64, device=x.device), hidden)
        rows = torch.zeros(8, 16, device=x.device)
        rows[torch.arange(8, device=x.device)] = hidden
        return torch.sigmoid(self.head(hidden + summed + rows))


def faulty(device: torch.device) -> Pair:
    model = Faulty().to(device)
    x, wanted = torch.ones(8, 16, device=device), torch.ones(8, 1, device=device)
    return model, lambda: functional.binary_cross_entropy(model(x).float(), wanted)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(8, 16, device=x.device)
        out[torch.arange(8, device=x.device)] = self.body(x)
        return out


def masked(device: torch.device) -> Pair:
    model = Masked().to(device)
    x = torch.ones(8, 16, device=device)
    return model, lambda: model(x).sum()


def own_scaler(device: torch.device) -> Workload:
    """A loop of one's own that unscales bf16 gradients."""
    model = nn.Linear(8, 8).to(device).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type)
    x = torch.ones(4, 8, device=device, dtype=torch.bfloat16)

    def step() -> None:
        scaler.scale(model(x).float().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    return Workload(model, lambda: model(x).float().mean(), optimizer, step=step)


class Elsewhere(torch.autograd.Function):
    """A product whose casts are bound to a device type."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)  # type: ignore[untyped-decorator] # torch leaves it unannotated
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator] # as above
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Bound(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Elsewhere.apply(x, self.weight)  # type: ignore[no-untyped-call] # torch leaves it unannotated
        return out


def bound(device: torch.device) -> Pair:
    model = Bound().to(device)
    x = torch.ones(4, 8, device=device)
    return model, lambda: model(x).sum()


class HandNorm(nn.Module):
    """A norm written by hand, whose squares stay in the format of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def hand_norm(device: torch.device) -> Pair:
    model = nn.Sequential(nn.Linear(8, 8), HandNorm()).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(100.0)
    x = torch.ones(4, 8, device=device)
    return model, lambda: model(x).float().mean()


def in_a_thread(device: torch.device) -> Pair:
    import threading

    model = nn.Linear(8, 8).to(device)
    x = torch.ones(4, 8, device=device)

    def loss() -> Tensor:
        results: list[Tensor] = []
        thread = threading.Thread(target=lambda: results.append(model(x)))
        thread.start()
        thread.join()
        return results[0].float().sum()

    return model, loss


class Image(nn.Module):
    def __init__(self, *, plain: bool) -> None:
        super().__init__()
        self.first, self.second, self.plain = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), plain

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.first(x))
        out: Tensor = self.second(x.contiguous() if self.plain else x)
        return out


def image(device: torch.device, *, plain: bool = False) -> Pair:
    model = Image(plain=plain).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch annotates this for tensors only
    x = torch.ones(2, 3, 8, 8, device=device).contiguous(memory_format=torch.channels_last)
    return model, lambda: model(x).float().sum()


def image_in_plain_order(device: torch.device) -> Pair:
    return image(device, plain=True)


class Counting(nn.Module):
    """Norms that count their batches in a buffer of no dimensions, and a scale that is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.head, self.last = nn.Linear(8, 4), nn.BatchNorm1d(4)
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.head(self.norm(self.first(x)).mean((2, 3)))) * self.scale
        return out


def counting(device: torch.device) -> Pair:
    """Scalars that are moved to the device, and one that is made on it."""
    model = Counting().to(device)
    half = torch.tensor(0.5, device=device)
    x = torch.ones(4, 3, 8, 8, device=device)
    return model, lambda: model(x).float().square().mean() * half


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = self.layer(x.float())
        return out
