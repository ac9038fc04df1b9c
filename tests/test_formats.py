"""The number formats against torch, ml_dtypes, gfloat and, where none of them knows a format, its published definition."""

from __future__ import annotations

import hashlib
import math
import pickle
import random
import struct
import subprocess
import sys
from collections import Counter
from typing import Any

import gfloat  # type: ignore[import-untyped]  # gfloat 0.5 ships no py.typed
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import formats as gfloat_formats
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbackend.errors import UnknownNameError
from mpbackend.formats import AMBIGUOUS, DEVICE_RESOLVED, FORMATS, format_name, parse_format, resolved

ML_DTYPES = {
    "bf16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp8_e4m3fnuz": "float8_e4m3fnuz",
    "fp8_e5m2fnuz": "float8_e5m2fnuz",
    "fp6_e2m3": "float6_e2m3fn",
    "fp6_e3m2": "float6_e3m2fn",
    "fp4_e2m1": "float4_e2m1fn",
    "e8m0": "float8_e8m0fnu",
}
GFLOAT = {
    "fp64": gfloat_formats.format_info_binary64,
    "fp32": gfloat_formats.format_info_binary32,
    "fp16": gfloat_formats.format_info_binary16,
    "bf16": gfloat_formats.format_info_bfloat16,
    "fp8_e4m3": gfloat_formats.format_info_ocp_e4m3,
    "fp8_e5m2": gfloat_formats.format_info_ocp_e5m2,
    "fp6_e2m3": gfloat_formats.format_info_ocp_e2m3,
    "fp6_e3m2": gfloat_formats.format_info_ocp_e3m2,
    "fp4_e2m1": gfloat_formats.format_info_ocp_e2m1,
    "e8m0": gfloat_formats.format_info_ocp_e8m0,
}
INTEGERS = [name for name, row in FORMATS.items() if row.encoding == "integer"]
REALS = [name for name in FORMATS if name not in INTEGERS]
TORCH_FLOATS = [name for name in REALS if FORMATS[name].torch_dtype]
# Formats whose values are those of a wider format with the low bits of the code zero: name -> (carrier, dropped bits).
TRUNCATED = {"tf32": 13, "hf32_e8m10": 13, "hf32_e8m11": 12}


# torch 2.13 reports 2**-3 for a format with two fraction bits; its own decoding of the codes says 0.25 (tested below), and so does ml_dtypes.
TORCH_EPS_IS_WRONG = {"fp8_e5m2fnuz": 0.125}


def same(left: float, right: float) -> bool:
    """Whether two numbers are the same value and sign, NaN equal to NaN."""
    if math.isnan(left) or math.isnan(right):
        return math.isnan(left) and math.isnan(right)
    return left == right and math.copysign(1, left) == math.copysign(1, right)


def limits(dtype: object) -> Any:
    """Return the finfo or iinfo of ml_dtypes, which are not annotated."""
    info: Any = ml_dtypes.iinfo if dtype is ml_dtypes.int4 else ml_dtypes.finfo
    return info(dtype)


def all_values(name: str) -> list[float]:
    """Decode every code of a format of at most 16 bits, in the order of the codes."""
    return [FORMATS[name].value(code) for code in range(1 << FORMATS[name].bits)]


@pytest.mark.parametrize("name", FORMATS)
def test_definition_is_consistent(name: str) -> None:
    row = FORMATS[name]
    assert row.name == name
    assert row.storage in FORMATS
    assert FORMATS[row.storage].storage == row.storage
    assert row.bits <= FORMATS[row.storage].bits
    assert row.source
    if row.encoding not in ("hif8", "integer"):
        assert row.bits == row.is_signed + row.exponent_bits + row.mantissa_bits


def test_table_is_immutable() -> None:
    with pytest.raises(TypeError):
        FORMATS["fp17"] = FORMATS["fp16"]  # type: ignore[index]  # the assignment that must fail
    with pytest.raises(AttributeError):
        FORMATS["fp16"].bits = 8  # type: ignore[misc]  # the assignment that must fail
    assert pickle.loads(pickle.dumps(FORMATS["fp16"])) == FORMATS["fp16"]


