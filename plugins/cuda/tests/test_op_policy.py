"""The policy of the header is the policy of torch's own autocast kernels for CUDA, seen through fake tensors: nothing here touches a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mpbackend.errors import BackendError
from mpbackend.train import policy as pinning
from mpbackend.train.policy import PinnedPolicy
from mpbackend_cuda import op_policy
from mpbackend_cuda.op_policy import AUTOCAST_KEY, compare, kernels

LOWER = torch.bfloat16


@contextmanager
def autocast() -> Iterator[None]:
    """Set the state of autocast for CUDA; the context of torch turns itself off where there is no GPU."""
    before = (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", LOWER)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


class Seen(TorchDispatchMode):
    """Notes the formats of every operator's tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's dispatch mode is not annotated
        self.operands: dict[str, list[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operands[func.name().removeprefix("aten::").partition(".")[0]] = [arg.dtype for arg in args if isinstance(arg, torch.Tensor)]
        return func(*args, **(kwargs or {}))


def fake(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def test_the_set_is_that_of_the_dispatcher(capsys: pytest.CaptureFixture[str]) -> None:
    found = compare()
    assert found.unregistered == ()
    assert found.unclassified == ()
    assert set(found.policy) == kernels()
    counts = {kind: sum(value == kind for value in found.policy.values()) for kind in ("lower", "fp32", "promote", "banned")}
    with capsys.disabled():
        print(f"\nautocast operators for CUDA in torch {torch.__version__}: {len(found.policy)} {counts}")
    assert all(counts.values())


def test_an_operator_that_no_list_names_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_policy, "COMPILED", {"binary_cross_entropy": "banned", "no_such_operator": "lower"})
    found = compare()
    assert found.unregistered == ("no_such_operator",)
    assert found.unclassified == ("cudnn_convolution", "cudnn_convolution_transpose")
    assert "no_such_operator" not in found.policy


def test_a_header_without_a_list_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = (Path(torch.__file__).parent / pinning.HEADER).read_text(encoding="utf-8")
    path = tmp_path / "torch" / pinning.HEADER
    path.parent.mkdir(parents=True)
    path.write_text(text.replace("define AT_FORALL_PROMOTE", "define AT_FORALL_OTHER"), encoding="utf-8")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    with pytest.raises(BackendError, match="has no list AT_FORALL_PROMOTE"):
        compare()


FILLERS: dict[str, Any] = {"int": 1, "SymInt": 1, "float": 1.0, "number": 1, "bool": False, "str": "", "List[int]": [1], "List[SymInt]": [1]}
"""Values for arguments without a default. They need not make sense: a call is stopped at the first operator below autocast."""


class ReachedError(Exception):
    """Stops a call; carries the format that autocast brought in, or None when it brought in none."""

    def __init__(self, target: torch.dtype | None) -> None:
        self.target = target
        super().__init__(str(target))


class Stop(TorchDispatchMode):
    """Raises at the first operator below autocast.

    Autocast either casts an operand first, or fills in a ``dtype``, which a softmax of fp16 operands turns into a flag of its kernel.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        given = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, torch.dtype)]
        if func in (torch.ops.aten._softmax.default, torch.ops.aten._log_softmax.default) and args[2]:
            given = [torch.float32]
        raise ReachedError(given[0] if given else None)


def fill(argument: Any, operands: Iterator[torch.Tensor]) -> Any:
    kind = str(argument.type)
    if kind == "Tensor":
        return next(operands)
    if "List[Optional[Tensor]]" in kind:
        return [torch.empty(2, dtype=torch.int64, device="cuda")]
    if kind == "List[Tensor]":
        return [next(operands), next(operands)]
    return argument.default_value if argument.has_default_value() else FILLERS.get(kind)


def brought_in(op: Any, first: torch.dtype, others: torch.dtype) -> torch.dtype | None:
    """Return the format that autocast's kernel for CUDA brings in, with operands of two formats."""
    with FakeTensorMode(), torch.no_grad(), autocast():
        operands = (torch.empty(2, 2, dtype=dtype, device="cuda") for dtype in chain([first], repeat(others)))
        positional = [fill(argument, operands) for argument in op._schema.arguments if not argument.kwarg_only]
        named = {argument.name: fill(argument, operands) for argument in op._schema.arguments if argument.kwarg_only}
        try:
            with Stop():  # type: ignore[no-untyped-call] # torch's dispatch mode is not annotated
                op(*positional, **named)
        except ReachedError as reached:
            return reached.target
        except RuntimeError as error:
            if "autocast::prioritize" not in str(error):
                raise
    return None  # operators that promote refuse a third format


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kind in compare().policy.items() if kind != "banned"])
def test_every_kernel_does_what_the_policy_says(name: str, kind: str) -> None:
    base, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, base), overload or "default")
    third = torch.float16  # neither the format of autocast nor fp32: what it becomes is the policy
    observed = {LOWER: "lower", torch.float32: "fp32"}.get(brought_in(op, third, third) or third)
    if observed is None and brought_in(op, LOWER, torch.float32) is torch.float32:
        observed = "promote"
    assert observed == kind


