"""The global settings of torch that change the arithmetic on a GPU.

Precision is set through ``fp32_precision`` alone: after that, torch's older ``allow_tf32`` and ``set_float32_matmul_precision`` raise when they are read.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from mpbackend.backend import Switch
from mpbackend.errors import BackendError
from mpbackend.train.switches import DETERMINISTIC

PRECISIONS = ("none", "ieee", "tf32")
"""What torch takes for CUDA. ``none`` inherits torch's general setting, and is fp32 where that is ``none`` too."""

BOOLEANS = ("false", "true")
NO_SPLIT_K = "false_no_split_k"

ENGINE = "transformer_engine.pytorch"
ENGINE_SWITCH = "te.tf32"


def switches() -> list[Switch]:
    """Return every switch, in the order in which they are to be set."""
    backends: Any = torch.backends  # its modules are objects with properties that type checkers do not see
    matmul = backends.cuda.matmul
    return [
        precision("matmul", matmul, "fp32 matrix products of cuBLAS"),
        precision("conv", backends.cudnn.conv, "fp32 convolutions of cuDNN"),
        precision("rnn", backends.cudnn.rnn, "fp32 recurrent layers of cuDNN"),
        reduction("fp16", matmul),
        reduction("bf16", matmul),
        boolean("matmul.fp16_accumulation", matmul, "allow_fp16_accumulation", "fp16 matrix products add in fp16 instead of fp32"),
        Switch(
            name="sdp.math_reduction_16bit",
            get=lambda: BOOLEANS[backends.cuda.fp16_bf16_reduction_math_sdp_allowed()],
            set=lambda value: backends.cuda.allow_fp16_bf16_reduction_math_sdp(value == "true"),
            allowed=BOOLEANS,
            meaning="attention without a fused kernel keeps its intermediates in 16 bits instead of fp32",
        ),
        DETERMINISTIC,
        boolean("cudnn.deterministic", backends.cudnn, "deterministic", "cuDNN takes deterministic algorithms only"),
        boolean(
            "cudnn.benchmark",
            backends.cudnn,
            "benchmark",
            "cuDNN times its algorithms and takes the fastest, so that the order of sums can change between runs",
        ),
        engine_precision(),
    ]


def precision(op: str, setting: Any, meaning: str) -> Switch:
    """Return the switch of the precision inside an fp32 operation."""
    return Switch(
        name=f"{op}.fp32_precision",
        get=lambda: str(setting.fp32_precision),
        set=lambda value: setattr(setting, "fp32_precision", value),
        allowed=PRECISIONS,
        meaning=meaning,
    )


def boolean(name: str, holder: Any, attribute: str, meaning: str) -> Switch:
    """Return the switch of an attribute that is true or false."""
    return Switch(
        name=name,
        get=lambda: BOOLEANS[bool(getattr(holder, attribute))],
        set=lambda value: setattr(holder, attribute, value == "true"),
        allowed=BOOLEANS,
        meaning=meaning,
    )


def reduction(name: str, matmul: Any) -> Switch:
    """Return the switch of the format in which cuBLAS adds the parts of a product that it splits along K.

    ``true`` adds them in the operands' format, ``false`` in fp32; the third setting forbids splitting, where torch offers that.

    Args:
        name: format of the operands.
        matmul: torch's module of cuBLAS settings.
    """
    attribute = f"allow_{name}_reduced_precision_reduction"
    offered = hasattr(matmul, f"{attribute}_split_k")

    def get() -> str:
        if getattr(matmul, attribute):
            return "true"
        return "false" if getattr(matmul, f"{attribute}_split_k", True) else NO_SPLIT_K

    def put(value: str) -> None:
        setattr(matmul, attribute, (False, False) if value == NO_SPLIT_K else value == "true")

    return Switch(
        name=f"matmul.reduced_precision_reduction_{name}",
        get=get,
        set=put,
        allowed=(*BOOLEANS, NO_SPLIT_K) if offered else BOOLEANS,
        meaning=f"parts of {name} matrix products may be added in {name} instead of fp32",
    )


def engine_precision() -> Switch:
    """Return what Transformer Engine computes fp32 products in: always tf32, whatever torch says.

    There is nothing to set. Layers that this plugin converts leave fp32 products to torch.
    """

    def put(value: str) -> None:
        if value != present():
            raise BackendError(f"switch {ENGINE_SWITCH} = {value!r}", found=f"it is {present()!r}, and Transformer Engine has no setting for it")

    def present() -> str:
        return "tf32" if ENGINE in sys.modules else "absent"

    return Switch(
        name=ENGINE_SWITCH, get=present, set=put, allowed=("absent", "tf32"), meaning="fp32 matrix products in the user's own Transformer Engine layers"
    )
