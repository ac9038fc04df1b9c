"""The demo's options and folders; what it trains is tested with the example."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from mpbackend.cli import demo
from mpbackend.cli.demo import RECIPES, choose_recipes, clear_record, folder_name
from mpbackend.device import Device
from mpbackend.errors import DocumentError
from mpbackend.matrix import load_matrix
from mpbackend.observe.record import RECORD_FILE, STEPS_FILE, RecipeName, Recorded, Run, RunRecord, StepRow
from mpbackend.observe.record_writer import RecordWriter, count_totals

Invoke = Callable[..., Result]


def record(folder: Path) -> Path:
    """Make a folder that holds a record."""
    folder.mkdir()
    for name in (RECORD_FILE, STEPS_FILE):
        (folder / name).write_text("{}", encoding="utf-8")
    return folder


def test_a_record_of_an_earlier_demo_is_removed(tmp_path: Path) -> None:
    folder = record(tmp_path / "bf16")
    clear_record(folder)
    assert not folder.exists() or os.listdir(folder) == []
    clear_record(folder)
    clear_record(tmp_path / "none")


def plant_folder(path: Path) -> None:
    """Make a folder that holds a file."""
    path.mkdir()
    (path / "mine").write_text("mine", encoding="utf-8")


def plant_link(path: Path) -> None:
    """Make a link to a file beside it."""
    target = path.parent.parent / "mine"
    target.write_text("mine", encoding="utf-8")
    path.symlink_to(target)


@pytest.mark.parametrize("plant", [plant_folder, plant_link, os.mkfifo])
@pytest.mark.parametrize("name", [RECORD_FILE, STEPS_FILE])
def test_what_only_has_the_name_of_a_record_is_left(tmp_path: Path, name: str, plant: Callable[[Path], None]) -> None:
    folder = tmp_path / "bf16"
    folder.mkdir()
    other = folder / ({RECORD_FILE, STEPS_FILE} - {name}).pop()
    other.write_text("{}", encoding="utf-8")
    plant(folder / name)
    with pytest.raises(DocumentError, match=rf"folder .*bf16: {name} is no regular file; choose another folder with --out"):
        clear_record(folder)
    assert os.path.lexists(folder / name)
    assert other.exists(), "nothing is deleted before everything was looked at"


def test_other_files_are_left(tmp_path: Path) -> None:
    folder = record(tmp_path / "bf16")
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(DocumentError, match=r"it holds notes\.txt"):
        clear_record(folder)
    assert len(os.listdir(folder)) == 3


def test_a_link_in_the_place_of_the_folder_is_left(tmp_path: Path) -> None:
    folder = record(tmp_path / "mine")
    for target in (folder, tmp_path / "nothing"):
        link = tmp_path / f"link to {target.name}"
        link.symlink_to(target)
        with pytest.raises(DocumentError, match="it is a link"):
            clear_record(link)
        assert link.is_symlink()
    assert len(os.listdir(folder)) == 2


def test_a_file_in_the_place_of_the_folder_is_left(tmp_path: Path) -> None:
    file = tmp_path / "bf16"
    file.write_text("mine", encoding="utf-8")
    with pytest.raises(DocumentError, match="it is no folder"):
        clear_record(file)
    assert file.read_text(encoding="utf-8") == "mine"


def test_a_folder_that_cannot_be_emptied_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = record(tmp_path / "bf16")

    def deny(self: Path, *_arguments: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "unlink", deny)
    with pytest.raises(DocumentError, match="Permission denied"):
        clear_record(folder)


@pytest.mark.parametrize(
    ("recipe", "recipes", "chosen"),
    [
        ((), None, RECIPES.split(",")),
        ((), "bf16, fp32,bf16", ["bf16", "fp32"]),
        (("fp16:loss_scale.init=4096,reduce.format=fp16",), None, ["fp16:loss_scale.init=4096,reduce.format=fp16"]),
        (("bf16:grads=bf16,buffers=fp32", "fp32"), "fp16,fp32", ["fp16", "fp32", "bf16:grads=bf16,buffers=fp32"]),
    ],
)
def test_recipes_are_joined_or_repeated(recipe: tuple[str, ...], recipes: str | None, chosen: list[str]) -> None:
    assert list(choose_recipes(recipe, recipes)) == chosen


def test_no_recipe_is_an_error() -> None:
    with pytest.raises(DocumentError, match="no recipe"):
        choose_recipes((), ",")


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--seed", str(10**26)], "--seed"),
        (["--seed", str(2**63)], "--seed"),
        (["--seed", "-1"], "--seed"),
        (["--steps", str(10**26)], "--steps"),
        (["--steps", "0"], "--steps"),
    ],
)
def test_numbers_out_of_range_are_refused(invoke: Invoke, tmp_path: Path, arguments: list[str], option: str) -> None:
    result = invoke("demo", *arguments, "--out", str(tmp_path))
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.stderr
    assert "Traceback" not in result.stderr


def test_folders_of_recipes_are_short_and_differ() -> None:
    assert folder_name("bf16") == "bf16"
    assert folder_name("fp16:loss_scale.init=4096") == "fp16_loss_scale.init_4096"
    long = [f"fp16:{'reduce.format=fp16,' * 20}loss_scale.init={number}" for number in (1024, 2048)]
    assert all(len(folder_name(text)) <= 120 for text in long)
    assert len({*map(folder_name, long)}) == 2


def test_recipes_that_would_share_a_folder_are_refused(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("demo", "--recipe", "bf16:grads=fp32", "--recipe", "bf16=grads:fp32", "--out", str(tmp_path), "--device", "cpu")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    with pytest.raises(DocumentError, match=r"bf16:a=1 and bf16=a:1.*one folder, bf16_a_1"):
        choose_recipes(("bf16:a=1", "bf16=a:1"), None)


def test_a_recipe_with_a_comma_is_trained(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[tuple[str, Path]] = []

    def train(_example: Any, _target: Any, plan: Any, folder: Path, _steps: int, _seed: int) -> Any:
        trained.append((plan.recipe, folder))
        raise DocumentError("stop here")

    monkeypatch.setattr(demo, "train", train)
    result = invoke("demo", "--recipe", "bf16:loss_scale.init=4096,loss_scale.mode=static", "--steps", "2", "--out", str(tmp_path), "--device", "cpu")
    assert result.stderr == "error: stop here\n"
    assert trained == [("bf16:loss_scale.init=4096,loss_scale.mode=static", tmp_path / "bf16_loss_scale.init_4096_loss_scale.mode_static")]


def run_of(recipe: str, out: Path, losses: tuple[float, ...] = (3.0, 2.0)) -> Recorded:
    """Write a record of a recipe below a folder and return it."""
    rows = tuple(StepRow(step=number, loss=loss, stepped=True) for number, loss in enumerate(losses, 1))
    device = Device(key="x86-64", arch="x86-64", name="a processor")
    record = RunRecord(
        run=Run(id=recipe, seed=1),
        environment={},
        device=device,
        recipe=RecipeName(text=recipe, hash=recipe, granted=recipe),
        plan=(),
        totals=count_totals(rows),
    )
    writer = RecordWriter(out / folder_name(recipe))
    writer.append(rows)
    writer.write(record)
    writer.close()
    return Recorded(record, rows)


@pytest.mark.parametrize(("recipes", "first"), [(("bf16", "fp32", "fp16"), "fp32"), (("bf16", "fp16"), "bf16")])
def test_the_runs_are_compared_with_fp32_or_the_first(tmp_path: Path, recipes: tuple[str, ...], first: str) -> None:
    runs = {recipe: run_of(recipe, tmp_path) for recipe in recipes}
    found = demo.compare_runs(runs, tmp_path, load_matrix())
    assert [comparison.baseline[0].recipe for comparison in found] == [first] * (len(recipes) - 1)
    assert [comparison.candidate[0].recipe for comparison in found] == [recipe for recipe in recipes if recipe != first]


def test_the_first_page_links_what_there_is(tmp_path: Path) -> None:
    odd = "fp16:loss_scale.init=4096"
    runs = {folder_name(recipe): run_of(recipe, tmp_path) for recipe in ("fp32", odd)}
    demo.write_pages(runs, demo.compare_runs(runs, tmp_path, load_matrix()), tmp_path)
    index = (tmp_path / "index.html").read_text(encoding="utf-8")
    links = re.findall(r'href="([^#"][^"]*)"', index)
    assert links == ["data:,", "comparison.html", "matrix.html", "fp32/record.json", f"{folder_name(odd)}/record.json"]
    assert all((tmp_path / link).is_file() for link in links if link not in ("data:,", "matrix.html"))
    assert index.count('<article class="verdict') == 1
    assert "Curves" in (tmp_path / "comparison.html").read_text(encoding="utf-8")


def test_one_run_is_not_compared(tmp_path: Path) -> None:
    runs = {"bf16": run_of("bf16", tmp_path)}
    demo.write_pages(runs, demo.compare_runs(runs, tmp_path, load_matrix()), tmp_path)
    assert not (tmp_path / "comparison.html").exists()
    assert "comparison.html" not in (tmp_path / "index.html").read_text(encoding="utf-8")
