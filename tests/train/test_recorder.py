"""Records of loops that are not ours."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mpbackend
from mpbackend.errors import DocumentError, MpbackendError, SessionError, UnknownNameError
from mpbackend.observe.record import from_number

SETTINGS = {"clip_norm": "none", "clip_value": "none", "average": False}
STEPS = 12


def parts(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return a model, its optimizer and the batches of a run."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    batches = [(torch.randn(6, 8), torch.randn(6, 4)) for _ in range(STEPS)]
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), batches


def norm_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters() if parameter.grad is not None])


def loop(folder: Path, seed: int = 3, **options: Any) -> Path:
    """Train with plain torch and record."""
    model, optimizer, batches = parts(seed)
    with mpbackend.Recorder(folder, "fp32", seed=seed, model=model, optimizers=optimizer, **{"settings": SETTINGS, **options}) as recorder:
        for batch in batches:
            recorder.batch(batch)
            loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
            loss.backward()
            norm = norm_of(model)
            optimizer.step()
            recorder.step(loss, grad_norm=norm)
            optimizer.zero_grad()
    return folder


def conditions(baseline: Path, candidate: Path) -> dict[str, str]:
    """Return the status of the conditions that matter."""
    return {item.name: item.status for item in mpbackend.compare(baseline, candidate).conditions if item.matters}


def test_the_same_loop_twice_is_equivalent(tmp_path: Path) -> None:
    found = mpbackend.compare(loop(tmp_path / "one"), loop(tmp_path / "two"))
    assert found.verdict == "equivalent"
    assert "bit for bit" in found.reasons[0]


def test_another_seed_is_not_comparable(tmp_path: Path) -> None:
    found = mpbackend.compare(loop(tmp_path / "one"), loop(tmp_path / "two", seed=4))
    assert found.verdict == "not comparable"
    assert {reason.partition(" ")[0] for reason in found.reasons} >= {"seed", "initial", "data"}


def test_the_record_tells_what_was_read_and_what_was_stated(tmp_path: Path) -> None:
    content = mpbackend.load_record(loop(tmp_path / "run", device="h100"))
    record, rows = content.record, content.steps
    assert (record.recipe.text, record.recipe.granted, record.device.key, record.plan) == ("fp32", "unknown", "h100", ())
    assert record.settings == {"ranks": "1", "optimizers": "AdamW", "clip_norm": "none", "clip_value": "none", "average": "false"}
    assert any("nothing was observed" in note for note in record.notes)
    assert record.classes["parameters"].observed == {"fp32": 4 * (8 * 16 + 16 + 16 * 4 + 4)}
    assert record.classes["gradients"].observed == record.classes["parameters"].observed
    assert record.classes["activations"].observed == {}
    assert (record.totals.steps, record.totals.samples, len(rows)) == (STEPS, 6 * STEPS, STEPS)
    assert [row.step for row in rows] == list(range(1, STEPS + 1))
    assert rows[0].ms is None
    assert all(row.ms is not None and from_number(row.ms) > 0 for row in rows[1:])
    assert {row.lr for row in rows} == {1e-2}


def test_a_session_of_the_same_loop_has_the_same_conditions_and_numbers(tmp_path: Path) -> None:
    model, optimizer, batches = parts(3)
    with mpbackend.select("cpu").prepare(model, optimizer, "fp32", record=tmp_path / "session", seed=3) as session:
        for inputs, wanted in session.watch(batches):
            with session.autocast():
                loss = torch.nn.functional.mse_loss(model(inputs), wanted)
            session.backward(loss)
            session.step()
    ours, theirs = mpbackend.load_record(tmp_path / "session"), mpbackend.load_record(loop(tmp_path / "loop"))
    assert [row.loss for row in ours.steps] == [row.loss for row in theirs.steps]
    assert set(conditions(tmp_path / "session", tmp_path / "loop").values()) == {"same"}


def test_what_is_not_given_is_unknown(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with mpbackend.Recorder(tmp_path / name, "bf16", seed=1) as recorder:
            recorder.step(1.0, lr=0.1)
    found = mpbackend.compare(tmp_path / "one", tmp_path / "two")
    assert found.verdict == "inconclusive"
    unknown = {name for name, status in conditions(tmp_path / "one", tmp_path / "two").items() if status == "unknown"}
    assert unknown == {"effective batch", "clipping and averaging", "optimizers", "initial weights", "data"}
    assert found.reasons[0].startswith("not known to be the same, ")


def test_stated_fingerprints_say_nothing_beside_computed_ones(tmp_path: Path) -> None:
    stated = {**SETTINGS, "data": "shard 7", "weights": "sha256 1f"}
    computed = loop(tmp_path / "computed")
    one, two = loop(tmp_path / "one", settings=stated), loop(tmp_path / "two", settings=stated)
    other = loop(tmp_path / "other", settings={**stated, "data": "shard 8"})
    assert {conditions(one, two)[name] for name in ("data", "initial weights")} == {"same"}
    assert {conditions(computed, one)[name] for name in ("data", "initial weights")} == {"unknown"}
    assert conditions(one, other)["data"] == "different"


def test_a_killed_loop_leaves_what_was_written(tmp_path: Path) -> None:
    script = f"""
        import os, torch, mpbackend
        recorder = mpbackend.Recorder({str(tmp_path / "run")!r}, "bf16", seed=1)
        for step in range(70):
            recorder.step(torch.tensor(float(step)), lr=0.1)
        os._exit(9)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False).returncode == 9
    content = mpbackend.load_record(tmp_path / "run")
    assert 51 <= len(content.steps) <= 70
    assert content.record.totals.steps == len(content.steps)
    assert [row.loss for row in content.steps] == [float(step) for step in range(len(content.steps))]


