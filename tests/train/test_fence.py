"""The fence sets, reads back, shares, restores and reports."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mpbackend.backend import Switch
from mpbackend.errors import BackendError, UnknownNameError
from mpbackend.train.fence import FENCES, Fence, FenceRegistry


class Library:
    """A vendor library with global settings, and the order in which they were set."""

    def __init__(self, **settings: str) -> None:
        self.settings = settings
        self.calls: list[str] = []
        self.on_set: Callable[[str, str], str] = lambda _name, value: value

    def switch(self, name: str, *allowed: str) -> Switch:
        def set_value(value: str) -> None:
            self.calls.append(f"{name}={value}")
            self.settings[name] = self.on_set(name, value)

        return Switch(name=name, get=lambda: self.settings[name], set=set_value, allowed=allowed or ("ieee", "tf32", "none"))

    def switches(self) -> list[Switch]:
        return [self.switch(name) for name in self.settings]


@pytest.fixture
def library() -> Library:
    return Library(matmul="none", conv="tf32", rnn="none")


@pytest.fixture
def registry() -> FenceRegistry:
    return FenceRegistry()


def test_sets_reads_back_and_restores(library: Library, registry: FenceRegistry) -> None:
    with Fence(library.switches(), {"matmul": "ieee", "conv": "ieee"}, registry=registry) as fence:
        assert library.settings == {"matmul": "ieee", "conv": "ieee", "rnn": "none"}
        assert len(registry.holds) == 2
    assert library.settings == {"matmul": "none", "conv": "tf32", "rnn": "none"}
    assert not registry.holds
    assert library.calls == ["matmul=ieee", "conv=ieee", "conv=tf32", "matmul=none"], "restored in reverse order"
    assert fence.report() == {
        "matmul": {"before": "none", "set": "ieee", "read_back": "ieee", "after": "ieee"},
        "conv": {"before": "tf32", "set": "ieee", "read_back": "ieee", "after": "ieee"},
        "rnn": {"before": "none", "set": "", "read_back": "none", "after": "none"},
    }
    assert fence.changed() == ()


def test_report_mode_sets_nothing(library: Library, registry: FenceRegistry) -> None:
    with Fence(library.switches(), {"matmul": "ieee"}, "report", registry=registry) as fence:
        assert library.settings["matmul"] == "none"
        assert not registry.holds
    assert library.calls == []
    assert fence.report()["matmul"] == {"before": "none", "set": "", "read_back": "none", "after": "none"}


def test_unknown_names_and_settings_are_refused_before_anything_is_set(library: Library) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown switch 'matmull'.*nearest: matmul"):
        Fence(library.switches(), {"matmull": "ieee"})
    with pytest.raises(BackendError, match=r"matmul = 'fast'.*allowed: ieee, tf32, none"):
        Fence(library.switches(), {"conv": "ieee", "matmul": "fast"})
    with pytest.raises(UnknownNameError):
        Fence(library.switches(), {"matmull": "ieee"}, "report")
    assert library.calls == []


def test_a_setting_that_is_ignored_is_an_error_that_names_both_and_rolls_back(library: Library, registry: FenceRegistry) -> None:
    library.on_set = lambda name, value: "none" if name == "conv" and value == "ieee" else value
    with pytest.raises(BackendError, match=r"conv = 'ieee': it reads back 'none'"):
        Fence(library.switches(), {"matmul": "ieee", "conv": "ieee"}, registry=registry).enter()
    assert library.settings == {"matmul": "none", "conv": "tf32", "rnn": "none"}
    assert not registry.holds


def test_a_setter_that_raises_rolls_back(library: Library, registry: FenceRegistry) -> None:
    def refuse(name: str, value: str) -> str:
        if (name, value) == ("conv", "ieee"):
            raise ValueError("no such unit")
        return value

    library.on_set = refuse
    with pytest.raises(BackendError, match=r"conv = 'ieee': setting it raised ValueError: no such unit"):
        Fence(library.switches(), {"matmul": "ieee", "conv": "ieee"}, registry=registry).enter()
    assert library.settings == {"matmul": "none", "conv": "tf32", "rnn": "none"}


def test_two_settings_that_move_each_other_are_an_error(library: Library, registry: FenceRegistry) -> None:
    def coupled(name: str, value: str) -> str:
        if name == "conv":
            library.settings["matmul"] = value
        return value

    library.on_set = coupled
    with pytest.raises(BackendError, match=r"matmul = 'ieee': it reads 'none' once all switches are set"):
        Fence(library.switches(), {"matmul": "ieee", "conv": "none"}, registry=registry).enter()
    assert not registry.holds


def test_equal_values_share_a_hold_and_the_last_to_leave_restores(library: Library, registry: FenceRegistry) -> None:
    first = Fence(library.switches(), {"matmul": "ieee"}, registry=registry, owner="first").enter()
    second = Fence(library.switches(), {"matmul": "ieee"}, registry=registry, owner="second").enter()
    first.exit()
    assert library.settings["matmul"] == "ieee", "the second fence still holds it"
    second.exit()
    assert library.settings["matmul"] == "none"
    assert second.report()["matmul"]["before"] == "ieee"
    assert library.calls == ["matmul=ieee", "matmul=none"]


def test_another_value_is_refused_naming_both(library: Library, registry: FenceRegistry) -> None:
    with Fence(library.switches(), {"matmul": "ieee"}, registry=registry, owner="run a"):
        with pytest.raises(BackendError, match=r"switch matmul = 'tf32' for run b: it is held at 'ieee' by run a"):
            Fence(library.switches(), {"conv": "ieee", "matmul": "tf32"}, registry=registry, owner="run b").enter()
        assert library.settings == {"matmul": "ieee", "conv": "tf32", "rnn": "none"}
        with Fence(library.switches(), {"conv": "ieee"}, registry=registry):
            assert library.settings["conv"] == "ieee"
    assert library.settings == {"matmul": "none", "conv": "tf32", "rnn": "none"}


def test_backends_with_equal_names_do_not_meet(library: Library, registry: FenceRegistry) -> None:
    other = Library(matmul="none")
    first = Fence(library.switches(), {"matmul": "ieee"}, registry=registry, backend="a")
    with first, Fence(other.switches(), {"matmul": "tf32"}, registry=registry, backend="b"):
        assert (library.settings["matmul"], other.settings["matmul"]) == ("ieee", "tf32")
        with pytest.raises(BackendError, match="held at 'tf32'"):
            Fence(other.switches(), {"matmul": "ieee"}, registry=registry, backend="b").enter()
    assert (library.settings["matmul"], other.settings["matmul"]) == ("none", "none")


def test_a_change_from_outside_is_reported_and_undone(library: Library, registry: FenceRegistry) -> None:
    with Fence(library.switches(), {"matmul": "ieee"}, registry=registry) as fence:
        library.settings["matmul"] = "tf32"
        library.settings["rnn"] = "ieee"
        assert fence.report()["matmul"]["after"] == "tf32"
        assert fence.changed() == ("matmul", "rnn")
        with pytest.raises(BackendError, match=r"now it reads 'tf32': something else changed it"):
            Fence(library.switches(), {"matmul": "ieee"}, registry=registry).enter()
    assert library.settings == {"matmul": "none", "conv": "tf32", "rnn": "ieee"}, "a switch that is only observed is not touched"
    assert fence.report()["matmul"] == {"before": "none", "set": "ieee", "read_back": "ieee", "after": "tf32"}


def test_restores_after_an_exception(library: Library, registry: FenceRegistry) -> None:
    with pytest.raises(ZeroDivisionError), Fence(library.switches(), {"matmul": "ieee"}, registry=registry):
        raise ZeroDivisionError
    assert library.settings["matmul"] == "none"
    assert not registry.holds


def test_a_failed_restore_is_raised_after_the_others_were_restored(library: Library, registry: FenceRegistry) -> None:
    fence = Fence(library.switches(), {"matmul": "ieee", "conv": "ieee"}, registry=registry, owner="run a").enter()
    library.on_set = lambda name, value: "ieee" if name == "conv" else value
    with pytest.raises(BackendError, match=r"restoring the switches of run a: switch conv = 'tf32': it reads back 'ieee'"):
        fence.exit()
    assert library.settings["matmul"] == "none"
    assert not registry.holds


def test_a_failed_restore_does_not_hide_the_error_on_its_way(library: Library, registry: FenceRegistry) -> None:
    with pytest.raises(ZeroDivisionError) as caught, Fence(library.switches(), {"conv": "ieee"}, registry=registry):
        library.on_set = lambda _name, _value: "ieee"
        raise ZeroDivisionError
    assert any("it reads back 'ieee'" in note for note in caught.value.__notes__)


def test_a_fence_is_entered_once_at_a_time(library: Library, registry: FenceRegistry) -> None:
    fence = Fence(library.switches(), {"matmul": "ieee"}, registry=registry)
    assert fence.report() == {}
    fence.exit()
    with fence:
        with pytest.raises(BackendError, match="live already"):
            fence.enter()
        assert library.settings["matmul"] == "ieee"
    with fence:
        assert library.settings["matmul"] == "ieee"
    assert library.settings["matmul"] == "none"


def test_fences_without_a_registry_share_the_one_of_the_process(library: Library) -> None:
    with Fence(library.switches(), {"matmul": "ieee"}), pytest.raises(BackendError, match="held at 'ieee'"):
        Fence(library.switches(), {"matmul": "tf32"}).enter()
    assert not FENCES.holds
