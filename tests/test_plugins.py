"""Loading plugins: what one of them does wrong is told with its cause, and the rest work. Each plugin here is a real distribution in a folder."""

from __future__ import annotations

import importlib.metadata
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpbackend.errors import BackendError, UnknownNameError
from mpbackend.plugins import Plugins, load_plugins
from mpbackend.recipe import PRESETS

PREAMBLE = """
from pathlib import Path
from types import SimpleNamespace

from mpbackend.backend import MEMBERS
from mpbackend.device import Device
from mpbackend.hookspecs import hookimpl
from mpbackend.recipe import Recipe

HERE = Path(__file__).parent


def backend(name, **members):
    device = Device(key="cpu", arch="x", name="X", backend=name, type=name)
    return SimpleNamespace(**dict.fromkeys(MEMBERS) | {"name": name, "device_types": (name,), "discover": lambda: [device]} | members)
"""

GOOD = """
@hookimpl
def mpbackend_backends():
    return [backend("good")]
"""


class Site:
    """A folder of installed distributions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: list[str] = []

    def install(self, distribution: str, source: str) -> None:
        """Install a distribution of version 1.0 whose plugin has this source."""
        module = f"plugin_of_{distribution.replace('-', '_')}"
        self.modules.append(module)
        metadata = self.folder / f"{module}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n", encoding="utf-8")
        (metadata / "entry_points.txt").write_text(f"[mpbackend]\n{distribution.removeprefix('mpbackend-')} = {module}\n", encoding="utf-8")
        (self.folder / f"{module}.py").write_text(PREAMBLE + textwrap.dedent(source), encoding="utf-8")

    def load(self) -> Plugins:
        """Load the plugins of this folder and no others."""
        found = [point for distribution in importlib.metadata.distributions(path=[str(self.folder)]) for point in distribution.entry_points]
        return load_plugins(found)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A folder with one plugin that does everything right, ``good``."""
    monkeypatch.syspath_prepend(tmp_path)
    folder = Site(tmp_path)
    folder.install("mpbackend-good", GOOD)
    yield folder
    for module in folder.modules:
        sys.modules.pop(module, None)


def only_fault(plugins: Plugins) -> tuple[str, str, str]:
    """Return name, distribution and cause of the one thing that is unavailable, after checking that the good plugin works."""
    assert [device.backend for device in plugins.devices()] == ["good"]
    assert plugins.distributions["mpbackend-good"] == "1.0"
    assert len(plugins.unavailable) == 1
    fault = plugins.unavailable[0]
    assert fault.remedy
    return fault.name, fault.distribution, fault.cause


def test_good_plugin(site: Site) -> None:
    plugins = site.load()
    assert plugins.unavailable == []
    assert plugins.distributions == {"mpbackend-good": "1.0"}
    assert plugins.backend("good") is plugins.backends["good"]


def test_installed_plugins_have_no_fault() -> None:
    plugins = load_plugins()
    assert plugins.unavailable == []
    assert "mpbackend-cpu" in plugins.distributions


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("raise OSError('libacme.so: cannot open')", "OSError: libacme.so: cannot open"),
        ("import a_module_that_is_not_there", "ModuleNotFoundError: No module named 'a_module_that_is_not_there'"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("raise ValueError('first line\\nsecond line')", "ValueError: first line"),
        ("raise KeyError", "KeyError"),
        ("raise SystemExit('no driver')", "SystemExit: no driver"),
    ],
)
def test_plugin_that_raises_on_import(site: Site, source: str, cause: str) -> None:
    site.install("mpbackend-acme", source)
    name, distribution, found = only_fault(site.load())
    assert (name, distribution) == ("acme", "mpbackend-acme 1.0")
    assert found.startswith(cause)


def test_misspelt_hook(site: Site) -> None:
    site.install("mpbackend-acme", "@hookimpl\ndef mpbackend_backend():\n    return []")
    name, distribution, cause = only_fault(site.load())
    assert (name, distribution) == ("acme", "mpbackend-acme 1.0")
    assert "mpbackend_backend" in cause


