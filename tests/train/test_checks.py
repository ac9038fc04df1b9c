"""What prepare refuses or warns of because of formats: parameters, eps, second moments."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import mpbackend
from mpbackend.errors import SessionError
from mpbackend.recipe import parse_recipe
from mpbackend.train.checks import check_eps, check_model, check_strangers, warn_of_lost_precision

CPU = torch.device("cpu")


def layers() -> nn.Sequential:
    """Return a model of three linears: six parameters."""
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


def plan(target: mpbackend.Target, recipe: str) -> mpbackend.Plan:
    """Plan a recipe on this CPU, whatever it lacks."""
    return target.plan(recipe, on_unsupported="emulate")


def test_case_01_a_submodule_in_fp16_is_named_with_the_recipe_that_trains_it() -> None:
    model = layers()
    model[1].half()
    with pytest.raises(SessionError) as caught:
        check_model(model, CPU, "fp32", "fp16")
    assert "parameters 1.weight is torch.float16, 1.bias is torch.float16; the recipe keeps fp32" in str(caught.value)
    assert "'fp16-master'" in caught.value.remedy
    assert "model.float()" in caught.value.remedy


def test_no_more_than_three_parameters_are_named() -> None:
    with pytest.raises(SessionError, match=r"0\.weight is torch\.bfloat16, 0\.bias is torch\.bfloat16, 1\.weight is torch\.bfloat16 and 3 more") as caught:
        check_model(layers().bfloat16(), CPU, "fp32", "bf16")
    assert "'bf16-master'" in caught.value.remedy


@pytest.mark.parametrize("params", ["fp32", "bf16", "fp16"])
def test_fp32_parameters_and_those_of_the_working_format_are_accepted(params: str) -> None:
    model = layers()
    model[2].to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[params])
    check_model(model, CPU, params, params)


@pytest.mark.parametrize(("dtype", "params"), [(torch.float64, "fp32"), (torch.float64, "bf16"), (torch.float16, "bf16"), (torch.bfloat16, "fp16")])
def test_other_formats_are_refused(dtype: torch.dtype, params: str) -> None:
    with pytest.raises(SessionError, match=rf"0\.weight is {dtype}.*model\.float\(\)"):
        check_model(layers().to(dtype), CPU, params, params)


@pytest.mark.parametrize(
    ("recipe", "eps", "message"),
    [
        ("fp16:params=fp16,grads=fp16,optimizer=fp16", 1e-8, "AdamW: eps 1e-08 of group 0 is 0 in fp16, the format of updates; give an eps of 6.0e-08"),
        ("fp16-master:optimizer.exp_avg_sq=fp16", 1e-8, "is 0 in fp16, the format of optimizer.exp_avg_sq"),
        ("fp16-master:optimizer.exp_avg_sq=fp16", 2.0**-25, "is 0 in fp16"),
        ("fp16-master:optimizer.exp_avg_sq=fp16", 2.0**-24, None),
        ("fp16-master", 1e-8, None),
        ("fp16-master:optimizer.exp_avg=fp16", 1e-8, None),
        ("bf16-params", 1e-8, None),
        ("bf16-params", 1e-42, "is 0 in bf16"),
        ("fp32", 1e-8, None),
    ],
)
def test_an_eps_that_vanishes_is_refused(recipe: str, eps: float, message: str | None) -> None:
    optimizer = torch.optim.AdamW(layers().parameters(), eps=eps)
    if message is None:
        check_eps([optimizer], parse_recipe(recipe))
        return
    with pytest.raises(SessionError, match=message):
        check_eps([torch.optim.SGD(layers().parameters(), lr=1.0), optimizer], parse_recipe(recipe))


def test_no_eps_and_an_eps_of_zero_are_the_users_choice() -> None:
    recipe = parse_recipe("fp16:params=fp16,grads=fp16,optimizer=fp16")
    check_eps([torch.optim.SGD(layers().parameters(), lr=1.0), torch.optim.AdamW(layers().parameters(), eps=0.0)], recipe)


@pytest.mark.parametrize(
    ("recipe", "beta2", "message"),
    [
        ("bf16-master:optimizer.exp_avg_sq=bf16", 0.999, r"AdamW: beta2 0\.999 moves a second moment in bf16 by 1\.0e-03 .* 3\.9e-03"),
        ("bf16-master:optimizer.exp_avg_sq=bf16", 0.99, None),
        ("bf16-master:optimizer.exp_avg=bf16", 0.999, None),
        ("fp16-master:optimizer.exp_avg_sq=fp16", 0.999, None),
        ("fp16-master:optimizer.exp_avg_sq=fp16", 0.9999, "in fp16 by 1.0e-04"),
        ("bf16-master", 0.999999, None),
    ],
)
def test_a_second_moment_that_hardly_moves_is_a_warning(target: mpbackend.Target, recipe: str, beta2: float, message: str | None) -> None:
    optimizer = torch.optim.AdamW(layers().parameters(), betas=(0.9, beta2))
    if message is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_of_lost_precision(plan(target, recipe), [optimizer])
        return
    with pytest.warns(UserWarning, match=message):
        warn_of_lost_precision(plan(target, recipe), [optimizer])


def test_case_22_pure_bf16_warns_and_names_what_keeps_updates(target: mpbackend.Target) -> None:
    optimizer = torch.optim.SGD(layers().parameters(), lr=1e-3)
    with pytest.warns(UserWarning, match=r"bf16-params: no master copy: an update below 0\.00195312 of a weight is lost; bf16-kahan and bf16-sr keep it"):
        warn_of_lost_precision(plan(target, "bf16-params"), [optimizer])


def test_the_second_moment_does_stand_still() -> None:
    """What the warning says: from v = 1 and g = 1.2, ten steps of beta2 = 0.999 leave v at 1 in bf16."""
    moved = torch.tensor(1.0, dtype=torch.bfloat16)
    for _ in range(10):
        moved.mul_(0.999).add_(torch.tensor(1.2**2 * 0.001, dtype=torch.bfloat16))
    kept = torch.tensor(1.0)
    for _ in range(10):
        kept.lerp_(torch.tensor(1.2**2), 0.001)
    assert moved.item() == 1.0
    assert kept.item() > 1.004


@pytest.mark.parametrize(
    ("recipe", "dtype", "refused"),
    [
        ("bf16", torch.bfloat16, True),
        ("fp16", torch.float16, True),
        ("fp32", torch.float16, True),
        ("bf16-master", torch.bfloat16, True),
        ("bf16-kahan", torch.bfloat16, True),
        ("bf16-params", torch.float16, True),
        ("bf16-params", torch.bfloat16, False),
        ("bf16", torch.float64, True),
        ("bf16", torch.complex64, True),
        ("fp32", torch.float64, True),
        ("bf16-master", torch.float32, False),
        ("bf16", torch.float32, False),
        ("bf16", torch.int64, False),
    ],
)
def test_case_01_a_tensor_beside_the_model_in_a_format_that_nobody_looks_after_is_refused(recipe: str, dtype: torch.dtype, refused: bool) -> None:
    model = layers()
    extra = torch.ones(2, 3, dtype=dtype, requires_grad=dtype != torch.int64)
    optimizers = [torch.optim.AdamW(model[0].parameters()), torch.optim.SGD([*model[1].parameters(), extra], lr=0.1)]
    if not refused:
        check_strangers(optimizers, model, parse_recipe(recipe))
        return
    with pytest.raises(SessionError, match=rf"in SGD, beside the parameters of the model, a tensor of shape \(2, 3\) is {dtype}; make it fp32, or a parameter"):
        check_strangers(optimizers, model, parse_recipe(recipe))


def test_no_more_than_three_tensors_beside_the_model_are_named() -> None:
    model = layers()
    extra = [torch.ones(count, dtype=torch.float64, requires_grad=True) for count in range(1, 6)]
    with pytest.raises(SessionError, match=r"shape \(1,\) .* shape \(2,\) .* shape \(3,\) is torch\.float64 and 2 more; make"):
        check_strangers([torch.optim.SGD([*model.parameters(), *extra], lr=0.1)], model, parse_recipe("bf16"))
