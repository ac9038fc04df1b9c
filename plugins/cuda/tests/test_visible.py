"""``CUDA_VISIBLE_DEVICES`` against the documented rules and against what torch counts."""

from __future__ import annotations

import itertools

import pytest
import torch

from mpbackend_cuda.smi import Answer, Gpu, Instance
from mpbackend_cuda.visible import Entry, view


def make(ordinal: int, name: str = "NVIDIA H100 PCIe", mig: bool = False) -> Gpu:
    return Gpu(ordinal, name, f"GPU-{ordinal}aaa{ordinal}bbb", "9.0", 1, "580", mig)


FOUR = Answer(tuple(make(ordinal) for ordinal in range(4)))
DIVIDED = make(0, mig=True)
PARTS = (Instance(DIVIDED, "1g.10gb", "MIG-aaa1"), Instance(DIVIDED, "1g.10gb", "MIG-aab2"))


def seen(answer: Answer, value: str | None, **environ: str) -> list[str]:
    variables = environ if value is None else environ | {"CUDA_VISIBLE_DEVICES": value}
    return [entry.uuid.split("-")[1][:4] for entry in view(answer, variables).entries]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ["0aaa", "1aaa", "2aaa", "3aaa"]),
        ("2,1", ["2aaa", "1aaa"]),
        ("0,2,-1,1", ["0aaa", "2aaa"]),
        ("-1", []),
        ("", []),
        ("NoDevFiles", []),
        ("0,9,1", ["0aaa"]),
        ("9", []),
        ("1,1", []),
        (" 1 , 2 ", ["1aaa", "2aaa"]),
        ("1gpu,2", ["1aaa", "2aaa"]),
        ("0,,1", ["0aaa"]),
        ("GPU-2aaa2bbb", ["2aaa"]),
        ("GPU-3,GPU-1", ["3aaa", "1aaa"]),
        ("GPU-3,GPU-9,GPU-1", ["3aaa"]),
        ("GPU-,GPU-1", []),
        ("GPU-1,GPU-1", []),
        ("GPU-1,GPU-1aaa", []),
        ("GPU-1,2", ["1aaa"]),
        ("2,GPU-1", ["2aaa"]),
        ("gpu-1", []),
    ],
)
def test_the_documented_rules(value: str | None, expected: list[str]) -> None:
    assert seen(FOUR, value) == expected


ELEMENTS = ("0", "1", "3", "4", "-1", "+2", "x", "", "GPU-0", "GPU-1aaa", "GPU-", "GPU-7")
LISTS = [",".join(elements) for count in (1, 2, 3) for elements in itertools.product(ELEMENTS, repeat=count)]


def test_torch_counts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 4)
    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: [gpu.uuid for gpu in FOUR.gpus])
    for value in LISTS:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        count: int = torch.cuda._device_count_nvml()
        assert len(seen(FOUR, value)) == count, value


def test_nothing_visible_says_why() -> None:
    assert view(FOUR, {"CUDA_VISIBLE_DEVICES": ""})[1:] == (
        "CUDA_VISIBLE_DEVICES='' leaves none of 4 GPUs visible",
        "unset CUDA_VISIBLE_DEVICES, or name GPUs by index or UUID",
    )
    assert "MIG mode" in view(Answer((DIVIDED,)), {}).cause


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ["MIG-aaa1"]),
        ("0", ["MIG-aaa1"]),
        ("MIG-aab2", ["MIG-aab2"]),
        ("MIG-aab", ["MIG-aab2"]),
        ("MIG-aa", []),
        ("MIG-aaa1,MIG-aab2", ["MIG-aaa1"]),
        ("GPU-0aaa", ["MIG-aaa1"]),
    ],
)
def test_one_instance_is_seen(value: str | None, expected: list[str]) -> None:
    answer = Answer((DIVIDED,), PARTS)
    found = view(answer, {} if value is None else {"CUDA_VISIBLE_DEVICES": value})
    assert [entry.uuid for entry in found.entries] == expected
    assert (found.cause == "") == bool(expected)


def test_an_instance_hides_whole_gpus() -> None:
    answer = Answer((DIVIDED, make(1)), PARTS)
    assert view(answer, {}).entries == PARTS[:1]
    assert view(answer, {"CUDA_VISIBLE_DEVICES": "GPU-1"}).entries == (make(1),)
    found = view(answer, {"CUDA_VISIBLE_DEVICES": "1"})
    assert "divided by MIG" in found.cause
    assert found.remedy == "name one: export CUDA_VISIBLE_DEVICES=MIG-aaa1"


@pytest.mark.parametrize(
    ("environ", "ambiguous"),
    [
        ({}, True),
        ({"CUDA_VISIBLE_DEVICES": "0"}, True),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, True),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, False),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1"}, False),
    ],
)
def test_an_index_among_several_models_names_none(environ: dict[str, str], ambiguous: bool) -> None:
    entries: tuple[Entry, ...] = (make(0, "NVIDIA L4"), make(1))
    found = view(Answer((make(0, "NVIDIA L4"), make(1))), environ)
    assert set(found.entries) <= set(entries)
    assert (found.remedy == "export CUDA_DEVICE_ORDER=PCI_BUS_ID") is ambiguous
