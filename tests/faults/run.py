"""Put every fault of the catalog back into a copy of the code, and see its tests fail there: ``make test-faults``.

A test that stays green although the fault is there guards nothing. An error of the import system or a name that is not there does not count as red: such a
fault would not be silent.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple
from xml.etree import ElementTree

from tests.faults.catalog import HERE, ROOT, Fault, load_faults

WORKERS = 2
"""Copies that are tested at once."""

LIMIT_S = 180.0
"""Seconds after which the tests of a fault count as hung."""

LOUD = re.compile(r"^E\s.*\b(SyntaxError|IndentationError|ImportError|ModuleNotFoundError|NameError|UnboundLocalError|AttributeError)\b.*$", re.MULTILINE)
"""What pytest shows of a failure that no working program would have met."""

LOCATE = "import importlib.util as u, sys; print(*((s := u.find_spec(name)) and s.origin for name in sys.argv[1:]), sep='\\n')"
"""A program that prints where packages are found."""


class Outcome(NamedTuple):
    """What became of a run of tests.

    Attributes:
        status: exit status of pytest; None when it hung.
        failed: node ids that failed.
        loud: why the failure is none of a test's, in one line; empty when it is one.
        output: what pytest said.
    """

    status: int | None
    failed: tuple[str, ...]
    loud: str
    output: str


def copy_tree(root: Path, target: Path) -> None:
    """Copy the files that git tracks or would track, so that nothing of the copy reaches the original."""
    listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        source = root / name
        if source.is_file():  # a tracked file may have been deleted
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    for name in ("matrices", "examples"):  # setuptools maps these packages into the distribution; here a link does
        if (target / "mpbackend").is_dir() and (target / name).is_dir():
            (target / "mpbackend" / name).symlink_to(target / name, target_is_directory=True)


def environment(copy: Path) -> dict[str, str]:
    """Return the environment of a run: packages are found in the copy before those that are installed, and no bytecode is written."""
    path = os.pathsep.join(map(str, [copy, *sorted(copy.glob("plugins/*/src"))]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def check_copy(copy: Path) -> None:
    """Raise ``RuntimeError`` when a package of the copy would be imported from somewhere else."""
    found = [path.parent for pattern in ("*/__init__.py", "mpbackend/*/__init__.py", "plugins/*/src/*/__init__.py") for path in sorted(copy.glob(pattern))]
    names = [".".join(folder.relative_to(copy).parts) if "src" not in folder.parts else folder.name for folder in found]
    told = subprocess.run([sys.executable, "-c", LOCATE, *names], cwd=copy, env=environment(copy), capture_output=True, text=True, check=True)
    for name, origin in zip(names, told.stdout.split("\n"), strict=False):
        if not Path(origin).is_relative_to(copy):
            raise RuntimeError(f"{name} is found at {origin}, not in the copy {copy}")


def run_tests(copy: Path, tests: Sequence[str], *options: str, limit_s: float | None = LIMIT_S) -> Outcome:
    """Run tests in a copy.

    Args:
        copy: the copy.
        tests: node ids.
        options: further options of pytest.
        limit_s: seconds after which they count as hung; None for no limit.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", f"--basetemp={folder}/tmp", *options, *tests]
        # a session of its own: ranks and killed runs are started below pytest, and end with it
        with subprocess.Popen(
            command, cwd=copy, env=environment(copy), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as run:
            try:
                output, _ = run.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(run.pid, signal.SIGKILL)
                return Outcome(None, (), f"hung for {limit_s:g} s", "")
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = tuple(node_id(case) for case in cases if case.find("failure") is not None)
    texts = [part.text or "" for case in cases for part in (*case.findall("failure"), *case.findall("error"))]
    loud = next((match[0].removeprefix("E").strip() for text in texts if (match := LOUD.search(text))), "")
    return Outcome(run.returncode, failed, loud, output)


def node_id(case: ElementTree.Element) -> str:
    """Return the node id of an entry of pytest's report, of a function at the top level of its module."""
    return f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name', '')}"


def try_fault(copy: Path, fault: Fault) -> str:
    """Return why a fault counts as unnoticed, empty when every one of its tests fails; the copy is as before afterwards."""
    path = copy / fault.file
    text = path.read_text(encoding="utf-8")
    try:
        changed = fault.applied(text)
        path.write_text(changed, encoding="utf-8")
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
        outcome = run_tests(copy, fault.test, *(["-x"] if len(fault.test) == 1 else []))
    except ValueError as error:
        return str(error)
    finally:
        path.write_text(text, encoding="utf-8")
    green = [test for test in fault.test if not any(failed == test or failed.startswith(f"{test}[") for failed in outcome.failed)]
    if green or outcome.status != 1:
        return f"exit status {outcome.status}; not failed: {', '.join(green)}{outcome.loud and f'; {outcome.loud}'}"
    return outcome.loud


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the faults; returns the exit status: 0 when each turns its tests red."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="ID", help="faults to run; all of them when omitted")
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    parser.add_argument("--catalog", type=Path, default=HERE, help="folder of the catalog's TOML files")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args(arguments)
    faults = load_faults(options.catalog)
    unknown = set(options.only or ()) - {fault.id for fault in faults}
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    chosen = [fault for fault in faults if not options.only or fault.id in options.only]
    if options.list:
        print("\n".join(f"{fault.id:<28} {fault.title}" for fault in chosen))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return run_faults(chosen, options.root, Path(folder).resolve())


def run_faults(faults: Sequence[Fault], root: Path, folder: Path) -> int:
    """Run faults in copies below a folder and print a line for each; returns the exit status."""
    copies = [folder / str(number) for number in range(min(WORKERS, len(faults)))]
    copies[0].mkdir()
    copy_tree(root, copies[0])
    check_copy(copies[0])
    compiled = [sys.executable, "-m", "compileall", "-q", *(name for name in ("mpbackend", "plugins", "tests") if (copies[0] / name).is_dir())]
    if len(compiled) > 4:
        subprocess.run(compiled, cwd=copies[0], check=True)
    for copy in copies[1:]:
        shutil.copytree(copies[0], copy, symlinks=False)
        check_copy(copy)
    tests = sorted({test for fault in faults for test in fault.test})
    unpatched = run_tests(copies[0], tests, limit_s=None)
    if unpatched.status != 0:
        print(unpatched.output)
        print("without any fault these tests must pass")
        return 1
    free: Queue[Path] = Queue()
    for copy in copies:
        free.put(copy)

    def run(fault: Fault) -> bool:
        copy = free.get()
        try:
            why = try_fault(copy, fault)
        finally:
            free.put(copy)
        print(f"GREEN {fault.id}: {fault.title}: {why}" if why else f"red   {fault.id}: {fault.title}", flush=True)
        return not why

    with ThreadPoolExecutor(len(copies)) as pool:
        red = sum(pool.map(run, faults))
    print(f"{red}/{len(faults)} faults turn their tests red")
    return 0 if red == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