@pytest.mark.parametrize("name", TORCH_FLOATS)
def test_against_torch_finfo(name: str) -> None:
    row, dtype = FORMATS[name], getattr(torch, FORMATS[name].torch_dtype or "")
    info = torch.finfo(dtype)
    assert (row.bits, row.max, row.min, row.smallest_normal) == (info.bits, info.max, info.min, info.smallest_normal)
    assert TORCH_EPS_IS_WRONG.get(name, row.eps) == info.eps
    assert row.storage_bytes == dtype.itemsize


@pytest.mark.parametrize("name", [name for name in INTEGERS if FORMATS[name].torch_dtype])
def test_against_torch_iinfo(name: str) -> None:
    row, dtype = FORMATS[name], getattr(torch, FORMATS[name].torch_dtype or "")
    info = torch.iinfo(dtype)
    assert (row.bits, row.max, row.min) == (info.bits, info.max, info.min)
    assert row.storage_bytes == dtype.itemsize


def test_every_torch_number_dtype_is_known_or_left_out_on_purpose() -> None:
    dtypes = {str(getattr(torch, name)) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
    sub_byte = {f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}  # dtypes without data or operators
    left_out = sub_byte - {"torch.int4"} | {"torch.bool", "torch.uint16"}
    known = {name for name in dtypes - left_out if not name.startswith(("torch.complex", "torch.bits", "torch.q"))}
    packed = {"torch.int4", "torch.float4_e2m1fn_x2"}
    assert {f"torch.{row.torch_dtype}" for row in FORMATS.values() if row.torch_dtype} == known - packed
    assert {parse_format(name).name for name in known} == {name for name, row in FORMATS.items() if row.torch_dtype} | {"int4", "fp4_e2m1"}


@pytest.mark.parametrize("name", [*ML_DTYPES, "fp16", "fp32", "fp64"])
def test_against_ml_dtypes_finfo(name: str) -> None:
    row = FORMATS[name]
    info = limits(ML_DTYPES.get(name, row.torch_dtype))
    assert (row.bits, row.max, row.min, row.eps) == (info.bits, float(info.max), float(info.min), float(info.eps))
    assert (row.smallest_normal, row.smallest_subnormal) == (float(info.smallest_normal), float(info.smallest_subnormal))
    assert (row.mantissa_bits, row.significand_bits) == (info.nmant, info.nmant + 1)


def test_int4_against_ml_dtypes_iinfo() -> None:
    info = limits(ml_dtypes.int4)
    assert (FORMATS["int4"].max, FORMATS["int4"].min, FORMATS["int4"].storage_bytes) == (info.max, info.min, 0.5)


@pytest.mark.parametrize("name", GFLOAT)
def test_against_gfloat_properties(name: str) -> None:
    row, info = FORMATS[name], GFLOAT[name]
    assert (row.bits, row.significand_bits, row.exponent_bits, row.bias) == (info.k, info.precision, info.expBits, info.bias)
    assert (row.max, row.min, row.eps, row.smallest_normal) == (info.max, info.min, info.eps, info.smallest_normal)
    assert (row.has_inf, row.has_nan, row.has_negative_zero, row.has_subnormals) == (info.num_posinfs > 0, info.num_nans > 0, info.has_nz, info.has_subnormals)
    if row.has_subnormals:
        assert row.smallest_subnormal == info.smallest_subnormal


@pytest.mark.parametrize("name", [name for name in GFLOAT if FORMATS[name].bits <= 8])
def test_every_code_against_gfloat(name: str) -> None:
    for code, value in enumerate(all_values(name)):
        assert same(value, gfloat.decode_float(GFLOAT[name], code).fval), f"{name} {code:#x}"


@pytest.mark.parametrize("name", [*ML_DTYPES, "fp16"])
def test_every_code_against_ml_dtypes_view(name: str) -> None:
    row = FORMATS[name]
    codes = np.arange(1 << row.bits, dtype=np.uint16 if row.bits == 16 else np.uint8)
    with np.errstate(invalid="ignore"):  # widening a signaling NaN of bf16 raises the invalid flag
        expected = codes.view(np.dtype(ML_DTYPES.get(name, "float16"))).astype(np.float64).tolist()
    wrong = [hex(code) for code, (ours, theirs) in enumerate(zip(all_values(name), expected, strict=True)) if not same(ours, theirs)]
    assert not wrong


@pytest.mark.parametrize("name", [name for name in TORCH_FLOATS if FORMATS[name].bits == 8])
def test_every_code_against_torch_view(name: str) -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(getattr(torch, FORMATS[name].torch_dtype or "")).double().tolist()
    assert all(same(ours, theirs) for ours, theirs in zip(all_values(name), expected, strict=True))


@pytest.mark.parametrize("name", ["fp32", "fp64", *TRUNCATED])
def test_sampled_codes_of_wide_formats(name: str) -> None:
    row, drop = FORMATS[name], TRUNCATED.get(name, 0)
    code_struct, value_struct = ("<Q", "<d") if name == "fp64" else ("<I", "<f")
    top, half = 1 << row.bits, 1 << row.bits - 1
    boundary = 1 << row.mantissa_bits
    infinity = half - boundary
    sampler = random.Random(20240917)
    edges = [0, 1, boundary - 1, boundary, boundary + 1, infinity - 1, infinity, infinity + 1, half - 1]
    for code in [*edges, *(half + code for code in edges), *(sampler.randrange(top) for _ in range(5000))]:
        (expected,) = struct.unpack(value_struct, struct.pack(code_struct, code << drop))
        assert same(row.value(code), expected), hex(code)


def test_e1m2_against_its_definition() -> None:
    # E1M2 with bias 1: 0.25 steps to 1.75, codes 0x4 = 1.0 and 0x7 = 1.75 (opbase, float4_e1m2.h). No Python library for it in the test environment.
    positive = [0.25 * code for code in range(8)]
    assert all(same(ours, theirs) for ours, theirs in zip(all_values("fp4_e1m2"), positive + [-value for value in positive], strict=True))
    row = FORMATS["fp4_e1m2"]
    assert (row.max, row.smallest_normal, row.smallest_subnormal, row.eps, row.storage_bytes) == (1.75, 1.0, 0.25, 0.25, 0.5)


def test_ue4m3_is_the_positive_half_of_e4m3() -> None:
    assert all(same(ours, theirs) for ours, theirs in zip(all_values("ue4m3"), all_values("fp8_e4m3")[:128], strict=True))
    row = FORMATS["ue4m3"]
    assert (row.max, row.min, row.storage_bytes, row.carrier_dtype) == (448, 0, 1, "float8_e4m3fn")


def test_hif8_binades_match_the_paper() -> None:
    """7 exponents with 3 mantissa bits, 8 with 2, 16 with 1, and 7 denormal binades of one value: 38 binades. Source: arXiv 2409.16626."""
    values = all_values("hif8")
    finite = [value for value in values if math.isfinite(value)]
    values_per_binade = Counter(math.frexp(value)[1] - 1 for value in finite if value > 0)
    expected = dict.fromkeys(range(-3, 4), 8)
    expected |= dict.fromkeys((*range(-7, -3), *range(4, 8)), 4)
    expected |= dict.fromkeys((*range(-15, -7), *range(8, 16)), 2)
    expected |= dict.fromkeys(range(-22, -15), 1)
    expected[15] -= 1  # the code of 1.5 * 2**15 is infinity
    assert len(expected) == 38
    assert values_per_binade == expected
    assert len(set(finite)) == len(finite) == 253
    assert sorted(finite) == sorted(-value for value in finite)


def test_hif8_special_codes() -> None:
    # The codes of HIF8_ZERO_VALUE, HIF8_INF_VALUE and HIF8_NAN_VALUE in opbase, hifloat8.h.
    values = all_values("hif8")
    assert [code for code, value in enumerate(values) if value == 0] == [0x00]
    assert [code for code, value in enumerate(values) if math.isnan(value)] == [0x80]
    assert [code for code, value in enumerate(values) if math.isinf(value)] == [0x6F, 0xEF]
    assert values[0x6F] > 0 > values[0xEF]
    row = FORMATS["hif8"]
    assert (row.max, row.min, row.smallest_normal, row.smallest_subnormal, row.eps) == (2.0**15, -(2.0**15), 2.0**-15, 2.0**-22, 0.125)
    assert (row.has_inf, row.has_nan, row.has_negative_zero, row.storage_bytes, row.carrier_dtype) == (True, True, False, 1, "uint8")


def test_hif8_every_code_against_stored_decoding() -> None:
    # sha256 of the 256 values as little-endian float32 (NaN as the quiet pattern), decoded by PyPI en_dtypes 0.0.4 (np.uint8 viewed as hifloat8).
    decoded = b"".join(bytes.fromhex("0000c07f") if math.isnan(value) else struct.pack("<f", value) for value in all_values("hif8"))
    assert hashlib.sha256(decoded).hexdigest() == "2ac829ee895e0e5e803c4484a3953db8d598c6c8131b98ca32f75502a7a2fb4c"


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].bits <= 16])
def test_properties_against_the_list_of_all_values(name: str) -> None:
    row, values = FORMATS[name], all_values(name)
    finite = [value for value in values if math.isfinite(value)]
    assert (row.max, row.min) == (max(finite), min(finite))
    assert row.eps == min(value for value in finite if value > 1) - 1
    assert row.smallest_subnormal == min(value for value in finite if value > 0)
    assert row.has_inf == any(math.isinf(value) for value in values)
    assert row.has_nan == any(math.isnan(value) for value in values)
    assert row.has_negative_zero == any(value == 0 and math.copysign(1, value) < 0 for value in values)
    assert row.is_signed == any(value < 0 for value in finite)
    if row.encoding in ("ieee", "fn", "fnuz", "finite"):
        in_binade = Counter(math.frexp(value)[1] - 1 for value in finite if value > 0)
        assert row.smallest_normal == 2.0 ** min(exponent for exponent, count in in_binade.items() if count == 1 << row.mantissa_bits)


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_codes_are_twos_complement(name: str) -> None:
    row = FORMATS[name]
    for code in (0, 1, (1 << row.bits - 1) - 1, 1 << row.bits - 1, (1 << row.bits) - 1):
        padding = -row.bits % 8  # int4 is tested as the high half of a byte
        whole_bytes = (code << padding).to_bytes((row.bits + padding) // 8, "big")
        assert row.value(code) == int.from_bytes(whole_bytes, "big", signed=row.kind == "int") >> padding
    assert row.significand_bits == int(row.max).bit_length()


@pytest.mark.parametrize("name", FORMATS)
def test_codes_out_of_range_are_refused(name: str) -> None:
    row = FORMATS[name]
    for code in (-1, 1 << row.bits):
        with pytest.raises(UnknownNameError, match=rf"{name} code.*{row.bits} bits"):
            row.value(code)


def test_low_bit_formats() -> None:
    low = {name for name, row in FORMATS.items() if row.is_low_bit}
    assert low == {name for name in FORMATS if name.startswith(("fp8_", "fp6_", "fp4_"))} | {"hif8", "int4", "int8", "uint8"}


def test_carriers() -> None:
    carried = {name: FORMATS[name].carrier_dtype for name in ("tf32", "hf32_e8m11", "hif8", "ue4m3", "fp4_e2m1", "fp6_e3m2", "bf16")}
    assert carried == {
        "tf32": "float32",
        "hf32_e8m11": "float32",
        "hif8": "uint8",
        "ue4m3": "float8_e4m3fn",
        "fp4_e2m1": None,
        "fp6_e3m2": None,
        "bf16": "bfloat16",
    }
    assert (FORMATS["tf32"].bits, FORMATS["hf32_e8m11"].bits, FORMATS["hf32_e8m10"].bits) == (19, 20, 19)
    assert (FORMATS["tf32"].storage_bytes, FORMATS["fp4_e2m1"].storage_bytes, FORMATS["fp6_e2m3"].storage_bytes) == (4, 0.5, 0.75)


SPELLINGS: dict[str, list[object]] = {
    "fp64": ["float64", "double", "f64", torch.float64, np.float64, np.dtype(">f8"), "torch.double"],
    "fp32": ["float32", "float", "single", "F32", torch.float, np.float32, np.dtype("float32"), "torch.float32", " FP32 "],
    "fp16": ["float16", "half", "f16", "F16", torch.half, np.half, "FP16"],
    "bf16": ["bfloat16", "BF16", "torch.bfloat16", torch.bfloat16, ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)],
    "tf32": ["TF32", "tensorfloat32"],
    "hf32_e8m11": ["HF32_E8M11"],
    "hf32_e8m10": ["hf32-e8m10"],
    "fp8_e4m3": ["fp8_e4m3fn", "float8_e4m3fn", "e4m3", "E4M3", "FLOAT8_E4M3FN", torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn],
    "fp8_e5m2": ["e5m2", "float8_e5m2", "E5M2", torch.float8_e5m2, ml_dtypes.float8_e5m2],
    "fp8_e4m3fnuz": ["float8_e4m3fnuz", torch.float8_e4m3fnuz, ml_dtypes.float8_e4m3fnuz],
    "fp8_e5m2fnuz": ["float8_e5m2fnuz", torch.float8_e5m2fnuz, "ml_dtypes.float8_e5m2fnuz"],
    "fp6_e2m3": ["e2m3", "float6_e2m3", ml_dtypes.float6_e2m3fn],
    "fp6_e3m2": ["e3m2", "float6_e3m2", np.dtype(ml_dtypes.float6_e3m2fn)],
    "fp4_e2m1": ["e2m1", "float4_e2m1", "float4_e2m1fn_x2", torch.float4_e2m1fn_x2, ml_dtypes.float4_e2m1fn],
    "fp4_e1m2": ["e1m2", "float4_e1m2", "float4_e1m2fn_x2"],
    "hif8": ["hifloat8", "HiFloat8", "HIF8"],
    "e8m0": ["ue8m0", "E8M0", "float8_e8m0fnu", torch.float8_e8m0fnu, ml_dtypes.float8_e8m0fnu],
    "ue4m3": ["UE4M3"],
    "int4": ["s4", "S4", ml_dtypes.int4, "torch.int4"],
    "int8": ["s8", torch.int8, np.int8],
    "int16": ["s16", torch.short],
    "int32": ["s32", "i32", torch.int],
    "int64": ["s64", torch.long],
    "uint8": ["u8", torch.uint8],
    "uint32": ["u32", np.dtype("uint32")],
    "uint64": ["u64", torch.uint64],
}


