"""Build the stand-in libraries for the torch_npu of one Python: ``python build.py PYTHON FOLDER``. Needs gcc and nm, and takes a second.

torch_npu's libraries need some ninety functions by name when they are loaded. Those that the simulation gives a meaning are written in ``native/``; every
other one is generated from the symbol tables of the installed wheel and returns 0.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
MAIN = "ascendcl"
OTHERS = ("hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
"""Libraries that torch_npu's name as needed and take no function from: empty ones that need the main one."""

WANTING = ("_C*.so", "lib/libtorch_npu.so", "lib/libtensorpipe.so", "lib/libnpu_profiler.so")
PREFIXES = ("acl", "rt", "Hccl", "Msprof")
"""How the names of the missing functions begin; everything else is the C library's and torch's."""

COMPILER = ("gcc", "-O1", "-fPIC", "-fvisibility=hidden")


def run(*command: str) -> str:
    """Run a command and return its output; ``CalledProcessError`` when it fails."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def symbols(path: Path, *options: str) -> Iterator[str]:
    """Yield the names that ``nm`` lists for a file, without their versions."""
    for line in run("nm", *options, str(path)).splitlines():
        yield line.split()[-1].split("@")[0]


def missing(package: Path, objects: list[Path]) -> list[str]:
    """Return the functions that torch_npu needs and no object defines.

    Args:
        package: folder of the installed ``torch_npu``.
        objects: the compiled files of ``native/``.
    """
    defined = {name for path in objects for name in symbols(path, "--defined-only")}
    needed = {name for pattern in WANTING for path in package.glob(pattern) for name in symbols(path, "-D", "--undefined-only")}
    return sorted(name for name in needed - defined if name.startswith(PREFIXES))


def build(python: str, folder: Path) -> list[Path]:
    """Build the libraries into a folder and return them."""
    platlib = run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['platlib'])").strip()
    folder.mkdir(parents=True, exist_ok=True)
    objects: list[Path] = []
    for source in sorted(NATIVE.glob("*.c")):
        objects.append(folder / f"{source.stem}.o")
        run(*COMPILER, "-Wall", "-Wextra", "-Werror", "-c", str(source), "-o", str(objects[-1]))
    rest = folder / "rest.c"
    rest.write_text(
        "".join(f'__attribute__((visibility("default"))) long {name}(void) {{ return 0; }}\n' for name in missing(Path(platlib, "torch_npu"), objects))
    )
    objects.append(folder / "rest.o")
    run(*COMPILER, "-w", "-c", str(rest), "-o", str(objects[-1]))  # -w: a generated function may bear the name of one that gcc knows
    libraries = [folder / f"lib{name}.so" for name in (MAIN, *OTHERS)]
    shared = ("gcc", "-shared", "-Wl,--no-as-needed")
    run(*shared, f"-Wl,-soname,{libraries[0].name}", *map(str, objects), "-o", str(libraries[0]), "-lpthread")
    for library in libraries[1:]:
        run(*shared, f"-Wl,-soname,{library.name}", "-o", str(library), f"-L{folder}", f"-l{MAIN}", "-Wl,-rpath,$ORIGIN")
    for path in (*objects, rest):
        path.unlink()
    return libraries


if __name__ == "__main__":
    for built in build(sys.argv[1], Path(sys.argv[2])):
        print(built)
