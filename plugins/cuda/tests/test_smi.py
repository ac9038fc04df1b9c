"""Answers of ``nvidia-smi``, good and bad."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mpbackend_cuda import smi
from plugins.cuda.tests.conftest import Machine, gpu

Script = Callable[[str], None]

LISTING = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-0aaaaaaa-0000-0000-0000-000000000000)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 1g.5gb      Device  1: (UUID: MIG-GPU-0aaaaaaa-0000-0000-0000-000000000000/7/0)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-1aaaaaaa-0000-0000-0000-000000000000)"""


def test_gpus(machine: Machine) -> None:
    machine(gpu(1, "NVIDIA L4", "8.9", "23034"), gpu(0))
    answer = smi.ask()
    assert [found.name for found in answer.gpus] == ["NVIDIA H100 80GB HBM3", "NVIDIA L4"], "in the order of their indices"
    first = answer.gpus[0]
    assert (first.ordinal, first.capability, first.driver, first.mig) == (0, "9.0", "580.65.06", False)
    assert first.memory_bytes == 81559 * 1024 * 1024
    assert first.uuid == "GPU-0aaaaaaa-0000-0000-0000-000000000000"
    assert (answer.cause, answer.instances, answer.installed) == ("", (), True)


def test_values_that_are_not_told_are_unknown(machine: Machine) -> None:
    machine(gpu(name="NVIDIA GB10", capability="[N/A]", memory="[N/A]", mig="[N/A]"))
    (found,) = smi.ask().gpus
    assert (found.capability, found.memory_bytes, found.mig) == ("", None, False)


def test_instances_stand_below_their_gpu(machine: Machine) -> None:
    machine(gpu(0, "NVIDIA A100-SXM4-40GB", "8.0", mig="Enabled"), gpu(1, "NVIDIA A100-SXM4-40GB", "8.0"), listing=LISTING)
    answer = smi.ask()
    assert [(instance.gpu.ordinal, instance.profile, instance.uuid) for instance in answer.instances] == [
        (0, "3g.20gb", "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"),
        (0, "1g.5gb", "MIG-GPU-0aaaaaaa-0000-0000-0000-000000000000/7/0"),
    ]


def test_missing_command() -> None:
    answer = smi.ask()
    assert (answer.installed, answer.gpus) == (False, ())
    assert answer.cause == "nvidia-smi is not on the path"
    assert "driver" in answer.remedy


def test_a_command_that_hangs_is_left_after_the_limit(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    script("/bin/sleep 60")
    monkeypatch.setattr(smi, "TIME_LIMIT_S", 0.2)
    answer = smi.ask()
    assert answer.cause == "nvidia-smi did not answer within 0.2 s"
    assert "dmesg" in answer.remedy


@pytest.mark.parametrize(
    ("text", "status", "cause", "remedy"),
    [
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9, "status 9: NVIDIA-SMI has failed", "modprobe nvidia"),
        ("Failed to initialize NVML: Driver/library version mismatch", 18, "status 18: Failed to initialize NVML", "reboot"),
        ('Field "compute_cap" is not a valid field to query.', 2, "not a valid field", "update the NVIDIA driver"),
        ("No devices were found", 6, "No devices were found", "pass a GPU to this machine"),
        ("Unable to determine the device handle for GPU0: GPU is lost.", 15, "GPU is lost", "reset the GPU"),
        ("something new", 3, "status 3: something new", "by hand"),
        ("", 1, "status 1: nothing", "by hand"),
    ],
)
def test_a_failure_has_cause_and_remedy(text: str, status: int, cause: str, remedy: str, script: Script) -> None:
    script(f"/bin/cat >&2 <<'END'\n{text}\nEND\nexit {status}")
    answer = smi.ask()
    assert answer.gpus == ()
    assert cause in answer.cause
    assert remedy in answer.remedy


@pytest.mark.parametrize("text", ["Segmentation fault", "", "0, a, b, c", "x, NVIDIA, GPU-0, 9.0, 1, 1, Disabled", f"{gpu()}\nwarning: something", "a" * 300])
def test_an_answer_that_is_no_list_is_not_guessed_at(text: str, script: Script) -> None:
    script(f"/bin/cat <<'END'\n{text}\nEND")
    answer = smi.ask()
    assert answer.gpus == ()
    assert "which is no list of GPUs" in answer.cause
    assert len(answer.cause) < 200


def test_a_command_that_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "bin" / smi.COMMAND
    path.parent.mkdir()
    path.write_bytes(b"\x7fELF")
    path.chmod(0o755)
    assert "cannot be started" in smi.ask().cause


def test_a_list_of_instances_that_fails(machine: Machine, script: Script) -> None:
    line = gpu(mig="Enabled")
    script(f"if [ \"$1\" = -L ]; then exit 4; fi\n/bin/cat <<'END'\n{line}\nEND")
    answer = smi.ask()
    assert answer.gpus == ()
    assert answer.cause == "its list of MIG instances: nvidia-smi failed with status 4: nothing"
