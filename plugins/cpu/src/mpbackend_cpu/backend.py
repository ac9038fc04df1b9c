"""The CPU backend. torch is imported inside the methods that need it, so that listing and planning work without it."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from mpbackend.backend import Clock, Collectives, Implementation, MemoryMeter, OverflowFlag, PolicyKind, Switch
from mpbackend.device import Device
from mpbackend.errors import BackendError, UnknownNameError
from mpbackend_cpu import discovery
from mpbackend_cpu.implementations import implementations
from mpbackend_cpu.meters import HostClock, ResidentSetMeter

if TYPE_CHECKING:
    import torch

    from mpbackend.planning import Plan

DISTRIBUTION = "mpbackend-cpu"

VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
)
"""Environment variables of torch, oneDNN and MKL that choose instructions, formats or the order of sums."""

GLOO_SUMS = ("fp64", "fp32", "fp16", "bf16", "int8", "uint8", "int32", "int64")
"""Formats that torch 2.13 sums with gloo; each is run by a test of this plugin."""


class CpuBackend:
    """The processor of this machine: fp32, fp64 and bf16 as torch computes them, fp16 by rounding around fp32 products, fp8 in linear layers."""

    name = discovery.BACKEND
    device_types: Sequence[str] = ("cpu",)
    families: Sequence[str] = ("cpu",)
    autocast_key = "AutocastCPU"
    update_block = 1 << 20  # AdamW holds 16 MB of this many: 1.7 times as fast as all at once on a Zen 4 with 32 MB of cache, see benchmarks/step_tail.py

    def discover(self) -> Iterable[Device]:
        """Return the processor."""
        return [discovery.find_device()]

    def address(self, text: str) -> Device:
        """Return the processor by ``0`` or its key.

        Raises:
            UnknownNameError: anything else.
        """
        device = discovery.find_device()
        if text not in ("0", device.key):
            raise UnknownNameError("device of backend cpu", text, ["0", device.key], remedy="a machine has one device 'cpu'")
        return device

    def implements(self, device: Device) -> Sequence[Implementation]:
        """Return what runs on ``device`` and what does not, with reasons."""
        return implementations(device.arch, discovery.features(discovery.read_text("/proc/cpuinfo")), discovery.torchao_state()[1])

    def environment(self, device: Device) -> Mapping[str, str]:
        """Return the versions of torch and of this plugin, the instructions and threads that torch uses, and the variables that are set."""
        found = {DISTRIBUTION: importlib.metadata.version(DISTRIBUTION), **device.versions}
        if torchao := discovery.torchao_state()[0]:
            found["torchao"] = torchao
        if device.usable:
            import torch

            found["build"] = "; ".join(line.strip(" -") for line in torch.__config__.show().splitlines() if "MKL-DNN" in line or "Math Kernel Library" in line)
            found["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
            found["threads"] = str(torch.get_num_threads())
        return found | {name: os.environ[name] for name in VARIABLES if name in os.environ}

    def switches(self, device: Device) -> Sequence[Switch]:
        """Return torch's global settings for the CPU."""
        from mpbackend_cpu.switches import switches

        return switches()

    def execute(self, plan: Plan) -> AbstractContextManager[None]:
        """Return a context in which fp16 products are rounded around fp32 ones where the plan says ``emulated``; else one that does nothing."""
        from mpbackend_cpu.execution import execution

        return execution(plan)

    def op_policy(self, device: Device) -> Mapping[str, PolicyKind]:
        """Return autocast's policy as observed on the installed torch. Operators that could not be classified are left out; on torch 2.13 there are none."""
        from mpbackend_cpu.op_policy import classify

        return classify().policy

    def overflow(self, device: Device) -> OverflowFlag | None:
        """Return None: inf and NaN appear in the gradients."""
        return None

    def convert(self, model: torch.nn.Module, plan: Plan) -> Sequence[Mapping[str, str]]:
        """Make the linear layers low-bit where the plan is, by torchao or plain torch, and return a row for each; else change nothing and return no row.

        Raises:
            BackendError: the plan computes in a format that this backend does not run, no layer can be converted, or the layers are already those of an
                earlier recipe and the plan is not low-bit.
        """
        runs = {(row.op, row.a, row.b) for row in self.implements(plan.device) if row.level is not None}
        for decision in plan.decisions:
            if decision.role.startswith("compute.") and (decision.op, *decision.pair) not in runs:
                found = f"{decision.op} in {' x '.join(decision.pair)} is planned, and this backend does not run it"
                raise BackendError(f"{plan.granted} on {plan.device.key}", found=found, remedy="`mpbackend plan` shows what runs")
        from mpbackend_cpu.lowbit import convert

        return convert(model, plan)

    def product(self, device: Device, format: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:  # noqa: A002 - the name in the contract
        """Return what multiplies fp64 matrices that hold values of a format as this device does, for probes.

        Raises:
            UnknownNameError: there is no such product.
        """
        from mpbackend_cpu.product import product

        return product(format)

    def memory(self, device: Device) -> MemoryMeter:
        """Return the meter of this process's resident set."""
        return ResidentSetMeter()

    def clock(self, device: Device) -> Clock:
        """Return the host's monotonic clock."""
        return HostClock()

    def collectives(self, device: Device) -> Collectives:
        """Return gloo and the formats it sums."""
        return Collectives(name="gloo", reduces=GLOO_SUMS)
