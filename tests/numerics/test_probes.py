from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from mpbackend.errors import BackendError, UnknownNameError
from mpbackend.formats import FORMATS
from mpbackend.matrix import load_matrix
from mpbackend.numerics import oracle
from mpbackend.numerics.accumulate import arithmetic_for
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.exact_sums import ROUNDINGS
from mpbackend.numerics.fingerprint import Fingerprint, compare, equivalent, overall
from mpbackend.numerics.matmul import mm
from mpbackend.numerics.probe_model import EXACT, REGISTERS, Hypotheses, Layout, sums
from mpbackend.numerics.probe_rows import Prober, Product, Row
from mpbackend.numerics.probe_tree import reference
from mpbackend.numerics.probes import probe
from mpbackend.report import terminal
from mpbackend.report.probes import answer_text, probe_document, probe_report
from tests.support.arithmetics import random_arithmetic

SHAPE = (64, 64, 256)
TENSOR_CORE = Arithmetic(a="fp16", b="fp16", products_per_step=16, fraction_bits=25, register_rounding="rz", zero_exponent=-133)
NOT_ASKED = ("promoted",)
SEED = 90210


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run on one thread: the tensors of a probe are small, and threads that wait for each other take longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def device(arithmetic: Arithmetic) -> Product:
    """Return a device with an arithmetic."""
    return lambda a, b: mm(a.float(), b.float(), arithmetic).double()


def cpu(dtype: torch.dtype) -> Product:
    return lambda a, b: (a.to(dtype) @ b.to(dtype)).double()


def probed(arithmetic: Arithmetic, shapes: tuple[tuple[int, int, int], ...] = (SHAPE,)) -> Fingerprint:
    return probe(device(arithmetic), a=arithmetic.a, b=arithmetic.b, output=arithmetic.output, shapes=shapes)


def contradicted(fingerprint: Fingerprint, arithmetic: Arithmetic) -> list[str]:
    """Return the fields whose planted value is not among the answers."""
    return [
        f"{finding.question}: {finding.claimed} planted, {finding.probed.values} found"
        for finding in compare(fingerprint, arithmetic)
        if finding.verdict == "contradicts" and not (finding.question in NOT_ASKED and arithmetic.promotion_interval is None)
    ]


