"""The simulated lane: the real torch_npu over a simulated Ascend device, for one SoC after another. Needs gcc, nm and a network for the first run.

    python plugins/ascend/tests/lane.py                                            every SoC
    python plugins/ascend/tests/lane.py --soc Ascend910B1                          one of them
    python plugins/ascend/tests/lane.py --soc Ascend910B1 -- mpbackend demo --device npu --steps 10

The environment lies in ``.ascend-venv`` of the repository and is made anew when what it is made from changes. Results are those of a simulated device: they
are evidence for calls, formats, gates and control flow, never for the accuracy or speed of an NPU.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parents[2]
VENV = ROOT / ".ascend-venv"
REQUIREMENTS = TESTS / "lane-requirements.txt"
SIMULATOR = TESTS / "simulator"
STAMP = "lane.stamp"

SOCS = ("Ascend910A", "Ascend310P3", "Ascend910B1", "Ascend910_9392", "Ascend950PR_9599")
"""One of each architecture that the plugin trains on: the first 910, 310P, Atlas A2, Atlas A3, 950."""

PIP = ("-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-input", "--progress-bar", "off")
UNSET = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH", "INF_NAN_MODE_ENABLE", "INF_NAN_MODE_FORCE_DISABLE", "PYTHONPATH")
"""What would lead torch_npu to a real CANN, or change the mode that a test expects."""

WORKERS = 2


class Result(NamedTuple):
    """One SoC's run."""

    soc: str
    status: int
    seconds: float
    output: str


def sources() -> Iterator[Path]:
    """Yield the files that the environment is made from."""
    yield from (REQUIREMENTS, ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml")))
    yield from sorted(path for path in SIMULATOR.rglob("*") if path.suffix in {".c", ".h", ".toml"} or path.name == "build.py")


def fingerprint() -> str:
    """Return a hash of what the environment is made from."""
    digest = hashlib.sha256(sys.version.encode())
    for path in sources():
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def prepare(python: str) -> None:
    """Make the environment and the stand-in libraries, unless they are there already."""
    stamp, wanted = VENV / STAMP, fingerprint()
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return
    print(f"making {VENV.name} (some 1.3 GB, a minute)", flush=True)
    shutil.rmtree(VENV, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(VENV)], check=True)
    (VENV / ".gitignore").write_text("*\n", encoding="utf-8")  # as Python 3.13 does by itself
    interpreter = str(VENV / "bin" / "python")
    subprocess.run([interpreter, *PIP, "-r", str(REQUIREMENTS)], check=True, cwd=ROOT)
    subprocess.run([interpreter, str(SIMULATOR / "build.py"), interpreter, str(VENV / "simulator")], check=True, stdout=subprocess.DEVNULL)
    stamp.write_text(wanted, encoding="utf-8")


def environment(soc: str) -> dict[str, str]:
    """Return the environment of a process on a simulated device."""
    kept = {name: value for name, value in os.environ.items() if name not in UNSET and not name.startswith("CANN_STUB_")}
    return kept | {
        "CANN_STUB_SOC": soc,
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, (str(VENV / "simulator"), os.environ.get("LD_LIBRARY_PATH", "")))),
        "PATH": os.pathsep.join((str(VENV / "bin"), os.environ["PATH"])),
        "TASK_QUEUE_ENABLE": "0",  # the queue would report an operator's error late, and give garbage after it
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "OMP_NUM_THREADS": "1",
    }


def run(soc: str, options: Sequence[str]) -> Result:
    """Run the tests on one SoC."""
    command = [str(VENV / "bin" / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / "simulated"), *options]
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=environment(soc), capture_output=True, text=True, check=False)
    return Result(soc, done.returncode, time.monotonic() - start, done.stdout + done.stderr)


def main() -> int:
    """Prepare, then run the tests or the command after ``--``; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--soc", action="append", choices=SOCS, help="SoC to simulate; every one when omitted")
    parser.add_argument("--python", default=sys.executable, help="Python to make the environment with")
    parser.add_argument("-k", dest="expression", default="", help="run the tests that match, as pytest's -k")
    own = sys.argv[1:]
    command = own[own.index("--") + 1 :] if "--" in own else []
    chosen = parser.parse_args(own[: own.index("--")] if "--" in own else own)
    socs: list[str] = chosen.soc or list(SOCS)
    prepare(chosen.python)
    if command:
        return max(subprocess.run(command, env=environment(soc), check=False).returncode for soc in socs)
    options = ["-k", chosen.expression] if chosen.expression else []
    results: list[Result] = []
    with ThreadPoolExecutor(WORKERS) as pool:
        for result in pool.map(lambda soc: run(soc, options), socs):
            print(f"\n== simulated device {result.soc}: {result.seconds:.0f} s\n{result.output}", flush=True)
            results.append(result)
    for result in results:
        print(f"simulated device {result.soc}: {'passed' if result.status == 0 else f'FAILED ({result.status})'}, {result.seconds:.0f} s")
    return int(any(result.status for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
