"""The catalog fits the code as it is now, and its runner tells red from green."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from tests.faults import run
from tests.faults.catalog import HERE, ROOT, Fault, load_faults

CASES = {
    "01": "parameters in another format",
    "02": "clipping before unscaling",
    "04": "an optimizer without gradients",
    "05": "a scale that changes within a step",
    "07": "a scheduler after a skip",
    "08": "a scaler that is not saved",
    "11": "fp16 without scaling",
    "22": "updates below half a spacing",
    "27": "a step inside autocast",
    "42": "buffers that are cast along",
    "44": "a sum that overflows before it is divided",
    "45": "a fused optimizer that skips",
    "53": "a device that saturates",
    "56": "skips without end",
    "70": "statistics of a skipped step",
}
"""The field cases of training semantics: a fault puts each back into the code, a test is named after each."""

FAULTS = load_faults()

NAMED = pytest.mark.parametrize("fault", FAULTS, ids=[fault.id for fault in FAULTS])


def test_there_are_many_faults_and_each_has_a_name_of_its_own() -> None:
    assert len({fault.id for fault in FAULTS}) == len(FAULTS) >= 40


@pytest.mark.parametrize("case", CASES)
def test_every_field_case_has_a_fault_whose_test_is_named_after_it(case: str) -> None:
    (fault,) = [fault for fault in FAULTS if fault.id == f"case-{case}"]
    assert any(f"::test_case_{case}_" in test for test in fault.test)


@NAMED
def test_a_fault_is_an_edit_of_the_code_as_it_is(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    changed = ast.dump(ast.parse(fault.applied(text)))
    assert changed != ast.dump(ast.parse(text)), "a comment is no fault"


@NAMED
def test_the_tests_of_a_fault_are_there(fault: Fault) -> None:
    assert fault.test
    for test in fault.test:
        path, _, name = test.partition("::")
        functions = {node.name for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}
        assert name in functions


@pytest.mark.parametrize("change", ["severity = 3\n", "id = 3\n"])
def test_a_misspelt_catalog_is_refused(tmp_path: Path, change: str) -> None:
    good = 'id = "x"\ntitle = "x"\nfile = "x.py"\nold = "a"\nnew = "b"\ntest = []\n'
    text = good + change if change.startswith("severity") else good.replace('id = "x"\n', change)
    (tmp_path / "bad.toml").write_text(f"[[fault]]\n{text}", encoding="utf-8")
    with pytest.raises(msgspec.ValidationError):
        load_faults(tmp_path)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a function and its test, a file that git does not track yet, and one that it ignores."""
    root = tmp_path_factory.mktemp("planted")
    (root / "half.py").write_text("def half(x):\n    return x / 2\n", encoding="utf-8")
    (root / "test_half.py").write_text(
        "from half import half\n\ndef test_half():\n    assert half(4) == 2\n\ndef test_type():\n    assert half(1.0) is not None\n", encoding="utf-8"
    )
    (root / ".gitignore").write_text("ignored.txt\n", encoding="utf-8")
    (root / "ignored.txt").write_text("large", encoding="utf-8")
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    entries = {
        "red": ("x / 2", "x / 4", "test_half.py::test_half"),
        "green": ("x / 2", "x / 2.0", "test_half.py::test_half"),
        "half-green": ("x / 2", "x / 3", 'test_half.py::test_half", "test_half.py::test_type'),
        "loud": ("x / 2", "y / 2", "test_half.py::test_half"),
        "gone": ("x / 3", "x / 4", "test_half.py::test_half"),
    }
    text = "".join(
        f'[[fault]]\nid = "{name}"\ntitle = "planted"\nfile = "half.py"\nold = "{old}"\nnew = "{new}"\ntest = ["{test}"]\n'
        for name, (old, new, test) in entries.items()
    )
    (root / "faults").mkdir()
    (root / "faults" / "planted.toml").write_text(text, encoding="utf-8")
    return root


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="the runner asks git which files to copy")


@needs_git
def test_the_runner_tells_red_from_green(planted: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--root", str(planted), "--catalog", str(planted / "faults")]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert "red   red: planted" in lines
    assert "GREEN green: planted: exit status 0; not failed: test_half.py::test_half" in lines
    assert "GREEN half-green: planted: exit status 1; not failed: test_half.py::test_type" in lines
    assert "GREEN loud: planted: NameError: name 'y' is not defined" in lines
    assert "GREEN gone: planted: gone: `old` stands 0 times in half.py" in lines
    assert lines[-1] == "1/5 faults turn their tests red"
    assert (planted / "half.py").read_text(encoding="utf-8") == "def half(x):\n    return x / 2\n"


@needs_git
def test_faults_are_chosen_by_name_and_all_red_is_success(planted: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--root", str(planted), "--catalog", str(planted / "faults"), "--only", "red"]) == 0
    assert capfd.readouterr().out.splitlines() == ["red   red: planted", "1/1 faults turn their tests red"]
    with pytest.raises(SystemExit, match="2"):
        run.main(["--catalog", str(planted / "faults"), "--only", "blue"])


@needs_git
def test_tests_that_fail_without_a_fault_are_an_error(planted: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "broken"
    shutil.copytree(planted, root)
    (root / "half.py").write_text("def half(x):\n    return x / 4 + 0 * (x / 2)\n", encoding="utf-8")
    assert run.main(["--root", str(root), "--catalog", str(root / "faults"), "--only", "red"]) == 1
    assert capfd.readouterr().out.splitlines()[-1] == "without any fault these tests must pass"


@needs_git
def test_a_copy_holds_what_git_would_track(planted: Path, tmp_path: Path) -> None:
    run.copy_tree(planted, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".gitignore", "faults", "half.py", "test_half.py"]


def test_a_package_that_is_found_elsewhere_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "msgspec").mkdir()
    (tmp_path / "msgspec" / "__init__.py").touch()
    run.check_copy(tmp_path)
    monkeypatch.setattr(run, "environment", lambda copy: dict(os.environ) | {"PYTHONSAFEPATH": "1"})
    with pytest.raises(RuntimeError, match=r"msgspec is found at .*, not in the copy"):
        run.check_copy(tmp_path)


def test_the_list_needs_no_copy(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--list", "--catalog", str(HERE)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(FAULTS)
