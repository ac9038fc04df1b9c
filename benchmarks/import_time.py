"""Start-up time: `import mpbackend` and `mpbackend matrix` against a bare interpreter.

Each command runs in a fresh interpreter; the commands take turns, so that a busy machine slows all of them alike. Figures are medians of wall-clock time.
Required: the import costs less than 60 ms over a bare interpreter, and the matrix stands on the screen in less than 0.5 s.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

ROUNDS = 7
IMPORT_LIMIT_S = 0.060
MATRIX_LIMIT_S = 0.5

COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "python -c 'import mpbackend'": [sys.executable, "-c", "import mpbackend"],
    "mpbackend matrix --device h100 --op matmul": [sys.executable, "-m", "mpbackend.cli.main", "matrix", "--device", "h100", "--op", "matmul"],
}


def run(command: list[str]) -> float:
    """Return the seconds that a command needs in a fresh interpreter."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def measure(rounds: int = ROUNDS) -> dict[str, float]:
    """Return the median seconds of every command, after one round that fills the caches."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(rounds + 1):
        for name, command in COMMANDS.items():
            seconds = run(command)
            if turn > 0:
                times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> int:
    """Print the table; return 1 when a limit is passed."""
    medians = measure()
    bare, imported, matrix = medians.values()
    print(f"{'command':<44}{'median':>10}{'over bare':>12}{'ratio':>8}")
    for name, seconds in medians.items():
        print(f"{name:<44}{seconds * 1e3:>7.1f} ms{(seconds - bare) * 1e3:>9.1f} ms{seconds / bare:>8.2f}")
    holds = {
        f"import over bare < {IMPORT_LIMIT_S * 1e3:.0f} ms": imported - bare < IMPORT_LIMIT_S,
        f"matrix < {MATRIX_LIMIT_S:g} s": matrix < MATRIX_LIMIT_S,
    }
    for limit, kept in holds.items():
        print(f"{limit}: {'yes' if kept else 'NO'}")
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
