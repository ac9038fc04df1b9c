from __future__ import annotations

import torch
from torch import nn

import mpbackend
from mpbackend.observe.audit import SavedActivations
from mpbackend.observe.classes import is_held, observed_classes


def test_a_released_fp32_copy_is_not_counted() -> None:
    layer = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters())
    with mpbackend.select("cpu").prepare(layer, optimizer, "bf16-kahan") as session:
        with session.autocast():
            loss = layer(torch.ones(2, 8)).float().sum()
        session.backward(loss)
        session.step()
        assert session.weights is not None
        classes = observed_classes(layer, optimizer, SavedActivations([]).bytes, state=session.weights.held())
    # Kahan terms in the working format, two moments in fp32, and no third fp32 tensor.
    assert classes["optimizer state"] == {"bf16": 2 * 64, "fp32": 2 * 4 * 64}


def test_what_is_held() -> None:
    assert is_held(torch.zeros(3)) and is_held(torch.zeros(()))
    assert not is_held(torch.full((), 1.0).expand(3, 3))
    assert not is_held(torch.zeros(0))
