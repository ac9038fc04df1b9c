"""``mpbackend compare --format html``: the page and the terminal say the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Invoke = Callable[..., Result]


@pytest.fixture
def imported(invoke: Invoke, tmp_path: Path) -> Callable[[str, float], str]:
    """Return a function that makes a record of a seed whose losses lie a number above others."""

    def make(name: str, above: float) -> str:
        log = tmp_path / f"{name}.csv"
        log.write_text("step,loss\n" + "".join(f"{step},{3 / step + above}\n" for step in range(1, 30)), encoding="utf-8")
        seed = name.rpartition("-")[2]
        result = invoke("record", "import", str(log), "--out", str(tmp_path / name), "--recipe", "bf16", "--device", "h100", "--seed", seed)
        assert result.exit_code == 0, result.output
        return str(tmp_path / name)

    return make


def test_the_page_has_the_verdict_and_reasons_of_the_document(invoke: Invoke, imported: Callable[[str, float], str], tmp_path: Path) -> None:
    pair = [imported("a-1", 0.0), imported("b-1", 0.5)]
    out = tmp_path / "report.html"
    result = invoke("compare", *pair, "--format", "html", "--out", str(out))
    assert (result.exit_code, result.output) == (0, "")
    page = out.read_text(encoding="utf-8")
    document = json.loads(invoke("compare", *pair, "--format", "json").stdout)
    assert f"</span> {document['verdict']}</span>" in page
    assert [reason in page for reason in document["reasons"]] == [True] * len(document["reasons"])
    assert document["reasons"]


def test_every_seed_has_its_curve(invoke: Invoke, imported: Callable[[str, float], str], tmp_path: Path) -> None:
    sides = [[imported(f"{name}-{seed}", above) for seed in (1, 2, 3)] for name, above in (("a", 0.0), ("b", 0.001))]
    result = invoke("compare", "--baseline", *sides[0], "--candidate", *sides[1], "--format", "html")
    assert result.exit_code == 0, result.output
    key = result.stdout.partition('<ul class="key"')[2].partition("</ul>")[0]
    names = re.findall(r"<span>([^<]+)</span>", key)
    assert names == [f"{side}, bf16, seed {seed}" for side in ("baseline", "candidate") for seed in (1, 2, 3)]
    loss = result.stdout.partition("<figcaption>Loss</figcaption>")[2].partition("</svg>")[0]
    assert loss.count('class="line"') == 6


def test_a_verdict_that_fails_a_pipeline_still_writes_the_page(invoke: Invoke, imported: Callable[[str, float], str], tmp_path: Path) -> None:
    pair = [imported("a-1", 0.0), imported("b-2", 0.0)]
    verdict = json.loads(invoke("compare", *pair, "--format", "json").stdout)["verdict"]
    out = tmp_path / "report.html"
    assert invoke("compare", *pair, "--format", "html", "--out", str(out), "--fail-on", verdict).exit_code == 1
    assert verdict in out.read_text(encoding="utf-8")