def test_spellings_cover_every_format() -> None:
    assert SPELLINGS.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str) -> None:
    row = FORMATS[name]
    for spelling in (row, name, name.upper(), str(row), *row.aliases, *SPELLINGS[name]):
        assert parse_format(spelling) is row
        assert format_name(spelling) == name


def test_no_spelling_means_two_formats() -> None:
    counts = Counter(spelling for row in FORMATS.values() for spelling in (row.name, *row.aliases))
    counts.update((*AMBIGUOUS, *DEVICE_RESOLVED))
    assert {spelling for spelling, count in counts.items() if count > 1} == set()
    assert all(spelling == spelling.lower().strip() for spelling in counts)
    assert {choice for choices in (*AMBIGUOUS.values(), *DEVICE_RESOLVED.values()) for choice in choices} <= FORMATS.keys()


@pytest.mark.parametrize("spelling", AMBIGUOUS)
def test_ambiguous_spellings_are_refused_with_their_meanings(spelling: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        parse_format(spelling.upper())
    assert set(caught.value.allowed) == set(AMBIGUOUS[spelling])
    assert all(choice in str(caught.value) for choice in AMBIGUOUS[spelling])


@pytest.mark.parametrize(("family", "members"), [("fp8", "fp8_e4m3.*fp8_e5m2"), ("fp6", "fp6_e2m3.*fp6_e3m2"), ("fp4", "fp4_e2m1.*fp4_e1m2")])
def test_a_family_is_not_a_format(family: str, members: str) -> None:
    with pytest.raises(UnknownNameError, match=f"{family} could mean several formats.*{members}"):
        parse_format(family)


def test_ieee_e4m3_of_ml_dtypes_is_not_taken_for_the_ocp_format() -> None:
    assert float(limits(ml_dtypes.float8_e4m3).max) == 240 != FORMATS["fp8_e4m3"].max
    for value in (ml_dtypes.float8_e4m3, np.dtype(ml_dtypes.float8_e4m3), "float8_e4m3"):
        with pytest.raises(UnknownNameError, match="could mean several formats"):
            parse_format(value)
    for value in (ml_dtypes.float8_e4m3b11fnuz, ml_dtypes.float8_e3m4):
        with pytest.raises(UnknownNameError):
            parse_format(value)


NOT_FORMATS = ["", "fp", "fp32x", "bool", "none", None, 8, 3.5, b"fp32", float, int, object(), ["fp32"], torch.zeros(1), torch.bool, torch.complex64]


@pytest.mark.parametrize("value", NOT_FORMATS, ids=lambda value: type(value).__name__)
def test_what_is_not_a_format_is_refused(value: object) -> None:
    with pytest.raises(UnknownNameError) as caught:
        parse_format(value)
    assert caught.value.kind == "format"
    assert set(caught.value.allowed) == FORMATS.keys() | DEVICE_RESOLVED.keys()


def test_hf32_is_kept_until_a_device_resolves_it() -> None:
    assert format_name("HF32") == "hf32"
    with pytest.raises(UnknownNameError, match=r"the device decides what hf32 is.*hf32_e8m10 or hf32_e8m11"):
        parse_format("hf32")
    assert resolved("hf32", ["fp32", "hf32_e8m11"]) is FORMATS["hf32_e8m11"]
    assert resolved("hf32", iter(["hf32_e8m10"])) is FORMATS["hf32_e8m10"]
    assert resolved("half", []) is FORMATS["fp16"]
    for available in ([], ["fp32"], ["hf32_e8m10", "hf32_e8m11"]):
        with pytest.raises(UnknownNameError, match="exactly one"):
            resolved("hf32", available)


WORDS = st.sampled_from(sorted({spelling for row in FORMATS.values() for spelling in (row.name, *row.aliases)} | AMBIGUOUS.keys() | DEVICE_RESOLVED.keys()))
NEAR_WORDS = st.tuples(WORDS, st.text(max_size=3), st.text(max_size=3)).map(lambda parts: parts[1] + parts[0] + parts[2])


@settings(derandomize=True, max_examples=400, deadline=None)
@given(st.one_of(st.text(), NEAR_WORDS, WORDS, st.integers(), st.none(), st.binary()))
def test_any_value_parses_or_raises_unknown_name(value: object) -> None:
    try:
        row = parse_format(value)
    except UnknownNameError as error:
        assert "format" in str(error)
        return
    assert isinstance(value, str)
    assert value.strip().lower().replace("-", "_").removeprefix("torch.").removeprefix("ml_dtypes.") in (row.name, *row.aliases)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.sampled_from([name for name in REALS if FORMATS[name].is_signed]), st.data())
def test_negation_flips_the_top_bit(name: str, data: st.DataObject) -> None:
    row = FORMATS[name]
    half = 1 << row.bits - 1
    code = data.draw(st.integers(min_value=1, max_value=half - 1))
    assert same(row.value(half + code), -row.value(code))


def test_import_loads_no_array_library() -> None:
    probe = "import sys, mpbackend.formats; print(sorted({'torch', 'numpy', 'ml_dtypes', 'gfloat'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout.strip() == "[]"