def test_results_have_the_format_of_the_policy() -> None:
    """Through torch's own kernels, as far as they go on a build without CUDA: those that make a view need a device guard."""
    with FakeTensorMode(), torch.no_grad(), autocast():
        wide, narrow, row = fake(4, 4, dtype=torch.float32), fake(4, 4, dtype=LOWER), fake(4, dtype=LOWER)
        image = fake(1, 2, 4, 4, dtype=torch.float32)
        lower = [torch.mm(wide, wide), wide @ wide, torch.nn.functional.linear(wide, wide), torch.addmm(wide, wide, wide)]
        lower.append(torch.nn.functional.conv2d(image, fake(3, 2, 2, 2, dtype=torch.float32)))
        fp32 = [narrow.exp(), torch.softmax(narrow, -1), torch.log_softmax(narrow, -1), narrow.sum(), narrow.sum(0), narrow.cumsum(0), narrow**2]
        fp32 += [torch.nn.functional.layer_norm(narrow, (4,)), torch.nn.functional.rms_norm(narrow, (4,)), torch.nn.functional.mse_loss(narrow, narrow)]
        promote = [torch.addcmul(narrow, narrow, wide), torch.atan2(narrow, wide), torch.dot(row, fake(4, dtype=torch.float32))]
    assert {(result.dtype, result.device.type) for result in lower} == {(LOWER, "cuda")}
    assert {result.dtype for result in fp32} == {torch.float32}
    assert {result.dtype for result in promote} == {torch.float32}


def test_a_banned_operator_raises() -> None:
    with FakeTensorMode(), torch.no_grad(), autocast():
        narrow = fake(4, dtype=LOWER)
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            torch.nn.functional.binary_cross_entropy(narrow, narrow)
    assert compare().policy["binary_cross_entropy"] == "banned"


def loss_operands(pinned: bool) -> dict[str, list[torch.dtype]]:
    """Return what the operators below a cross entropy of bf16 logits get."""
    with FakeTensorMode(), torch.no_grad(), autocast():
        logits, wanted = fake(4, 8, dtype=LOWER), torch.empty(4, dtype=torch.int64, device="cuda")
        seen = Seen()
        if not pinned:
            with seen:
                torch.nn.functional.cross_entropy(logits, wanted)
        else:
            with PinnedPolicy(AUTOCAST_KEY, compare().policy), seen:
                torch.nn.functional.cross_entropy(logits, wanted)
    return seen.operands


def test_only_cross_entropy_is_pinned_and_its_log_softmax_then_runs_in_fp32() -> None:
    assert PinnedPolicy(AUTOCAST_KEY, compare().policy).pinned == ("cross_entropy_loss",), "the rest of the list is CUDA's own"
    assert loss_operands(pinned=False)["_log_softmax"] == [LOWER], "the reason to pin it"
    assert loss_operands(pinned=True)["_log_softmax"] == [torch.float32]
    assert loss_operands(pinned=False)["_log_softmax"] == [LOWER], "gone with the pin"


def test_reading_the_policy_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare()
