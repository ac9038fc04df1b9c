"""Asking a backend: what raises, exits, hangs or answers with something else becomes a cause, and the devices that were found are kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mpbackend import inquiry
from mpbackend.backend import Backend, Implementation
from mpbackend.device import Device
from mpbackend.errors import BackendError, UnknownNameError
from mpbackend.inquiry import ask_address, ask_devices, ask_implementations, ask_notes
from mpbackend.planning import Plan
from mpbackend.recipe import parse_recipe

DEVICE = Device(key="acme-x1", arch="x", name="X1", backend="acme", type="acme")
RUNS = Implementation(op="matmul", a="bf16", b="bf16", path="aten", level="native")


def backend(**members: Any) -> Backend:
    """Return a backend of which only what a test needs is there."""
    return cast("Backend", SimpleNamespace(name="acme", device_types=("acme",), **members))


def raising(error: BaseException) -> Any:
    """Return a method that raises."""

    def method(*_arguments: Any) -> Any:
        raise error

    return method


def test_devices_are_returned_as_they_are() -> None:
    answer = ask_devices(backend(discover=lambda: [DEVICE]))
    assert answer.devices == (DEVICE,)
    assert answer.devices[0] is DEVICE
    assert (answer.causes, answer.hung) == ((), False)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError("no driver"), "discover() raised OSError: no driver"),
        (SystemExit("no driver"), "discover() raised SystemExit: no driver"),
        (SystemExit(), "discover() raised SystemExit"),
        (KeyboardInterrupt(), "discover() raised KeyboardInterrupt"),
    ],
)
def test_what_discover_raises_is_a_cause(error: BaseException, cause: str) -> None:
    assert ask_devices(backend(discover=raising(error))) == inquiry.Answer(causes=(cause,))


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (None, "discover() raised TypeError: 'NoneType' object is not iterable"),
        (7, "discover() raised TypeError: 'int' object is not iterable"),
        ([{"key": "acme-x1"}], "discover() returned a dict, which is no Device"),
        ("ab", "discover() returned a str, which is no Device"),
        ([None], "discover() returned a NoneType, which is no Device"),
        ([Device(key="a", arch="x", name="A", backend="cpu")], "discover() returned a device of backend 'cpu'"),
        ([Device(key="a", arch="x", name="A")], "discover() returned a device of backend ''"),
        ([Device(key="a", arch="x", name="A", backend="acme", index="0")], "index"),  # type: ignore[arg-type] # what a stranger may do
        ([Device(key=b"a", arch="x", name="A", backend="acme")], "a field has another type"),  # type: ignore[arg-type] # as above
        ([Device(key="a", arch="x", name="A", backend="acme", versions={"a": object()})], "discover() returned a device"),  # type: ignore[dict-item] # as above
    ],
)
def test_what_is_no_device_of_the_backend_is_a_cause(answer: Any, cause: str) -> None:
    found = ask_devices(backend(discover=lambda: answer))
    assert found.devices == ()
    assert len(found.causes) >= 1
    assert cause in found.causes[0]


def test_what_is_no_device_hides_no_other() -> None:
    assert ask_devices(backend(discover=lambda: [None, DEVICE])).devices == (DEVICE,)


@pytest.fixture
def hanging() -> Iterator[Backend]:
    """A backend that yields a device and then hangs until the test is over."""
    released = threading.Event()

    def discover() -> Iterator[Device]:
        yield DEVICE
        released.wait()

    yield backend(discover=discover)
    released.set()


def test_a_backend_that_hangs_is_given_up_and_what_it_found_is_kept(hanging: Backend) -> None:
    assert ask_devices(hanging, limit=0.05) == inquiry.Answer(devices=(DEVICE,), causes=("discover() gave no answer within 0.05 s",), hung=True)


def test_the_limit_can_be_waited_for() -> None:
    assert 1 < inquiry.TIME_LIMIT <= 60


def test_an_address_is_a_device() -> None:
    assert ask_address(backend(address=lambda text: DEVICE), "0") is DEVICE


def test_an_address_that_the_backend_does_not_know_is_its_own_error() -> None:
    error = UnknownNameError("device", "acme:9", ["0"])
    with pytest.raises(UnknownNameError) as caught:
        ask_address(backend(address=raising(error)), "9")
    assert caught.value is error


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        (raising(ValueError("invalid literal")), r"device 'acme:0': address\(\) raised ValueError: invalid literal"),
        (raising(SystemExit(3)), r"address\(\) raised SystemExit: 3"),
        (lambda text: None, r"address\(\) returned a NoneType, which is no Device"),
        (lambda text: Device(key="a", arch="x", name="A", backend="cpu"), r"address\(\) returned a device of backend 'cpu'"),
    ],
)
def test_a_broken_address_is_an_error_of_the_backend(address: Any, problem: str) -> None:
    with pytest.raises(BackendError, match=problem) as caught:
        ask_address(backend(address=address), "0")
    assert caught.value.remedy == "update or uninstall the plugin"


def test_implementations_are_a_list() -> None:
    assert ask_implementations(backend(implements=lambda device: iter([RUNS])), DEVICE) == [RUNS]


@pytest.mark.parametrize(
    ("implements", "problem"),
    [
        (raising(RuntimeError("driver too old")), r"what backend 'acme' runs on acme-x1: implements\(\) raised RuntimeError: driver too old"),
        (raising(SystemExit(1)), r"implements\(\) raised SystemExit: 1"),
        (lambda device: None, r"implements\(\) raised TypeError"),
        (lambda device: [{"op": "matmul"}], r"implements\(\) returned a dict, which is no Implementation"),
    ],
)
def test_broken_implementations_are_an_error_of_the_backend(implements: Any, problem: str) -> None:
    with pytest.raises(BackendError, match=problem):
        ask_implementations(backend(implements=implements), DEVICE)


PLAN = Plan(recipe="bf16", recipe_hash="", granted="bf16", effective=parse_recipe("bf16"), device=DEVICE)


def test_notes_are_optional_and_get_the_plan() -> None:
    assert ask_notes(backend(), PLAN) == ()
    assert ask_notes(backend(notes=lambda plan: [f"a word about {plan.granted}"]), PLAN) == ("a word about bf16",)


@pytest.mark.parametrize(
    ("notes", "problem"),
    [
        (raising(RuntimeError("no table")), r"what backend 'acme' notes about bf16 on acme-x1: notes\(\) raised RuntimeError: no table"),
        (lambda plan: None, r"notes\(\) raised TypeError"),
        (lambda plan: [3], r"notes\(\) returned a int, which is no text"),
    ],
)
def test_broken_notes_are_an_error_of_the_backend(notes: Any, problem: str) -> None:
    with pytest.raises(BackendError, match=problem):
        ask_notes(backend(notes=notes), PLAN)