def test_hook_without_its_mark(site: Site) -> None:
    site.install("mpbackend-acme", "def mpbackend_backends():\n    return []")
    assert "mpbackend_backends: it lacks the mark of a hook" in only_fault(site.load())[2]


def test_hook_that_takes_an_argument(site: Site) -> None:
    site.install("mpbackend-acme", "@hookimpl\ndef mpbackend_backends(device):\n    return []")
    assert "mpbackend_backends" in only_fault(site.load())[2]


@pytest.mark.parametrize("hook", ["backends", "matrices", "recipes"])
def test_hook_that_raises(site: Site, hook: str) -> None:
    site.install("mpbackend-acme", f"@hookimpl\ndef mpbackend_{hook}():\n    raise RuntimeError('driver too old')")
    assert only_fault(site.load()) == ("acme", "mpbackend-acme 1.0", f"mpbackend_{hook} raised RuntimeError: driver too old")


def test_hook_that_returns_nothing_iterable(site: Site) -> None:
    site.install("mpbackend-acme", "@hookimpl\ndef mpbackend_backends():\n    return 1")
    assert "mpbackend_backends raised TypeError" in only_fault(site.load())[2]


def test_hook_that_returns_none_offers_nothing(site: Site) -> None:
    site.install("mpbackend-acme", "@hookimpl\ndef mpbackend_backends():\n    pass")
    plugins = site.load()
    assert (plugins.unavailable, list(plugins.backends)) == ([], ["good"])


def test_name_already_taken_names_both_distributions(site: Site) -> None:
    site.install("mpbackend-zebra", GOOD)
    name, distribution, cause = only_fault(site.load())
    assert (name, distribution) == ("good", "mpbackend-zebra 1.0")
    assert "already taken by mpbackend-good 1.0" in cause


def test_device_type_already_taken_is_a_clash(site: Site) -> None:
    site.install("mpbackend-zeta", '@hookimpl\ndef mpbackend_backends():\n    return [backend("zeta", device_types=("good",))]')
    assert only_fault(site.load()) == ("zeta", "mpbackend-zeta 1.0", "the backend name 'good' is already taken by mpbackend-good 1.0")


def test_one_distribution_cannot_take_a_name_twice(site: Site) -> None:
    site.install("mpbackend-zeta", '@hookimpl\ndef mpbackend_backends():\n    return [backend("zeta", discover=list), backend("zeta", discover=list)]')
    plugins = site.load()
    assert only_fault(plugins)[0] == "zeta"
    assert "give them different names in mpbackend-zeta 1.0" in plugins.unavailable[0].remedy


def test_asking_again_reports_a_fault_once(site: Site) -> None:
    site.install("mpbackend-zeta", '@hookimpl\ndef mpbackend_backends():\n    return [backend("zeta", discover=lambda: 1 / 0)]')
    plugins = site.load()
    for _ in range(3):
        plugins.devices()
    assert len(plugins.unavailable) == 1


@pytest.mark.parametrize("hook", ["backends", "matrices", "recipes"])
def test_hook_that_exits(site: Site, hook: str) -> None:
    site.install("mpbackend-acme", f"import sys\n@hookimpl\ndef mpbackend_{hook}():\n    sys.exit('no driver')")
    assert only_fault(site.load()) == ("acme", "mpbackend-acme 1.0", f"mpbackend_{hook} raised SystemExit: no driver")


@pytest.mark.parametrize(("hook", "answer"), [("backends", "'acme'"), ("matrices", "'/acme.toml'"), ("matrices", "b'acme.toml'"), ("recipes", "'bf16'")])
def test_hook_that_returns_text(site: Site, hook: str, answer: str) -> None:
    site.install("mpbackend-acme", f"@hookimpl\ndef mpbackend_{hook}():\n    return {answer}")
    assert f"mpbackend_{hook} raised TypeError: it returned a {'bytes' if answer[0] == 'b' else 'str'}" in only_fault(site.load())[2]


