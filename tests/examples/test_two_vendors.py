"""The example of two vendors: the same start, and where the runs part and why."""

from __future__ import annotations

import msgspec
import pytest

from examples import gpt, two_vendors
from mpbackend.observe.record import Recorded

SMALL = gpt.Config(layers=1, heads=2, width=32, context=16, batch=8)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Recorded]:
    """Two steps of ``fp32-fast`` on both vendors."""
    folder = tmp_path_factory.mktemp("runs")
    return [two_vendors.train(spec, "fp32-fast", 2, folder / str(index), config=SMALL) for index, spec in enumerate(two_vendors.DEVICES)]


def test_the_runs_start_alike_and_part(runs: list[Recorded]) -> None:
    first, second = runs
    assert first.record.fingerprints == second.record.fingerprints
    found = two_vendors.parting(first, second)
    assert found.step in (1, 2)
    assert found.first != found.second
    assert 0 < found.largest < 0.01
    text = two_vendors.describe(first, second)
    assert "fp32-fast on h100 (emulated) and on ascend-910b3 (emulated), 2 steps" in text
    assert "the same weights at the start and the same data" in text
    assert f"the losses part at step {found.step}: " in text


def test_it_says_what_was_planned_otherwise(runs: list[Recorded]) -> None:
    lines = list(two_vendors.differences(*runs))
    assert "compute.forward, compute.dgrad, compute.wgrad, compute.forward (conv): tf32 (native) on h100, hf32_e8m11 (native) on ascend-910b3" in lines
    assert "switches that only ascend-910b3 has: conv.allow_hf32=True, matmul.allow_hf32=True" in lines
    assert any(line.startswith("h100: ") and "steps of 8 products" in line for line in lines)
    assert any(line.startswith("ascend-910b3: assumed: nominal fp32") for line in lines)
    assert not any("left to the host" in line for line in lines), "what holds for both is no difference"


def test_a_run_does_not_part_from_itself(runs: list[Recorded]) -> None:
    run = runs[0]
    assert two_vendors.parting(run, run) == (None, run.steps[-1].loss, run.steps[-1].loss, 0.0)
    assert list(two_vendors.differences(run, run)) == []
    assert "no step's loss differs" in two_vendors.describe(run, run)


def test_other_data_is_said(runs: list[Recorded]) -> None:
    run = runs[0]
    other = msgspec.structs.replace(run, record=msgspec.structs.replace(run.record, fingerprints={"data": "x", "weights": "y"}))
    assert "did NOT start from the same weights and data" in two_vendors.describe(run, other)
