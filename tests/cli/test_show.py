from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from click.testing import Result

import mpbackend


def test_recorded_runs_stand_side_by_side(invoke: Callable[..., Result], tmp_path: Path) -> None:
    target = mpbackend.select("cpu")
    for recipe in ("fp32", "bf16"):
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with target.prepare(model, optimizer, recipe, on_unsupported="emulate", record=tmp_path / recipe) as session:
            with session.autocast():
                loss = model(torch.ones(2, 4)).sum()
            session.backward(loss)
            session.step()
    result = invoke("show", str(tmp_path / "fp32"), str(tmp_path / "bf16"), "--format", "json")
    document = json.loads(result.stdout)
    assert document["recipes"] == ["fp32", "bf16"]
    assert document["lines"]["compute, observed"] == ["fp32", "bf16"]
    assert "bf16" in invoke("show", str(tmp_path / "bf16")).stdout


def test_a_folder_that_is_no_record_is_one_line(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "a record is a folder with record.json" in refused("show", str(tmp_path))