@pytest.mark.parametrize("path", ["str(HERE / 'acme.toml')", "None", "7"])
def test_matrix_that_is_no_path(site: Site, path: str) -> None:
    site.install("mpbackend-acme", f"@hookimpl\ndef mpbackend_matrices():\n    return [{path}]")
    plugins = site.load()
    assert "which is no pathlib.Path" in only_fault(plugins)[2]
    assert plugins.matrix().devices


def test_one_bad_item_of_a_hook_leaves_the_others(site: Site) -> None:
    source = """
    @hookimpl
    def mpbackend_recipes():
        return {"acme-a": 3, "acme-b": Recipe(preset="acme-b", params="floaty"), "acme-c": Recipe(preset="acme-c")}
    """
    site.install("mpbackend-acme", source)
    plugins = site.load()
    assert [name for name in plugins.presets if name.startswith("acme")] == ["acme-c"]
    assert [(entry.name, entry.distribution) for entry in plugins.unavailable] == [("acme-a", "mpbackend-acme 1.0"), ("acme-b", "mpbackend-acme 1.0")]


@pytest.mark.parametrize(
    ("recipe", "cause"),
    [
        ("Recipe(preset='acme', params=3)", "Expected `str`, got `int` - at `$.params`"),
        ("Recipe(preset='acme', params='floaty')", "unknown format for params 'floaty'"),
        ("Recipe(preset='acme', params='BF16')", "write it bf16"),
        ("Recipe(preset='acme', loss_scale=LossScaling(init=3.0))", "loss_scale.init = 3.0"),
        ("Recipe(preset='acme', sensitive='bf16')", "$.sensitive"),
    ],
)
def test_preset_that_is_not_valid(site: Site, recipe: str, cause: str) -> None:
    source = f"from mpbackend.roles import LossScaling\n\n@hookimpl\ndef mpbackend_recipes():\n    return {{'acme': {recipe}}}"
    site.install("mpbackend-acme", source)
    plugins = site.load()
    name, _, found = only_fault(plugins)
    assert name == "acme"
    assert cause in found
    assert dict(plugins.presets) == dict(PRESETS)


@pytest.mark.parametrize("name", ["", "Acme", "a b", "a:b", "a,b", "-a", "_a", "ä", "a\\n", "auto"])
def test_names_are_of_a_few_characters(site: Site, name: str) -> None:
    source = f"""
    @hookimpl
    def mpbackend_backends():
        return [backend("{name}"), backend("zeta", device_types=("{name}",), discover=list)]

    @hookimpl
    def mpbackend_recipes():
        return {{"{name}": Recipe(preset="{name}")}}
    """
    site.install("mpbackend-acme", source)
    plugins = site.load()
    assert [device.backend for device in plugins.devices()] == ["good"]
    assert list(plugins.backends) == ["good"]
    presets = set() if name != "auto" else {"auto"}
    assert set(plugins.presets) - set(PRESETS) == presets, "auto is a spec, and no preset takes it"
    assert len(plugins.unavailable) == 3 - len(presets)
    assert all("a-z" in fault.cause or "auto" in fault.cause for fault in plugins.unavailable)


@pytest.mark.parametrize(
    ("members", "cause"),
    [
        ("device_types='xpu'", "device_types is a str"),
        ("device_types=7", "device_types is a int"),
        ("device_types=(7,)", "device type 7"),
        ("device_types=None", "device_types is a NoneType"),
    ],
)
def test_device_types_are_a_sequence_of_names(site: Site, members: str, cause: str) -> None:
    site.install("mpbackend-acme", f"@hookimpl\ndef mpbackend_backends():\n    return [backend('acme', {members})]")
    name, _, found = only_fault(site.load())
    assert name == "acme"
    assert cause in found


def test_name_that_is_no_text(site: Site) -> None:
    site.install("mpbackend-acme", "@hookimpl\ndef mpbackend_backends():\n    return [backend(7)]")
    assert "backend name 7" in only_fault(site.load())[2]


