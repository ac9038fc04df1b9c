"""What a model does that another device takes differently: found in its code, its graph and its passes before the run that would fail or change silently."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from mpbackend.errors import describe
from mpbackend.observe.audit_observer import Auditor
from mpbackend.observe.memory import dtype_name
from mpbackend.planning import Plan
from mpbackend.train.hazards import compiled, uses

PROBE = 16
"""Side of the matrices of the probe."""


def look_at_model(auditor: Auditor, model: torch.nn.Module, device: torch.device, lower: torch.dtype | None, *, fake: bool = False) -> None:
    """Look at the model before it runs: compiled parts with an autocast of their own, and whether autocast works on its device.

    Args:
        auditor: keeps the findings.
        model: the model.
        device: where it is.
        lower: format of autocast; None under fp32.
        fake: whether the device has no memory: nothing is probed there.
    """
    inner = sorted({type(module).__name__ for root in compiled(model) for module in root.modules() if uses(module, "autocast")})
    for name in inner:
        message = "opens an autocast of its own inside a compiled model: compiled code differentiates it under the outer autocast"
        auditor.find("compiled-autocast", name, message, "leave it out of the compilation: torch.compiler.disable")
    if lower is not None and not fake:
        probe_autocast(auditor, device, lower)


def probe_autocast(auditor: Auditor, device: torch.device, lower: torch.dtype) -> None:
    """Multiply two small fp32 matrices under autocast, which must give its format; a device without autocast kernels raises, or computes in fp32."""
    fault = ""
    try:
        with torch.autocast(device.type, dtype=lower), torch.no_grad():
            out = torch.mm(torch.ones(PROBE, PROBE, device=device), torch.ones(PROBE, PROBE, device=device))
        if out.dtype is not lower:
            fault = f"a product under autocast came out in {dtype_name(out.dtype)}, not in {dtype_name(lower)}"
    except Exception as error:  # noqa: BLE001 - a device may refuse autocast in any way
        fault = f"a product under autocast raised {describe(error)}"
    if fault:
        auditor.find("no-autocast-kernels", f"device {device.type}", fault, "install the plugin of this device that brings them, or use the recipe fp32")


def look_at_graph(auditor: Auditor, loss: torch.Tensor, device: torch.device) -> None:
    """Look at the custom functions in the graph of a loss: a ``custom_fwd`` for another device type does nothing on this one.

    Args:
        auditor: keeps the findings.
        loss: the loss.
        device: where the model is.
    """
    for function in custom_functions(loss):
        bound = bound_device(function.forward)
        if bound is not None and bound != device.type:
            message = f"custom_fwd(device_type={bound!r}) does nothing on {device.type!r}: its casts and its autocast state are those of the other device"
            auditor.find("custom-fwd-device", function.__qualname__, message, "give custom_fwd and custom_bwd the device type that runs, as a variable")


def custom_functions(loss: torch.Tensor) -> Iterator[type[Any]]:
    """Yield the classes of ``torch.autograd.Function`` in the graph of a loss, each once."""
    seen: set[Any] = set()
    told: set[type[Any]] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        function = getattr(type(node), "_forward_cls", None)
        if function is not None and function not in told:
            told.add(function)
            yield function
        waiting.extend(following for following, _ in node.next_functions)


def bound_device(function: Any) -> str | None:
    """Return the device type that ``torch.amp.custom_fwd`` bound into a function; None when it is not wrapped by it."""
    code = getattr(function, "__code__", None)
    if code is None or "device_type" not in code.co_freevars or not function.__closure__:
        return None
    content = function.__closure__[code.co_freevars.index("device_type")].cell_contents
    return content if isinstance(content, str) else None


def look_at_passes(auditor: Auditor, plan: Plan) -> None:
    """Look at what ran: modules in another thread, and products in none of the planned formats.

    Args:
        auditor: what was seen.
        plan: the plan.
    """
    for module, autocast in auditor.paths.strangers.items():
        planned = plan.effective.compute.forward
        state = "autocast is on there" if autocast else f"autocast is off there: it computes in the formats of its operands, not in {planned}"
        message = f"ran in another thread, where this audit sees no operation; {state}"
        auditor.find("other-thread", module, message, "enter session.autocast() in the thread that calls the model")


def look_at_banned(auditor: Auditor, banned: Iterable[str], plan: Plan) -> None:
    """Name the operators that ran and that the target refuses under autocast.

    Args:
        auditor: keeps the findings.
        banned: operators of aten.
        plan: the plan.
    """
    for name in banned:
        message = f"autocast on {plan.device.key} refuses it: what it computes is not safe in {plan.effective.compute.forward}; the CPU runs it"
        remedy = "use binary_cross_entropy_with_logits" if name.startswith("binary_cross_entropy") else "run it outside of autocast on fp32 operands"
        auditor.find("banned-op", f"aten::{name}", message, remedy)
