"""From a spec to a device, and from a device key to a plan, with fake backends."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from typing import cast

import pytest

from mpbackend.backend import Backend, Implementation
from mpbackend.device import Device, Kind
from mpbackend.errors import BackendError, PlanError, UnknownNameError
from mpbackend.matrix import load_matrix
from mpbackend.planning import NO_PLUGIN, Plan
from mpbackend.plugins import Plugins, Unavailable
from mpbackend.recipe import PRESETS, Recipe, gemm
from mpbackend.selection import Selection, find_device, local_rank, plan, select_device


def device(backend: str, index: int = 0, *, kind: Kind = "hardware", cause: str = "", key: str = "", device_type: str = "") -> Device:
    """Return a device; a cause makes it unusable."""
    return Device(
        key=key or f"{backend}-x1",
        arch="x",
        name=f"{backend} X1",
        backend=backend,
        type=device_type or backend,
        index=index,
        kind=kind,
        usable=not cause,
        cause=cause,
        remedy="install the driver" if cause else "",
    )


@dataclass
class FakeBackend:
    """A backend whose devices are given."""

    name: str
    devices: list[Device]
    device_types: tuple[str, ...] = ()
    implementations: list[Implementation] = field(default_factory=list)

    def discover(self) -> list[Device]:
        return self.devices

    def address(self, text: str) -> Device:
        for candidate in self.devices:
            if text in (str(candidate.index), candidate.key):
                return candidate
        raise UnknownNameError("device", f"{self.name}:{text}", [str(candidate.index) for candidate in self.devices])

    def implements(self, device: Device) -> list[Implementation]:
        return self.implementations


def plugins(*backends: FakeBackend) -> Plugins:
    """Return loaded plugins that offer these backends."""
    return Plugins(backends={backend.name: cast("Backend", backend) for backend in backends})


HOST = FakeBackend("cpu", [device("cpu")])
PAIR = FakeBackend("acme", [device("acme", 0), device("acme", 1, key="acme-x2")], ("xpu",))


def select(spec: str, *backends: FakeBackend, **environ: str) -> Device:
    """Return the device that a spec selects under an environment."""
    return select_device(spec, plugins(*backends), environ).device


def test_auto_prefers_an_accelerator_to_the_host() -> None:
    assert select("auto", HOST, PAIR) == PAIR.devices[0]
    assert select("auto", PAIR, HOST) == PAIR.devices[0]


def test_auto_takes_the_host_when_there_is_nothing_else() -> None:
    chosen = select_device("auto", plugins(HOST), {})
    assert chosen == Selection(cast("Backend", HOST), HOST.devices[0])


def test_auto_passes_over_what_is_not_usable() -> None:
    broken = FakeBackend("acme", [device("acme", 0, cause="no driver"), device("acme", 1)])
    assert select("auto", HOST, broken).index == 1
    assert select("auto", HOST, FakeBackend("acme", [device("acme", cause="no driver")])).backend == "cpu"


@pytest.mark.parametrize("kind", ["emulated", "simulated"])
def test_auto_passes_over_what_is_no_hardware(kind: Kind) -> None:
    emulator = FakeBackend("emu", [device("emu", kind=kind, device_type="cpu")])
    assert select("auto", emulator, HOST).backend == "cpu"
    with pytest.raises(BackendError, match="device 'auto'"):
        select("auto", emulator)


def test_auto_without_a_plugin_says_what_to_run() -> None:
    with pytest.raises(BackendError, match=r"device 'auto': no plugin found a device; `mpbackend doctor`"):
        select("auto")


def test_auto_without_a_usable_device_gives_every_cause() -> None:
    with pytest.raises(BackendError, match=r"acme-x1: no driver; cpu-x1: torch is missing"):
        select("auto", FakeBackend("acme", [device("acme", cause="no driver")]), FakeBackend("cpu", [device("cpu", cause="torch is missing")]))


def test_variable_overrides_auto_only() -> None:
    assert select("auto", HOST, PAIR, MPBACKEND="cpu").backend == "cpu"
    assert select("auto", HOST, PAIR, MPBACKEND=" acme:1 ").index == 1
    assert select("acme", HOST, PAIR, MPBACKEND="cpu").backend == "acme"


@pytest.mark.parametrize("value", ["", "  ", "auto"])
def test_empty_variable_changes_nothing(value: str) -> None:
    assert select("auto", HOST, PAIR, MPBACKEND=value).backend == "acme"


def test_variable_with_an_unknown_backend_is_an_error() -> None:
    with pytest.raises(UnknownNameError, match="unknown backend 'acne'"):
        select("auto", HOST, PAIR, MPBACKEND="acne")


def test_environment_of_the_process_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPBACKEND", "acme")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert select_device("auto", plugins(HOST, PAIR)).device.index == 1


@pytest.mark.parametrize("spec", ["acme", "xpu", "auto"])
def test_local_rank_picks_the_index(spec: str) -> None:
    assert select(spec, HOST, PAIR, LOCAL_RANK="1").index == 1


def test_address_wins_over_local_rank() -> None:
    assert select("acme:0", HOST, PAIR, LOCAL_RANK="1").index == 0


def test_ranks_share_one_host() -> None:
    assert select("cpu", HOST, LOCAL_RANK="3") == HOST.devices[0]


@pytest.mark.parametrize("value", ["", "-1", "1.0", "one", " 1", "0x1", "²"])
def test_bad_local_rank_is_an_error(value: str) -> None:
    with pytest.raises(BackendError, match=r"LOCAL_RANK=.*not a whole number from 0 to 999999999"):
        local_rank({"LOCAL_RANK": value})


@pytest.mark.parametrize(("environ", "rank"), [({}, 0), ({"LOCAL_RANK": "0"}, 0), ({"LOCAL_RANK": "12"}, 12)])
def test_local_rank(environ: dict[str, str], rank: int) -> None:
    assert local_rank(environ) == rank


@pytest.mark.parametrize(("spec", "index"), [("acme:0", 0), ("acme:1", 1), ("xpu:1", 1), ("acme:acme-x2", 1), ("xpu:acme-x1", 0)])
def test_address_is_digits_or_a_device_key(spec: str, index: int) -> None:
    assert select(spec, HOST, PAIR).index == index


@pytest.mark.parametrize("spec", ["acme:2", "acme:h100", "acme:", "acme:1:0"])
def test_address_that_the_backend_does_not_know(spec: str) -> None:
    with pytest.raises(UnknownNameError, match="unknown device"):
        select(spec, HOST, PAIR)


@pytest.mark.parametrize("spec", ["", "h100", ":0", "AUTO", "cpu 0"])
def test_name_that_no_plugin_offers(spec: str) -> None:
    with pytest.raises(UnknownNameError, match="unknown backend"):
        select(spec, HOST, PAIR)


def test_unavailable_backend_gives_its_cause() -> None:
    loaded = plugins(HOST)
    loaded.unavailable.append(Unavailable("acme", "mpbackend-acme 1.0", "OSError: libacme.so", "reinstall it"))
    with pytest.raises(BackendError, match=r"backend 'acme': unavailable: OSError: libacme.so \(mpbackend-acme 1.0\); reinstall it"):
        select_device("acme:0", loaded, {})


@pytest.mark.parametrize("spec", ["acme", "acme:0"])
def test_unusable_device_gives_cause_and_remedy(spec: str) -> None:
    with pytest.raises(BackendError, match=r"device 'acme(:0)?': not usable: no driver; install the driver"):
        select(spec, HOST, FakeBackend("acme", [device("acme", cause="no driver")]))


def test_backend_without_devices() -> None:
    with pytest.raises(BackendError, match=r"device 'acme': backend 'acme' found no device here"):
        select("acme", HOST, FakeBackend("acme", []))


class Broken(FakeBackend):
    """A backend whose methods raise."""

    def discover(self) -> list[Device]:
        raise OSError("no driver")

    def address(self, text: str) -> Device:
        return Device(key="cpu", arch="x", name="not mine", backend="cpu", index=int(text))

    def implements(self, device: Device) -> list[Implementation]:
        sys.exit("no driver")


def test_discover_that_raises_is_an_error_with_its_cause() -> None:
    broken = Broken("acme", [])
    with pytest.raises(BackendError, match=r"device 'acme': backend 'acme' found no device here: discover\(\) raised OSError: no driver"):
        select("acme", HOST, broken)
    assert select("auto", HOST, broken).backend == "cpu"
    with pytest.raises(BackendError, match=r"device 'auto': acme: discover\(\) raised OSError: no driver"):
        select("auto", broken)


@pytest.mark.parametrize(("spec", "problem"), [("acme:0", "a device of backend 'cpu'"), ("acme:one", "ValueError")])
def test_address_that_is_broken_is_an_error(spec: str, problem: str) -> None:
    with pytest.raises(BackendError, match=problem):
        select(spec, HOST, Broken("acme", []))


def test_implements_that_exits_is_an_error() -> None:
    here = Device(key="h100", arch="sm_90", name="here", backend="acme", type="acme")
    with pytest.raises(BackendError, match=r"what backend 'acme' runs on h100: implements\(\) raised SystemExit: no driver"):
        plan("bf16", here, plugins=plugins(Broken("acme", [here])))


@pytest.mark.parametrize("value", ["9" * 5000, "1" + "0" * 9])
def test_a_rank_beyond_any_machine_is_an_error(value: str) -> None:
    with pytest.raises(BackendError, match=r"LOCAL_RANK='[0-9.]+': not a whole number from 0 to 999999999") as caught:
        local_rank({"LOCAL_RANK": value})
    assert len(str(caught.value)) < 200


def test_known_device_without_its_plugin_is_planned_from_the_matrix() -> None:
    made = plan("bf16", "h100", plugins=plugins(HOST))
    assert (made.device.key, made.runnable, made.blockers) == ("h100", False, (f"{NO_PLUGIN} (none found the device h100 here)",))


def test_device_of_this_machine_wins_over_the_matrix() -> None:
    here = Device(key="h100", arch="sm_90", name="here", backend="acme", type="acme")
    loaded = plugins(FakeBackend("acme", [here]))
    assert find_device("h100", loaded, loaded.matrix()) is here
    assert find_device("h100", plugins(HOST), load_matrix()).backend == ""


def test_unusable_device_of_this_machine_is_planned_from_the_matrix() -> None:
    here = Device(key="h100", arch="sm_90", name="here", backend="acme", type="acme", usable=False, cause="no driver")
    assert find_device("h100", plugins(FakeBackend("acme", [here])), load_matrix()).backend == ""


def test_plan_runs_where_the_plugin_implements_it() -> None:
    target = find_device("h100", plugins(), load_matrix())
    here = Device(key="h100", arch=target.arch, name="here", backend="acme", type="acme")
    both = [Implementation(op=op, a="bf16", b="bf16", path="aten", level="native") for op in ("matmul", "conv")]
    loaded = plugins(FakeBackend("acme", [here], implementations=both))
    assert plan("bf16", "h100", plugins=loaded).runnable
    assert not plan("fp16", "h100", plugins=loaded).runnable


def test_plan_takes_recipes_and_devices_as_objects() -> None:
    loaded = plugins(HOST)
    as_text = plan("bf16", "h100", plugins=loaded)
    as_objects = plan(PRESETS["bf16"], find_device("h100", loaded, loaded.matrix()), plugins=loaded)
    assert as_text == as_objects


def test_plan_takes_presets_of_plugins() -> None:
    loaded = plugins(HOST)
    loaded.presets["acme"] = Recipe(preset="acme", compute=PRESETS["bf16"].compute)
    assert plan("acme", "h100", plugins=loaded).effective.compute.forward == "bf16"
    with pytest.raises(UnknownNameError, match="unknown preset 'acme'"):
        plan("acme", "h100", plugins=plugins(HOST))


def test_plan_on_an_unknown_device() -> None:
    with pytest.raises(UnknownNameError, match="unknown device 'h1oo'"):
        plan("bf16", "h1oo", plugins=plugins(HOST))


def test_plan_passes_the_policy_on() -> None:
    loaded = plugins(HOST)
    with pytest.raises(PlanError):
        plan("hif8", "h100", plugins=loaded)
    assert plan("hif8", "h100", plugins=loaded, on_unsupported="nearest").effective.compute.forward == "bf16"
    assert plan("bf16", "h100", plugins=loaded, micro_batches=4).micro_batches == 4


def test_planning_imports_no_torch() -> None:
    program = "import sys, mpbackend; mpbackend.plan('bf16', 'h100'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_more_ranks_than_accelerators_is_an_error() -> None:
    with pytest.raises(BackendError, match=r"LOCAL_RANK=2: backend 'acme' has 2 usable devices"):
        select("acme", HOST, PAIR, LOCAL_RANK="2")
    with pytest.raises(BackendError, match="LOCAL_RANK=2"):
        select("auto", HOST, PAIR, LOCAL_RANK="2")


def test_a_preset_of_a_plugin_is_written_over_itself() -> None:
    loaded = plugins(HOST)
    loaded.presets["acme"] = Recipe(preset="acme", compute=gemm("bf16"))
    made = plan("acme:compute=fp32", "h100", plugins=loaded)
    assert (made.recipe, made.granted) == ("acme:compute=fp32", "acme:compute=fp32")
    assert plan("acme", "h100", plugins=loaded).recipe == "acme"
    assert made.recipe_hash != plan("acme", "h100", plugins=loaded).recipe_hash


class Noting(FakeBackend):
    """A backend that says something about every plan."""

    def notes(self, plan: Plan) -> list[str]:
        return [f"{plan.granted} on {plan.device.key}"]


def test_a_plan_carries_what_its_backend_notes() -> None:
    noting = Noting("acme", [device("acme", key="h100")])
    assert plan("bf16", noting.devices[0], plugins=plugins(noting)).notes == ("bf16 on h100",)
    assert plan("bf16", PAIR.devices[0], plugins=plugins(PAIR)).notes == ()