HANGING = """
    import threading

    RELEASED = threading.Event()
    CALLS = []

    def discover():
        CALLS.append(1)
        RELEASED.wait()
        return []

    @hookimpl
    def mpbackend_backends():
        return [backend("acme", discover=discover)]
"""


def test_discover_that_hangs_is_given_up_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpbackend.inquiry.TIME_LIMIT", 0.05)
    site.install("mpbackend-acme", HANGING)
    plugins = site.load()
    module = sys.modules["plugin_of_mpbackend_acme"]
    try:
        for _ in range(3):
            assert [device.backend for device in plugins.devices()] == ["good"]
        assert module.CALLS == [1]
        assert [(fault.name, fault.cause) for fault in plugins.unavailable] == [("acme", "discover() gave no answer within 0.05 s")]
    finally:
        module.RELEASED.set()


def test_device_of_another_backend_is_left_out(site: Site) -> None:
    source = """
    @hookimpl
    def mpbackend_backends():
        return [backend("acme", discover=lambda: [Device(key="a", arch="x", name="A", backend="good"), Device(key="b", arch="x", name="B", backend="acme")])]
    """
    site.install("mpbackend-acme", source)
    plugins = site.load()
    assert [device.key for device in plugins.devices()] == ["b", "cpu"]
    assert [fault.cause for fault in plugins.unavailable] == ["discover() returned a device of backend 'good'"]


def test_missing_members_are_named(site: Site) -> None:
    site.install("mpbackend-acme", "b = backend('acme')\ndel b.clock, b.switches\n@hookimpl\ndef mpbackend_backends():\n    return [b]")
    plugins = site.load()
    assert only_fault(plugins) == ("acme", "mpbackend-acme 1.0", "the backend lacks switches, clock")
    with pytest.raises(BackendError, match=r"backend 'acme': unavailable: the backend lacks switches, clock \(mpbackend-acme 1\.0\)"):
        plugins.backend("acme")


def test_one_bad_backend_leaves_the_plugin_its_other_one(site: Site) -> None:
    site.install("mpbackend-acme", "@hookimpl\ndef mpbackend_backends():\n    return [SimpleNamespace(name='half'), backend('whole', discover=lambda: [])]")
    plugins = site.load()
    assert only_fault(plugins)[0] == "half"
    assert plugins.backend("whole").name == "whole"


def test_discover_that_raises_hides_no_other_device(site: Site) -> None:
    source = """
    def discover():
        raise OSError("no driver")

    @hookimpl
    def mpbackend_backends():
        return [backend("acme", discover=discover)]
    """
    site.install("mpbackend-acme", source)
    plugins = site.load()
    assert plugins.unavailable == []
    assert [device.backend for device in plugins.devices()] == ["good"]
    assert [(fault.name, fault.distribution, fault.cause) for fault in plugins.unavailable] == [
        ("acme", "mpbackend-acme 1.0", "discover() raised OSError: no driver")
    ]


def test_discover_that_fails_half_way_keeps_what_it_found(site: Site) -> None:
    source = """
    def discover():
        yield Device(key="a", arch="x", name="A", backend="acme")
        raise OSError("second card hangs")

    @hookimpl
    def mpbackend_backends():
        return [backend("acme", discover=discover)]
    """
    site.install("mpbackend-acme", source)
    assert [device.key for device in site.load().devices()] == ["a", "cpu"]


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (None, "No such file"),
        ("schema = ", "acme.toml"),
        ("schema = 1\nfamily = 'acme'\nfamilly = 1", "familly"),
        ("schema = 2\nfamily = 'acme'", "schema"),
        ("schema = 1\nfamily = 'acme'\n[[device]]\nkey = 'x1'\narch = 'x'\nname = 'X1'\nsource = ['s']\nevidence = 'documented'", "architecture 'x'"),
    ],
)
def test_bad_matrix_is_unavailable_and_the_shipped_ones_load(site: Site, document: str | None, problem: str) -> None:
    site.install("mpbackend-acme", "@hookimpl\ndef mpbackend_matrices():\n    return [HERE / 'acme.toml']")
    if document is not None:
        (site.folder / "acme.toml").write_text(document, encoding="utf-8")
    plugins = site.load()
    assert plugins.matrix().devices
    name, distribution, cause = only_fault(plugins)
    assert (name, distribution) == ("acme.toml", "mpbackend-acme 1.0")
    assert problem in cause


