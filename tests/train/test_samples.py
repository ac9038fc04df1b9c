from __future__ import annotations

import pytest
import torch

from mpbackend.train.policy import find_op, sensitive_ops
from mpbackend.train.samples import Maker, sample, spatial_dimensions

CPU = torch.device("cpu")


def listed_ops() -> list[str]:
    """Return every operator that autocast of some device has a kernel for."""
    keys = [key for key in dir(torch._C.DispatchKey) if key.startswith("Autocast") and key != "AutocastFunctionality"]
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    return sorted(name.removeprefix("aten::") for name in names if any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys))


@pytest.mark.parametrize("name", sorted({*listed_ops(), *sensitive_ops()}))
def test_every_operator_that_autocast_lists_runs_on_its_sample(name: str) -> None:
    op = find_op(name)
    positional, named = sample(op, CPU, torch.float32)
    try:
        with torch.no_grad():
            op(*positional, **named)
    except NotImplementedError as error:
        assert "Could not run" in str(error), "an operator of another device, not a sample that does not fit"


def test_operands_have_the_format_that_is_asked_for() -> None:
    (a, b), _ = sample(find_op("mm"), CPU, torch.float16)
    assert (a.dtype, b.dtype) == (torch.float16, torch.float16)
    (logits, labels), _ = sample(find_op("cross_entropy_loss"), CPU, torch.bfloat16)
    assert (logits.dtype, labels.dtype) == (torch.bfloat16, torch.int64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_are_exact_and_square_operands_positive_definite(dtype: torch.dtype) -> None:
    square = Maker(CPU, dtype).real(4, 4)
    assert torch.equal(square.double(), Maker(CPU, torch.float64).real(4, 4))
    assert (torch.linalg.eigvalsh(square.float()) > 0).all()
    assert ((square > 0) & (square < 1)).all()


def test_overloads_with_other_arguments_have_samples_of_their_own() -> None:
    by_list, _ = sample(find_op("ctc_loss.IntList"), CPU, torch.float32)
    by_tensor, _ = sample(find_op("ctc_loss.Tensor"), CPU, torch.float32)
    assert by_list[2] == [4]
    assert by_tensor[2].tolist() == [4]
    assert isinstance(sample(find_op("quantile.scalar"), CPU, torch.float32)[0][1], float)


def test_dimensions_follow_from_the_name() -> None:
    assert {name: spatial_dimensions(name) for name in ("conv3d", "avg_pool1d", "_convolution", "mm")} == {
        "conv3d": 3,
        "avg_pool1d": 1,
        "_convolution": 2,
        "mm": 0,
    }