def fresh(storage: str, rows: int, columns: int, seed: int) -> Tensor:
    """Return random numbers of a format that no probe has drawn."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator) * 2.0 ** torch.randint(-4, 3, (rows, columns), generator=generator)
    return values.to(getattr(torch, FORMATS[storage].torch_dtype or "")).double()


def planted(rng: random.Random) -> Arithmetic:
    """Return a random unit whose operands have the range to be probed."""
    while True:
        found = random_arithmetic(rng)
        # A promotion after every product is described as a wider register; operands of 4 bits reach from 2^-2 to 36.
        if "fp4_e2m1" not in (found.a, found.b) and found.promotion_interval != 1:
            return found


def check_planted(arithmetic: Arithmetic, label: str) -> None:
    """Check that a probe finds a unit, and that what it does not tell apart gives the same products."""
    fingerprint = probed(arithmetic)
    assert fingerprint.explained, f"{label}: {arithmetic}"
    assert not contradicted(fingerprint, arithmetic), f"{label}: {arithmetic}"
    same = equivalent(fingerprint)
    assert same is not None
    a, b = fresh(fingerprint.storage_a, 32, 256, 77), fresh(fingerprint.storage_b, 256, 32, 78)
    differing = int((device(same)(a, b) != device(arithmetic)(a, b)).sum())
    # Values that no product told apart may part on others. In V verified products none did, so at most 3 / V of all do (rule of three, 95 %): 0.2 of these.
    assert differing <= 1, f"{label}: {arithmetic} taken for {same}"


@pytest.mark.parametrize("number", range(8))
def test_planted_units_are_found(number: int) -> None:
    rng = random.Random(SEED + number)
    arithmetic = planted(rng)
    while arithmetic.products_per_step < 4:
        arithmetic = planted(rng)
    check_planted(arithmetic, f"seed {SEED + number}")


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 500, 50))
def test_five_hundred_planted_units_are_found(start: int) -> None:
    for number in range(start, start + 50):
        check_planted(planted(random.Random(SEED + 1000 + number)), f"seed {SEED + 1000 + number}")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("products_per_step", 8),
        ("products_per_step", 4),
        ("fraction_bits", 24),
        ("fraction_bits", 13),
        ("register_bits", 22),
        ("register_rounding", "rne"),
        ("register_rounding", "rna"),
        ("register", "fp16"),
        ("order", "byte_pairs"),
        ("promotion_interval", 16),
        ("promotion_interval", 128),
        ("operand_subnormals", "flushed"),
        ("overflow", "saturating"),
    ],
)
def test_each_parameter_is_told_from_its_neighbor(field: str, value: Any) -> None:
    changed = msgspec.structs.replace(TENSOR_CORE, **{field: value})
    if changed.order == "byte_pairs":
        changed = msgspec.structs.replace(changed, products_per_step=8)
    fingerprint = probed(changed)
    assert not contradicted(fingerprint, changed)
    assert fingerprint.answers[field].value == value
    before = TENSOR_CORE.kept_bits if field == "register_bits" else getattr(TENSOR_CORE, field) or "none"
    assert before not in fingerprint.answers[field].values


@pytest.mark.parametrize(("output", "rounding"), [("bf16", "rne"), ("bf16", "rz"), ("fp16", "rne"), ("fp16", "rz"), ("fp16", "rna")])
def test_the_rounding_of_a_result_is_told(output: str, rounding: Any) -> None:
    changed = msgspec.structs.replace(TENSOR_CORE, output=output, output_rounding=rounding, output_subnormals="flushed")
    fingerprint = probed(changed)
    assert fingerprint.answers["output_rounding"].value == rounding
    assert not contradicted(fingerprint, changed)
    if output == "fp16":
        assert fingerprint.answers["output_subnormals"].value == "flushed"


def test_a_register_no_wider_than_the_alignment_is_not_guessed() -> None:
    wide = msgspec.structs.replace(TENSOR_CORE, fraction_bits=9, products_per_step=4)
    found = probed(wide).answers["register_bits"]
    # Sums of 5 terms carry 3 bits at most.
    assert found.value is None
    assert 23 in found.values
    assert 9 not in found.values
    assert "apart" in found.reason


def test_evidence_names_the_queries_that_excluded_the_neighbors() -> None:
    evidence = probed(TENSOR_CORE).answers["fraction_bits"].evidence
    assert [line.split(":")[0] for line in evidence] == ["not 24", "not 26"]
    assert evidence[1] == "not 26: 2^28 @0 - 2^28 @1 + 2^2 @2 gave 0 and not 2^2"


def test_a_small_number_beside_a_pair_is_no_promotion() -> None:
    # With steps of two products the small number meets the pair or not, whatever is promoted.
    pairs = msgspec.structs.replace(TENSOR_CORE, products_per_step=2)
    assert probed(pairs, ((64, 64, 64),)).answers["promotion_interval"].value == "none"


def test_flushed_numbers_are_not_missing_accumulator_bits() -> None:
    flushing = msgspec.structs.replace(TENSOR_CORE, operand_subnormals="flushed", output="fp16", output_subnormals="flushed")
    answers = probed(flushing).answers
    assert answers["fraction_bits"].value == 25
    assert answers["operand_subnormals"].value == "flushed"


@pytest.mark.parametrize("rounding", ["rne", "rz", "rna"])
def test_a_conversion_that_rounds_a_subnormal_number_is_not_a_flush(rounding: Any) -> None:
    tf32 = Arithmetic(a="tf32", b="tf32", operand_rounding=rounding, products_per_step=8, fraction_bits=25, register_rounding="rz")
    answers = probed(tf32).answers
    assert answers["operand_subnormals"].value == "kept"
    assert (answers["a"].value, answers["b"].value, answers["operand_rounding"].value) == ("tf32", "tf32", rounding)


def test_a_silent_conversion_contradicts_the_claim() -> None:
    converting = Arithmetic(a="tf32", b="tf32", operand_rounding="rz", products_per_step=8, fraction_bits=25, register_rounding="rz")
    fingerprint = probe(device(converting), a="fp32", b="fp32", output="fp32", shapes=(SHAPE,))
    findings = {finding.question: finding.verdict for finding in compare(fingerprint, msgspec.structs.replace(converting, a="fp32", b="fp32"))}
    assert findings["a"] == findings["b"] == "contradicts"
    assert fingerprint.answers["a"].value == "tf32"


def test_every_product_has_the_whole_shape() -> None:
    seen = set()

    def product(a: Tensor, b: Tensor) -> Tensor:
        seen.add((*a.shape, b.shape[1]))
        return device(TENSOR_CORE)(a, b)

    fingerprint = probe(product, a="fp16", b="fp16", output="fp32", shapes=((32, 24, 96),))
    assert seen == {(32, 96, 24)}
    assert fingerprint.explained


def test_shapes_that_differ_are_reported() -> None:
    other = msgspec.structs.replace(TENSOR_CORE, products_per_step=8, fraction_bits=24)

    def product(a: Tensor, b: Tensor) -> Tensor:
        return device(other if a.shape[1] <= 64 else TENSOR_CORE)(a, b)

    fingerprint = probe(product, a="fp16", b="fp16", output="fp32", shapes=((32, 32, 64), (32, 32, 128)))
    assert [entry.shape[2] for entry in fingerprint.shapes] == [128, 64]
    assert fingerprint.shapes[0].differs == ()
    assert "products added at once: 8 instead of 16" in fingerprint.shapes[1].differs
    assert fingerprint.answers["products_per_step"].value == 16


def test_a_late_promotion_is_found_by_a_long_product() -> None:
    late = msgspec.structs.replace(TENSOR_CORE, promotion_interval=384)
    fingerprint = probed(late, ((64, 64, 256), (16, 16, 1024)))
    assert fingerprint.answers["promotion_interval"].value == 384
    assert all(entry.differing == 0 and not entry.differs for entry in fingerprint.shapes)


def test_noise_is_not_explained() -> None:
    generator = torch.Generator().manual_seed(1)

    def product(a: Tensor, b: Tensor) -> Tensor:
        exact = device(TENSOR_CORE)(a, b)
        return exact * (1 + 2.0**-20 * torch.randint(0, 2, exact.shape, generator=generator))

    fingerprint = probe(product, a="fp16", b="fp16", output="fp32", shapes=((16, 16, 64),))
    assert not fingerprint.explained
    assert fingerprint.tree is None
    assert overall(compare(fingerprint, TENSOR_CORE)) == "open"
    assert equivalent(fingerprint) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("k", [64, 256])
def test_the_processor_agrees_with_an_exact_reference_of_what_was_probed(dtype: torch.dtype, k: int) -> None:
    name = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    product = cpu(dtype)
    fingerprint = probe(product, a=name, b=name, output=name, shapes=((64, 64, k),))
    a, b = fresh(name, 64, k, 101), fresh(name, k, 64, 102)
    if not fingerprint.explained:
        # Kernels of another processor may add every element in another order: then nothing is claimed.
        assert fingerprint.tree is None
        assert all(not answer.values for answer in fingerprint.answers.values())
        return
    same = equivalent(fingerprint)
    expected = reference(fingerprint.tree, a, b, name) if fingerprint.tree is not None else device(same)(a, b) if same is not None else None
    assert expected is not None
    assert torch.equal(expected, product(a, b))
    assert fingerprint.answers["register"].value == "fp32"
    assert fingerprint.answers["products"].value == "exact" if name != "fp32" else fingerprint.answers["products"].value is not None


def test_no_row_of_the_matrices_is_contradicted_by_its_own_model() -> None:
    matrix = load_matrix()
    for arch, name in (("sm_70", "fp16"), ("sm_80", "tf32"), ("sm_89", "fp8_e4m3"), ("sm_90", "fp8_e4m3"), ("sm_90", "bf16")):
        arithmetic = arithmetic_for(matrix, arch, name, name)
        fingerprint = probed(arithmetic)
        assert fingerprint.explained, arch
        assert not contradicted(fingerprint, arithmetic), arch


def test_many_hypotheses_at_once_have_the_bits_of_the_oracle() -> None:
    rng, k = random.Random(3), 96
    for trial in range(12):
        products = rng.choice((1, 2, 4, 8, 32))
        layout = Layout(products, rng.choice(("sequential", "byte_pairs")), rng.choice((None, 3 * products)), rng.choice(("fp32", "fp16")))
        rows: list[Row] = []
        for _ in range(8):
            places = rng.sample((0, 1, 2, 3, 17, 33, k - 1), rng.randint(1, 5))
            rows.append({place: (rng.choice((-1, 1.5)) * 2.0 ** rng.randint(-14, 14), rng.choice((1.0, 1.75))) for place in places})
        entries = [(rng.choice((5, 13, 25, EXACT)), register, rng.randint(3, (23, 10)[register]), rng.randrange(3)) for register in (0, 1, 0, 1)]
        found = sums(rows, k, layout, Hypotheses(*torch.tensor(entries).mT))
        for number, (bits, register, width, rounding) in enumerate(entries):
            unit = Arithmetic(
                a="fp32",
                b="fp32",
                products_per_step=products,
                order=layout.order,
                promotion_interval=layout.interval,
                promoted="fp16" if layout.promoted == "fp16" else "fp32",
                fraction_bits=None if bits == EXACT else bits,
                register="fp16" if REGISTERS[register] == "fp16" else "fp32",
                register_bits=width,
                register_rounding=ROUNDINGS[rounding],
            )
            for column, row in enumerate(rows):
                expected = oracle.sums([row.get(i, (0.0, 0.0))[0] for i in range(k)], [row.get(i, (0.0, 0.0))[1] for i in range(k)], unit)
                value = found[number, column].item()
                assert value == expected or (math.isnan(value) and math.isnan(expected)), f"trial {trial}: {unit}, {row}"


def test_what_cannot_be_probed_is_refused() -> None:
    product = device(TENSOR_CORE)
    with pytest.raises(BackendError, match="2 products asked and no end"):
        probe(product, a="fp16", b="fp16", output="fp32", shapes=(SHAPE,), products_max=2)
    with pytest.raises(BackendError, match="at least one of 2 x 2 x 4"):
        probe(product, a="fp16", b="fp16", output="fp32", shapes=((1, 1, 64),))
    with pytest.raises(BackendError, match="result of shape"):
        probe(lambda a, b: product(a, b)[:4], a="fp16", b="fp16", output="fp32", shapes=((16, 16, 64),))
    for name in ("hif8", "fp64", "int8"):
        with pytest.raises(BackendError, match=f"format {name}"):
            probe(product, a=name, b="fp16", output="fp32")
    with pytest.raises(UnknownNameError):
        probe(product, a="fp17", b="fp16", output="fp32")


def test_a_query_beyond_the_operands_is_refused() -> None:
    prober = Prober(device(TENSOR_CORE), "fp8_e4m3", "fp8_e4m3", "fp32", 10)
    assert math.prod(prober.pair(-12)) == 2.0**-12
    with pytest.raises(BackendError, match="2\\^-13"):
        prober.pair(-13)


@pytest.mark.parametrize("width", [80, 120])
def test_a_report_shows_verdicts_and_fits(width: int) -> None:
    fingerprint = probed(TENSOR_CORE)
    findings = compare(fingerprint, msgspec.structs.replace(TENSOR_CORE, fraction_bits=24))
    report = probe_report(fingerprint, findings, device="emu:h100", kind="emulated", claimed="row")
    text = terminal.render(report, width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "on emu:h100 (emulated)" in text
    assert "≠ contradicts" in text
    assert "not 26: 2^28 @0 - 2^28 @1" in " ".join(text.split())
    document = probe_document(fingerprint, findings, device="emu:h100", kind="emulated")
    assert document["kind"] == "emulated"
    assert document["verdict"] == "contradicts"
    assert answer_text(msgspec.structs.replace(fingerprint.answers["a"], values=(26, 28, 27, "exact", 30))) == "26 to 28 or 30 or exact"


def test_a_report_of_a_tree_says_how_chains_are_joined() -> None:
    from mpbackend.numerics.fingerprint import Tree
    from mpbackend.report.probes import tree_lines

    halves = Tree(k=6, nodes=((0, 1), (6, 2), (3, 4), (8, 5), (7, 9)), exact=(False, True, True, True, True, True))
    assert tree_lines(halves) == [
        "sum 7: 3 terms one after the other: 0, 1, 2",
        "sum 9: 3 terms one after the other: 3, 4, 5",
        "sum 10 joins 7 and 9",
        "1 of 6 products are rounded before they are added",
    ]