def test_an_error_of_the_loop_keeps_its_steps(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), mpbackend.Recorder(tmp_path / "run", "bf16") as recorder:  # the loop is the point
        for step in range(5):
            recorder.step(1 / (3 - step))
    assert len(mpbackend.load_record(tmp_path / "run").steps) == 3


class Reads(TorchDispatchMode):
    """Counts reads of tensors by the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_step_reads_nothing_from_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpbackend.train.recorder.FLUSH_SECONDS", 1e9)
    one = torch.tensor(1.0)
    with mpbackend.Recorder(tmp_path / "run", "bf16") as recorder:
        recorder.step(one)
        with Reads() as reads:  # type: ignore[no-untyped-call] # of torch
            for _ in range(49):
                recorder.step(one, grad_norm=one, scale=one, stepped=one > 0, lr=one, metrics={"accuracy": one})
        assert reads.count == 0
    assert len(mpbackend.load_record(tmp_path / "run").steps) == 50


def test_a_loss_that_the_loop_adds_to_is_copied(tmp_path: Path) -> None:
    total = torch.zeros(())
    with mpbackend.Recorder(tmp_path / "run", "bf16") as recorder:
        for _ in range(4):
            total += 1
            recorder.step(total)
    assert [row.loss for row in mpbackend.load_record(tmp_path / "run").steps] == [1, 2, 3, 4]


def test_skipped_and_lost_steps(tmp_path: Path) -> None:
    with mpbackend.Recorder(tmp_path / "run", "fp16") as recorder:
        recorder.step(1.0, scale=65536.0)
        recorder.step(float("nan"), scale=65536.0, stepped=torch.tensor(False), reason="overflow")
        recorder.step(1.0, grad_norm=float("inf"), scale=torch.tensor(32768.0), stepped=False, ms=7.5)
    rows = mpbackend.load_record(tmp_path / "run").steps
    assert [(row.stepped, row.reason, row.nonfinite, row.scale) for row in rows] == [
        (True, "", False, 65536.0),
        (False, "overflow", True, 65536.0),
        (False, "skipped, says the loop", True, 32768.0),
    ]
    assert rows[2].ms == 7.5


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"recipe": "bf17"}, UnknownNameError, "bf17"),
        ({"device": "h1000"}, UnknownNameError, "h1000"),
        ({"seed": -1}, SessionError, "-1"),
        ({"seed": "3"}, SessionError, "'3'"),
        ({"settings": {"batch": 4}}, DocumentError, "allowed: .*clip_norm"),
        ({"settings": {"ranks": 0}}, DocumentError, "ranks=0"),
        ({"settings": {"samples": "many"}}, DocumentError, "samples=many"),
        ({"settings": {"clip_norm": -1.0}}, DocumentError, "clip_norm=-1.0"),
        ({"settings": {"average": "yes"}}, DocumentError, "true or false"),
        ({"settings": {"data": ""}}, DocumentError, "printable"),
        ({"settings": {"data": "a\nb"}}, DocumentError, "printable"),
    ],
)
def test_bad_input_leaves_no_folder(tmp_path: Path, options: dict[str, Any], error: type[MpbackendError], told: str) -> None:
    with pytest.raises(error, match=told):
        mpbackend.Recorder(tmp_path / "run", **{"recipe": "bf16", **options})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "values", [{"loss": "1.0"}, {"loss": torch.ones(2)}, {"loss": 1.0, "lr": 1j}, {"loss": 1.0, "metrics": {"a": None, "b": [1]}}, {"loss": torch.tensor(1j)}]
)
def test_a_step_without_numbers_is_refused_and_not_counted(tmp_path: Path, values: dict[str, Any]) -> None:
    with mpbackend.Recorder(tmp_path / "run", "bf16") as recorder:
        with pytest.raises(SessionError, match="not one number"):
            recorder.step(**values)
        recorder.step(2.0)
    assert [(row.step, row.loss) for row in mpbackend.load_record(tmp_path / "run").steps] == [(1, 2.0)]


def test_a_closed_recorder_and_a_taken_folder_are_refused(tmp_path: Path) -> None:
    recorder = mpbackend.Recorder(tmp_path / "run", "bf16")
    recorder.close()
    recorder.close()
    with pytest.raises(SessionError, match="closed"):
        recorder.step(1.0)
    with pytest.raises(SessionError, match="closed"):
        recorder.batch(torch.ones(2))
    with pytest.raises(DocumentError, match="already holds a record"):
        mpbackend.Recorder(tmp_path / "run", "bf16")


def test_a_scale_that_is_none_is_refused(tmp_path: Path) -> None:
    with mpbackend.Recorder(tmp_path / "run", "bf16") as recorder, pytest.raises(SessionError, match="positive number"):
        recorder.step(1.0, scale=0.0)
