from __future__ import annotations

from mpbackend.observe.audit_diff import Difference
from mpbackend.observe.audit_document import AuditDocument, CastRow, FallbackRow, Finding, MemoryRow, OpRow, ProductRow, RequestRow, folded_path
from mpbackend.report import markdown, terminal
from mpbackend.report.audits import audit_report, differences_report, folded_rows


def op(module: str, calls: int = 1, flops: int = 10, compute: str = "bf16") -> OpRow:
    return OpRow(phase="forward", module=module, op="aten::mm", inputs=("bf16",), compute=compute, outputs=("bf16",), calls=calls, flops=flops, share=0.25)


AUDIT = AuditDocument(
    workload="w:build",
    device="d1",
    recipe="bf16",
    granted="bf16",
    kind="hardware",
    basis="live",
    torch="2.13.0",
    parameters=1234,
    flops=40,
    effective="bf16",
    ops=(op("blocks.0.up"), op("blocks.1.up"), op("head", compute="fp32")),
    products=(
        ProductRow(phase="forward", op="aten::mm", a="bf16", b="bf16", m=4, n=17, k=8, calls=1, flops=10, share=0.25, misses=("n=17 not a multiple of 16",)),
        ProductRow(phase="forward", op="aten::mm", a="bf16", b="bf16", m=4, n=16, k=8, calls=1, flops=30, share=0.75),
    ),
    casts=(CastRow(phase="forward", module="blocks.0", source="fp32", target="bf16", count=2, bytes=2048),),
    fallbacks=(FallbackRow(phase="forward", op="aten::i0", count=500, bytes=1024, seconds=0.25, timed=True),),
    requests=(
        RequestRow(role="compute.forward", asked="bf16", granted="bf16", ran="fp32 100.0%", same=False),
        RequestRow(role="grads", asked="fp32", granted="fp32", ran="nothing held", same=None),
    ),
    memory=(
        MemoryRow(klass="parameters", format="fp32", predicted=1000, measured=1010, fp32=1000),
        MemoryRow(klass="activations", format="bf16", predicted=None, measured=2048, fp32=None),
    ),
    findings=(Finding(rule="banned-op", where="aten::x", message="is refused\x1b[31m", remedy="replace it"),),
    seconds=0.5,
    tokens_per_s=8192.0,
    mfu_basis="no source states a peak",
)


def test_a_report_says_findings_first_and_shows_every_part() -> None:
    text = terminal.render(audit_report(AUDIT), 160)
    assert text.index("Findings") < text.index("Asked and run") < text.index("Operations") < text.index("Memory")
    assert "banned-op: aten::x: is refused\\x1b[31m; replace it" in text
    assert "NO" in text and "not seen" in text
    assert "n=17 not a multiple of 16" in text and "Shapes that miss the alignment (25.0% of the FLOPs)" in text
    assert "4 x 16 x 8" not in text
    assert "500 calls (inside a timed step)" in text and "250.00" in text
    assert "500.00 ms, 8,192 tokens/s" in text
    assert "none: no source states a peak" in text
    assert "+1.00%" in text and "unknown" in text
    assert markdown.render(audit_report(AUDIT)).startswith("# w:build: bf16 on d1")


def test_equal_layers_share_a_row() -> None:
    rows = folded_rows(AUDIT.ops)
    assert [(row.module, row.calls, row.flops, row.share) for row in rows] == [("blocks.*.up", 2, 20, 0.5), ("head", 1, 10, 0.25)]
    assert folded_path("a.0.b.12.c3") == "a.*.b.*.c3"


def test_rows_that_are_not_shown_are_counted() -> None:
    many = AuditDocument(**{**{name: getattr(AUDIT, name) for name in AUDIT.__struct_fields__}, "ops": tuple(op(f"m{n}") for n in range(30))})
    assert "Operations (20 of 30 rows; --full shows all)" in terminal.render(audit_report(many), 160)
    assert "m29" in terminal.render(audit_report(many, full=True), 160)


def test_an_emulated_device_is_not_taken_for_hardware() -> None:
    emulated = AuditDocument(**{**{name: getattr(AUDIT, name) for name in AUDIT.__struct_fields__}, "kind": "emulated"})
    text = terminal.render(audit_report(emulated), 160)
    assert "w:build: bf16 on d1 (emulated)" in text
    assert "ran on the device" not in text


def test_differences() -> None:
    found = [Difference(kind="operation", what="forward x", first="1 x bf16", second="")]
    text = terminal.render(differences_report(found, "a.json", "b.json"), 120)
    assert "forward x" in text and "1 x bf16" in text
    assert "none" in terminal.render(differences_report([], "a", "b"), 120)
