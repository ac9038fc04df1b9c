"""Stand-ins for torch_npu in an environment without it: they record what is asked of them and compute on CPU tensors."""

from __future__ import annotations

import types
from typing import Any

import torch

from mpbackend.lowbit import Operand
from mpbackend.train.quantize import cast, decode

NUMBERS = {"float8_e5m2": 291, "float8_e4m3fn": 292, "hifloat8": 290, "float8_e8m0fnu": 293}
FORMAT_OF = {291: "fp8_e5m2", 292: "fp8_e4m3", 290: "hif8"}


class Options:
    """``torch_npu._C``: options as bytes, and questions about the device."""

    def __init__(self, *, inf_nan: bool = True) -> None:
        self.values: dict[str, bytes] = {}
        self.inf_nan: bool | RuntimeError = inf_nan

    def _npu_getOption(self, key: str) -> bytes | None:  # noqa: N802 - torch_npu's own name
        return self.values.get(key)

    def _npu_setOption(self, option: dict[str, str]) -> None:  # noqa: N802 - torch_npu's own name
        self.values |= {key: value.encode() for key, value in option.items()}

    def _npu_is_support_inf_nan(self) -> bool:
        if isinstance(self.inf_nan, RuntimeError):
            raise self.inf_nan
        return self.inf_nan


class Settings:
    """``torch.npu.matmul`` and ``torch.npu.conv``: unknown attributes are ignored, and read None."""

    def __init__(self, **known: Any) -> None:
        object.__setattr__(self, "known", known)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.known:
            self.known[name] = value

    def __getattr__(self, name: str) -> Any:
        return self.known.get(name)


class Event:
    """A device event whose time is a counter."""

    ticks = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.timed = enable_timing
        self.at = 0.0
        self.waited = False

    def record(self, stream: str) -> None:
        Event.ticks += 1.5
        self.at, self.stream = Event.ticks, stream

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end: Event) -> float:
        assert end.waited
        return end.at - self.at


class Library(types.ModuleType):
    """``torch_npu``: options, the status register, and the quantized operators over CPU tensors."""

    def __init__(self, *, inf_nan: bool = True) -> None:
        super().__init__("torch_npu")
        self._C = Options(inf_nan=inf_nan)
        self.overflow = False
        self.calls: list[tuple[str, dict[str, Any]]] = []
        for name, number in NUMBERS.items():
            setattr(self, name, number)

    def npu_get_float_status(self, status: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(status)
        result[0] = float(self.overflow)
        return result

    def npu_clear_float_status(self, status: torch.Tensor) -> torch.Tensor:
        self.overflow = False
        return status

    def npu_dtype_cast(self, values: torch.Tensor, dtype: int) -> torch.Tensor:
        self.calls.append(("npu_dtype_cast", {"dtype": dtype}))
        return cast(values, Operand(format=FORMAT_OF[dtype], granularity="tensor"))

    def npu_quant_matmul(self, x1: torch.Tensor, x2: torch.Tensor, scale: torch.Tensor, **options: Any) -> Any:
        self.calls.append(("npu_quant_matmul", {"scale": scale.shape, **options}))
        hif8 = options.get("x1_dtype") == NUMBERS["hifloat8"]
        a, b = (decode(x, "hif8") if hif8 else x.float() for x in (x1, x2))
        left, right = options["pertoken_scale"], scale
        groups = options.get("group_sizes")
        if groups == [1, 1, 32]:
            a = a * torch.exp2(left.reshape(a.shape[0], -1).float() - 127).repeat_interleave(32, 1)[:, : a.shape[1]]
            b = b * torch.exp2(right.transpose(0, 1).reshape(b.shape[1], -1).float() - 127).repeat_interleave(32, 1)[:, : b.shape[0]].T
            return (a @ b).to(options["output_dtype"])
        if groups:
            a = a * left.repeat_interleave(groups[0], 0).repeat_interleave(128, 1)[: a.shape[0], : a.shape[1]]
            b = b * right.repeat_interleave(128, 0).repeat_interleave(128, 1)[: b.shape[0], : b.shape[1]]
            return (a @ b).to(options["output_dtype"])
        return ((a @ b) * right * left[:, None]).to(options["output_dtype"])


class Npu(types.ModuleType):
    """``torch.npu``."""

    def __init__(self) -> None:
        super().__init__("torch.npu")
        self.matmul = Settings(allow_hf32=False, cube_math_type=None)
        self.conv = Settings(allow_hf32=True)
        self.jit = False
        self.allocated = {0: 100, 1: 7}
        self.peak = {0: 300, 1: 9}
        self.Event = Event

    def is_jit_compile_false(self) -> bool:
        return not self.jit

    def set_compile_mode(self, jit_compile: bool = False) -> None:
        self.jit = jit_compile

    def memory_allocated(self, index: int) -> int:
        return self.allocated[index]

    def max_memory_allocated(self, index: int) -> int:
        return self.peak[index]

    def reset_peak_memory_stats(self, index: int) -> None:
        self.peak[index] = self.allocated[index]

    def current_stream(self, index: int) -> str:
        return f"stream of {index}"
