"""How long an audit without hardware takes, and how far its memory is from the analytic count: a model of GPT-2's small shape (124 M) for two targets.

The whole command is timed, as a user starts it: processes, imports and report. The CPU seconds are those of all its processes; on a machine that other work
shares they say more than the wall.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TARGETS = ("h100", "ascend-910b3")
LIMIT = 4.0
"""Seconds that the audit may take."""

WITHIN = 0.02
"""Most that a memory class may be off."""

LAYERS, HEADS, WIDTH, CONTEXT, BATCH, VOCABULARY = 12, 12, 768, 1024, 4, 50257

WORKLOAD = f"""
import torch
from torch.nn import functional

from examples.gpt import GPT, Config

CONFIG = Config(layers={LAYERS}, heads={HEADS}, width={WIDTH}, context={CONTEXT}, batch={BATCH}, vocabulary={VOCABULARY})


def build(device):
    model = GPT(CONFIG).to(device)
    tokens = torch.zeros(CONFIG.batch, CONFIG.context, dtype=torch.int64, device=device)
    return model, lambda: functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
"""


def analytic() -> dict[str, int]:
    """Return the bytes of the classes under the recipe bf16 with AdamW; see ``tests/observe/test_audit_target.py`` for the activations."""
    n, d = BATCH * CONTEXT, WIDTH
    count = VOCABULARY * d + CONTEXT * d + LAYERS * (12 * d * d + 13 * d) + 2 * d
    layer = 36 * n * d + 16 * n + 4 * HEADS * n + 24 * d * d
    head = 6 * n * d + 8 * n + 2 * VOCABULARY * d + 4 * n * VOCABULARY
    return {"parameters": 4 * count, "gradients": 4 * count, "optimizer state": 8 * count, "activations": LAYERS * layer + head}


def cpu_seconds() -> float:
    """Return the CPU seconds of the processes that ended, and of those that they waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(folder: Path, target: str) -> tuple[float, float, dict[str, Any]]:
    """Audit for a target; returns wall seconds, CPU seconds and the document."""
    out = folder / f"{target}.json"
    workload = f"{folder / 'gpt2_small.py'}:build"
    command = [sys.executable, "-m", "mpbackend.cli.main", "audit", workload, "--device", target, "--format", "json", "--out", str(out)]
    start, used = time.perf_counter(), cpu_seconds()
    subprocess.run(command, check=True, cwd=Path(__file__).parents[1])
    return time.perf_counter() - start, cpu_seconds() - used, json.loads(out.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    expected = analytic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "gpt2_small.py").write_text(WORKLOAD, encoding="utf-8")
        seconds: dict[str, list[tuple[float, float]]] = {target: [] for target in TARGETS}
        documents: dict[str, dict[str, Any]] = {}
        for _ in range(options.rounds):
            for target in TARGETS:
                wall, cpu, documents[target] = run(folder, target)
                seconds[target].append((wall, cpu))
    print(f"{'target':<14} {'parameters':>12} {'best s':>7} {'median s':>9} {'CPU s':>6}  within {LIMIT:g} s")
    for target, times in seconds.items():
        walls, cpu = sorted(wall for wall, _ in times), min(cpu for _, cpu in times)
        verdict = "yes" if walls[0] <= LIMIT else "NO"
        print(f"{target:<14} {documents[target]['parameters']:>12,} {walls[0]:>7.2f} {walls[len(walls) // 2]:>9.2f} {cpu:>6.2f}  {verdict}")
    print(f"\n{'target':<14} {'class':<16} {'audited B':>14} {'analytic B':>14} {'off':>9}")
    for target, document in documents.items():
        for klass, size in expected.items():
            found = sum(row["measured"] for row in document["memory"] if row["klass"] == klass)
            off = found / size - 1
            print(f"{target:<14} {klass:<16} {found:>14,} {size:>14,} {off:>+9.4%}" + ("" if abs(off) <= WITHIN else "  MORE THAN 2 %"))


if __name__ == "__main__":
    main()
