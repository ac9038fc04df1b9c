"""The CUDA backend. torch is imported inside the methods that need it, so that listing and planning work without it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from mpbackend.backend import Clock, Collectives, Implementation, MemoryMeter, OverflowFlag, PolicyKind, Switch
from mpbackend.capability import Level
from mpbackend.device import Device
from mpbackend.errors import BackendError
from mpbackend.lowbit import is_low_bit_recipe
from mpbackend_cuda import discovery, environment, transformer_engine
from mpbackend_cuda.implementations import implementations

if TYPE_CHECKING:
    import torch

    from mpbackend.planning import Plan
    from mpbackend_cuda.execution import EngineExecution

SUMMED_LEVELS: frozenset[Level] = frozenset({"native", "library"})
UNMAPPED = frozenset({"uint32", "uint64"})
"""Formats that NCCL sums and torch does not hand to it (``ncclDataType`` of ``torch/csrc/distributed/c10d/NCCLUtils.hpp``)."""

COMMON_SUMS = ("fp64", "fp32", "fp16", "bf16", "int8", "uint8", "int32", "int64")
"""What is summed on an architecture that no matrix declares."""


class CudaBackend:
    """NVIDIA GPUs: what torch computes by itself, and low-bit products through Transformer Engine."""

    name = discovery.BACKEND
    device_types: Sequence[str] = ("cuda",)
    families: Sequence[str] = ("nvidia",)
    autocast_key = "AutocastCUDA"

    def __init__(self) -> None:
        self._executions: list[tuple[Plan, EngineExecution]] = []

    def discover(self) -> Iterable[Device]:
        """Return the visible GPUs; none where nothing on this machine expects one."""
        return discovery.find_devices()

    def address(self, text: str) -> Device:
        """Return a GPU by its index among the visible ones, or the first with a device key.

        Raises:
            UnknownNameError: there is none.
        """
        return discovery.find_device(text)

    def implements(self, device: Device) -> Sequence[Implementation]:
        """Return what runs on ``device`` and what does not, with reasons."""
        return implementations(discovery.capability(device), device.versions.get("cuda", ""), transformer_engine.state())

    def environment(self, device: Device) -> Mapping[str, str]:
        """Return the versions of driver, libraries and packages, and the variables that change the arithmetic."""
        return environment.describe(device)

    def switches(self, device: Device) -> Sequence[Switch]:
        """Return torch's global settings for CUDA. They can be read and set on a build without CUDA too."""
        from mpbackend_cuda.switches import switches

        return switches()

    def execute(self, plan: Plan) -> AbstractContextManager[None]:
        """Return the context of a converted model's passes; one that does nothing where torch computes what is planned by itself.

        Raises:
            BackendError: the plan is low-bit and no model was converted for it.
        """
        if not is_low_bit_recipe(plan.effective):
            return nullcontext()
        execution = self._execution(plan)
        if execution is None:
            raise BackendError(f"{plan.granted} on {plan.device.key}", found="no model was converted for this plan", remedy="use target.prepare()")
        return execution.context()

    def op_policy(self, device: Device) -> Mapping[str, PolicyKind]:
        """Return autocast's policy, from the header of the installed torch, for the operators that its dispatcher has a kernel for."""
        from mpbackend_cuda.op_policy import op_policy

        return op_policy()

    def overflow(self, device: Device) -> OverflowFlag | None:
        """Return None: inf and NaN appear in the gradients."""
        return None

    def convert(self, model: torch.nn.Module, plan: Plan) -> Sequence[Mapping[str, str]]:
        """Check that the GPU is the planned one, and replace linear layers where the plan is low-bit.

        Raises:
            BackendError: the plan computes in something that this backend does not run, torch has another GPU at the device's index, or Transformer Engine
                cannot be used.
        """
        from mpbackend_cuda.runtime import check_device, check_plan, prepare_engine
        from mpbackend_cuda.te_convert import convert_model, restore_plain

        check_plan(plan, self.implements(plan.device))
        check_device(plan.device)
        restore_plain(model)
        if not is_low_bit_recipe(plan.effective):
            return []
        prepared = prepare_engine(plan, self._execution(plan))
        if self._execution(plan) is None:
            self._executions.append((plan, prepared.execution))
        return convert_model(model, prepared.low, prepared.lowered, prepared.linear, prepared.execution, plan.micro_batches)

    def _execution(self, plan: Plan) -> EngineExecution | None:
        """Return the execution of a plan, the same for every model that is converted for it."""
        return next((execution for known, execution in self._executions if known is plan), None)

    def product(self, device: Device, format: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:  # noqa: A002 - the name in the contract
        """Return what multiplies fp64 matrices that hold values of a format as this device does, for probes.

        Raises:
            UnknownNameError: there is no such product.
        """
        import torch

        from mpbackend_cuda.product import product

        return product(torch.device("cuda", device.index), format)

    def memory(self, device: Device) -> MemoryMeter:
        """Return the meter of torch's allocator."""
        from mpbackend_cuda.meters import AllocatorMeter

        return AllocatorMeter(device.index)

    def clock(self, device: Device) -> Clock:
        """Return a clock of CUDA events."""
        from mpbackend_cuda.meters import EventClock

        return EventClock(device.index)

    def collectives(self, device: Device) -> Collectives:
        """Return NCCL and the formats it sums on the architecture, from the collective table of the matrix."""
        matrix = discovery.matrix()
        records = matrix.collectives(device.arch) if device.arch in matrix.archs else []
        sums = [record.format for record in records if record.op == "all_reduce_sum" and record.level in SUMMED_LEVELS and record.format not in UNMAPPED]
        return Collectives(name="nccl", reduces=tuple(sums) or COMMON_SUMS)
