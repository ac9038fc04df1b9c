"""What this plugin runs on an Ascend architecture, and why it does not run the rest. Imports no torch.

Levels are those of the capability matrix for what torch_npu runs; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpbackend.backend import Implementation
from mpbackend.capability import Level
from mpbackend.formats import FORMATS

FIRST_910 = "ascend-910a"
INFERENCE_310P = "ascend-310p"
SMALL_310B = "ascend-310b"
A2 = "ascend-a2"
A3 = "ascend-a3"
A5 = "ascend-950"

OPS = ("matmul", "conv")
PATH = "torch_npu"
QUANTIZED_PATH = "aclnn_quant_matmul_v5"

CONVERTING = frozenset({FIRST_910, INFERENCE_310P})
"""Architectures whose Cube has no fp32: torch_npu hands fp32 products to it as fp16."""

HF32: dict[str, str] = {A2: "hf32_e8m11", A3: "hf32_e8m11", A5: "hf32_e8m10"}

CONVERTED = "torch_npu computes it in fp16 (70000 becomes inf or 65504, 1e-8 becomes 0); no setting gives fp32"
NO_BF16 = "the Cube has no bf16 and CANN refuses it; torch's autocast would only warn and compute in fp32"
OPEN = "no source says what torch_npu computes on this device"
NO_QUANTIZED = "the Cube has no 8-bit float; only the Ascend 950 multiplies it"
CONV_LOW_BIT = "torch_npu has no convolution in a low-bit format"
NO_LOWERING = "torch_npu has no quantized training product in this format"
OTHER = "torch_npu has no product in this format"

LOW_BIT_PAIRS = (
    ("fp8_e4m3", "fp8_e4m3"),
    ("fp8_e5m2", "fp8_e4m3"),
    ("fp8_e4m3", "fp8_e5m2"),
    ("fp8_e5m2", "fp8_e5m2"),
    ("hif8", "hif8"),
)
"""Operand pairs of the quantized product of an Ascend 950."""

SCALINGS = ("tensor_channel_token", "block_128x128", "mx_1x32")

MIXED_BLOCKS = "block_1x128_128x128"
NO_MIXED_BLOCKS = "no operator pairs scales per 1x128 with scales per 1x128, as the weight's gradient needs; scaling.inputs=128x128 runs"


def implementations(arch: str) -> list[Implementation]:
    """Return what runs on an architecture, then what does not, with reasons.

    Args:
        arch: architecture key of the matrix; ``unknown`` for a device that it does not know.
    """
    runs = [row for op in OPS for row in plain(op, arch)]
    runs += list(quantized(arch))
    done = {(row.op, row.a, row.b) for row in runs}
    floats = [name for name, spec in FORMATS.items() if spec.kind == "float"]
    pairs = [*((name, name) for name in floats), *LOW_BIT_PAIRS]
    refused = [
        Implementation(op=op, a=a, b=b, accumulate="none", path="none", reason=refusal(op, arch, a))
        for op in OPS
        for a, b in dict.fromkeys(pairs)
        if (op, a, b) not in done
    ]
    return runs + refused


def plain(op: str, arch: str) -> Iterator[Implementation]:
    """Yield the products of plain operands."""
    if arch in CONVERTING:
        yield Implementation(op=op, a="fp32", b="fp32", accumulate="fp32", path=PATH, level="converted", reason=CONVERTED)
        yield Implementation(op=op, a="fp16", b="fp16", accumulate="unknown", path=PATH, level="native")
        return
    known = arch in (A2, A3, A5)
    level: Level = "native" if known else "unknown"
    for name in ("fp32", "fp16", "bf16"):
        yield Implementation(op=op, a=name, b=name, accumulate="fp32" if known else "unknown", path=PATH, level=level, reason="" if known else OPEN)
    if known:
        yield Implementation(op=op, a=HF32[arch], b=HF32[arch], accumulate="fp32", path=PATH, level="native", reason=f"{op}.allow_hf32")


def quantized(arch: str) -> Iterator[Implementation]:
    """Yield the quantized products of linear layers; only the Ascend 950 has them."""
    if arch != A5:
        return
    for a, b in LOW_BIT_PAIRS:
        for scaling in SCALINGS:
            if scaling != "mx_1x32" or a != "hif8":
                yield Implementation(op="matmul", a=a, b=b, scaling=scaling, accumulate="fp32", path=QUANTIZED_PATH, level="native")
        yield Implementation(op="matmul", a=a, b=b, scaling=MIXED_BLOCKS, accumulate="none", path="none", reason=NO_MIXED_BLOCKS)


def refusal(op: str, arch: str, name: str) -> str:
    """Return why products in a format do not run."""
    if name == "bf16":
        return NO_BF16
    if not FORMATS[name].is_low_bit:
        return OTHER
    if op == "conv":
        return CONV_LOW_BIT
    return NO_LOWERING if arch == A5 or FORMATS[name].bits < 8 else NO_QUANTIZED
