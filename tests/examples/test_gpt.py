"""The demo's model: it learns, the same data reaches every recipe, and a planted cast shows in the table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mpbackend
from examples import gpt
from mpbackend.observe.record import Recorded, load_record
from mpbackend.report.runs import run_lines

SMALL = gpt.Config(layers=1, heads=2, width=32, context=16, batch=8)


def run(folder: Path, recipe: str, steps: int = 2) -> Recorded:
    target = mpbackend.select("cpu")
    plan = target.plan(recipe, on_unsupported="emulate")
    losses = list(gpt.train(target, plan, str(folder), steps, config=SMALL))
    assert len(losses) == steps
    return load_record(folder)


def test_it_learns_and_every_recipe_sees_the_same_data(tmp_path: Path) -> None:
    runs = [run(tmp_path / recipe, recipe, steps=60) for recipe in ("fp32", "bf16", "fp16")]
    losses = [[row.loss for row in recorded.steps if isinstance(row.loss, float)] for recorded in runs]
    assert all(sum(series[-10:]) < 0.8 * sum(series[:10]) for series in losses), losses
    assert len({recorded.record.fingerprints["data"] for recorded in runs}) == 1
    assert len({recorded.record.fingerprints["weights"] for recorded in runs}) == 1
    assert run_lines(runs)["compute, observed"] == ["fp32", "bf16", "fp16"]


@pytest.mark.parametrize("recipe", ["bf16", "fp16"])
def test_a_planted_cast_in_the_model_changes_its_effective_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    plain = run(tmp_path / "plain", recipe)

    def cast(self: gpt.Block, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            out: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x.float()))))
        return out

    monkeypatch.setattr(gpt.Block, "forward", cast)
    planted = run(tmp_path / "planted", recipe)
    before, after = run_lines([plain, planted])["compute, observed"]
    assert before == recipe
    assert "fp32" in after


def test_the_example_stays_small() -> None:
    assert len(Path(gpt.__file__).read_text(encoding="utf-8").splitlines()) <= 120
