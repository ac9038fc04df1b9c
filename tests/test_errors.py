"""Errors answer what was asked, what was found, what is allowed and what to do next, in one line and as attributes."""

from __future__ import annotations

import pytest

from mpbackend.errors import BackendError, DocumentError, MpbackendError, PlanError, SessionError, UnknownNameError, nearest_names


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [(UnknownNameError, LookupError), (DocumentError, ValueError), (PlanError, ValueError), (BackendError, RuntimeError), (SessionError, RuntimeError)],
)
def test_each_class_is_also_a_builtin(kind: type[MpbackendError], builtin: type[Exception]) -> None:
    assert issubclass(kind, builtin)
    assert issubclass(kind, MpbackendError)


def test_message_gives_all_four_answers() -> None:
    error = BackendError("device 'npu:0'", found="no driver", allowed=["cpu", "emu"], remedy="install it")
    assert str(error) == "device 'npu:0': no driver; allowed: cpu, emu; install it"
    assert (error.asked, error.found, error.allowed, error.remedy) == ("device 'npu:0'", "no driver", ("cpu", "emu"), "install it")


def test_parts_that_are_missing_leave_no_trace() -> None:
    assert str(MpbackendError("recipe 'x'")) == "recipe 'x'"
    assert str(MpbackendError("recipe 'x'", remedy="run y")) == "recipe 'x'; run y"


def test_unknown_name_shows_the_nearest() -> None:
    error = UnknownNameError("preset", "BF61", ["bf16", "fp16", "hif8"])
    assert str(error) == "unknown preset 'BF61': no preset has that name (nearest: bf16, fp16)"
    assert error.allowed == ("bf16", "fp16", "hif8")
    assert (error.kind, error.name) == ("preset", "BF61")


def test_unknown_name_far_from_all_lists_some() -> None:
    error = UnknownNameError("op", "zzz", [f"op{n:02}" for n in range(20)], remedy="see the list")
    assert str(error) == f"unknown op 'zzz': no op has that name; allowed: {', '.join(f'op{n:02}' for n in range(12))}, 8 more; see the list"
    assert len(error.allowed) == 20


def test_unknown_name_in_an_empty_table() -> None:
    assert str(UnknownNameError("backend", "cpu", [])) == "unknown backend 'cpu': no backend has that name"


def test_plan_error_carries_its_decisions() -> None:
    refused = [object(), object()]
    assert PlanError("fp8 on v100", decisions=refused).decisions == tuple(refused)
    assert PlanError("fp8 on v100").decisions == ()


def test_nearest_names_keep_their_spelling_and_order() -> None:
    assert nearest_names("FP61", ["bf16", "FP16", "fp32"]) == ["FP16", "fp32", "bf16"]
    assert nearest_names("fp1", ["bf16", "fp16", "fp32", "tf32"], limit=1) == ["fp16"]
    assert nearest_names("x", []) == []