def test_matrix_that_declares_a_shipped_device_is_unavailable(site: Site) -> None:
    site.install("mpbackend-acme", "@hookimpl\ndef mpbackend_matrices():\n    return [HERE / 'acme.toml']")
    shipped = Plugins().matrix()
    arch = next(iter(shipped.archs))
    document = f"schema = 1\nfamily = 'acme'\n[[source]]\nid = 's'\ntitle = 'S'\nlocation = 'l'\n[[arch]]\nkey = '{arch}'\nname = 'A'\nfamily = 'acme'\n"
    (site.folder / "acme.toml").write_text(document + "source = ['s']\nevidence = 'documented'\n", encoding="utf-8")
    plugins = site.load()
    assert plugins.matrix().archs[arch] == shipped.archs[arch]
    assert f"architecture {arch!r} is declared twice" in only_fault(plugins)[2]


ROW = """
[[row]]
arch = "{arch}"
op = "{op}"
a = "bf16"
b = "bf16"
path = "mma.sync"
accumulate = "fp32"
level = "native"
source = ["s"]
evidence = "documented"
"""


def test_rows_of_a_plugin_change_no_decision_about_a_shipped_device(site: Site) -> None:
    site.install("mpbackend-acme", "@hookimpl\ndef mpbackend_matrices():\n    return [HERE / 'acme.toml']")
    arch = Plugins().matrix().device("v100").arch
    rows = "".join(ROW.format(arch=arch, op=op) for op in ("matmul", "conv"))
    (site.folder / "acme.toml").write_text(f"schema = 1\nfamily = 'acme'\nsource = [{{ id = 's', title = 'S', location = 'l' }}]\n{rows}", encoding="utf-8")
    plugins = site.load()
    assert len(plugins.matrix().rows(arch)) == len(Plugins().matrix().rows(arch))
    name, _, cause = only_fault(plugins)
    assert name == "acme.toml"
    assert "acme.toml: row" in cause
    assert f"architecture {arch!r} is declared in nvidia.toml" in cause


RECIPES = "@hookimpl\ndef mpbackend_recipes():\n    return {'%s': Recipe(preset='%s', params='bf16')}"


def test_preset_of_a_plugin(site: Site) -> None:
    site.install("mpbackend-acme", RECIPES % ("acme", "acme"))
    plugins = site.load()
    assert plugins.unavailable == []
    assert plugins.presets["acme"].params == "bf16"
    assert "acme" not in PRESETS


def test_preset_whose_name_differs_from_its_recipe(site: Site) -> None:
    site.install("mpbackend-acme", RECIPES % ("acme", "emca"))
    plugins = site.load()
    assert "preset 'acme'" in only_fault(plugins)[2]
    assert dict(plugins.presets) == dict(PRESETS)


def test_preset_that_the_core_has(site: Site) -> None:
    site.install("mpbackend-acme", RECIPES % ("bf16", "bf16"))
    plugins = site.load()
    name, _, cause = only_fault(plugins)
    assert name == "bf16"
    assert "already taken by mpbackend" in cause
    assert plugins.presets["bf16"] == PRESETS["bf16"]


def test_recipe_that_is_no_recipe(site: Site) -> None:
    site.install("mpbackend-acme", "@hookimpl\ndef mpbackend_recipes():\n    return {'acme': {'params': 'bf16'}}")
    assert "mpbackend_recipes raised" in only_fault(site.load())[2]


def test_unknown_backend_lists_what_is_installed(site: Site) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown backend 'goood'.*nearest: good"):
        site.load().backend("goood")


def test_loading_twice_shares_nothing(site: Site) -> None:
    first, second = site.load(), site.load()
    first.presets.clear()
    first.matrices.clear()
    assert second.presets
    assert second.matrices
