"""The number formats, each derived from its definition.

A format is a set of values and how codes map to them, not a storage dtype: tf32 is computed in fp32 storage, hif8 travels as uint8, and the ``fn`` and
``fnuz`` variants of an 8-bit format differ in every value. The table holds only what a specification states (field widths, bias, special values);
maxima, epsilons and decoded values are computed from it. ``Format.value`` is the scalar oracle that vectorized code is tested against.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from mpbackend.errors import UnknownNameError

Kind = Literal["float", "int", "uint", "scale"]
Encoding = Literal["ieee", "fn", "fnuz", "finite", "e8m0", "hif8", "integer"]

_OFP8 = "OCP 8-bit Floating Point (OFP8) 1.0"
_MX = "OCP Microscaling Formats (MX) 1.0"
_FNUZ = "arXiv 2206.02915"
_IEEE = "IEEE 754-2019"
_INTEGER = "two's complement"


@dataclass(frozen=True, slots=True)
class Format:
    """A number format.

    Attributes:
        name: canonical name, the key in ``FORMATS``.
        kind: ``float``, ``int``, ``uint``, or ``scale`` (an unsigned format for the scale factors of a block).
        bits: width of one code in bits, padding of its storage excluded: tf32 has 19.
        exponent_bits: width of the exponent field; 0 for integers, the widest of the variable fields for hif8.
        mantissa_bits: explicit fraction bits; 0 for integers, the most that any value has (those around 1.0) for hif8.
        bias: the exponent of a normal value is its exponent field minus this; 0 where there is no biased field.
        encoding: what the codes beside the ordinary numbers mean.
            ``ieee``: the top exponent is infinity (fraction 0) and NaN. ``fn``: no infinity, only the all-ones magnitude is NaN.
            ``fnuz``: no infinity, one zero, the code of negative zero is NaN. ``finite``: neither infinity nor NaN.
            ``e8m0``: powers of two only, no sign, no zero, all ones is NaN. ``hif8``: prefix-coded, see ``value``. ``integer``: no special values.
        source: the specification that the row is taken from.
        storage: canonical name of the format whose storage carries it; itself unless narrower than what carries it or unknown to torch.
        torch_dtype: name in the ``torch`` namespace of the dtype that is this format, one element each; None if torch has none.
        aliases: other spellings that ``parse_format`` accepts, lower case.
        note: what the other fields cannot say; empty when nothing.
    """

    name: str
    kind: Kind
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    encoding: Encoding
    source: str
    storage: str
    torch_dtype: str | None
    aliases: tuple[str, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        """Return the canonical name, which ``parse_format`` reads back."""
        return self.name

    @property
    def is_low_bit(self) -> bool:
        """Whether tensors in this format need scale factors: element formats of at most 8 bits."""
        return self.kind != "scale" and self.bits <= 8

    @property
    def is_signed(self) -> bool:
        """Whether there are negative values."""
        return self.kind in ("float", "int")

    @property
    def has_inf(self) -> bool:
        """Whether some code is an infinity."""
        return self.encoding in ("ieee", "hif8")

    @property
    def has_nan(self) -> bool:
        """Whether some code is NaN."""
        return self.encoding not in ("finite", "integer")

    @property
    def has_negative_zero(self) -> bool:
        """Whether zero has a second, negative code."""
        return self.is_signed and self.encoding in ("ieee", "fn", "finite")

    @property
    def has_subnormals(self) -> bool:
        """Whether there are values below the smallest normal one."""
        return self.encoding not in ("e8m0", "integer")

    @property
    def significand_bits(self) -> int:
        """Bits of precision p: ``mantissa_bits + 1`` (the leading one is implicit), and the magnitude bits of an integer."""
        return self.bits - self.is_signed if self.encoding == "integer" else self.mantissa_bits + 1

    @property
    def storage_bytes(self) -> float:
        """Bytes that one element takes in its storage: ``bits(storage) / 8``; 0.5 for packed 4-bit formats."""
        return FORMATS[self.storage].bits / 8

    @property
    def carrier_dtype(self) -> str | None:
        """Name of the torch dtype that carries it: that of its storage; None where torch has no one-element dtype (packed formats)."""
        return FORMATS[self.storage].torch_dtype

    @property
    def max(self) -> float:
        """Largest finite value; an exact ``int`` for integers.

        With M fraction bits and emax the largest exponent of a number: ``(2 - 2**-M) * 2**emax``, one ulp less where the top fraction is NaN (``fn``).
        """
        magnitude_bits = self.bits - self.is_signed
        if self.encoding == "ieee":
            return self.value(((1 << self.exponent_bits) - 1 << self.mantissa_bits) - 1)
        if self.encoding in ("fn", "e8m0"):
            return self.value((1 << magnitude_bits) - 2)
        if self.encoding == "hif8":
            return self.value(_HIF8_INF - 1)
        return self.value((1 << magnitude_bits) - 1)

    @property
    def min(self) -> float:
        """Lowest finite value: ``-max`` if signed (``-2**(bits - 1)`` for integers), else the value of code 0."""
        if self.kind == "int":
            return -(1 << self.bits - 1)
        return -self.max if self.is_signed else self.value(0)

    @property
    def smallest_normal(self) -> float:
        """Smallest positive value with a leading one: ``2**(1 - bias)``; ``2**-bias`` for e8m0, ``2**-15`` for hif8, 1 for integers."""
        if self.encoding == "integer":
            return 1
        if self.encoding == "hif8":
            return 2.0**-15
        return math.ldexp(1.0, int(self.has_subnormals) - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive value: ``2**(1 - bias - M)``; ``2**-22`` for hif8; ``smallest_normal`` where there are no subnormals."""
        if not self.has_subnormals:
            return self.smallest_normal
        return self.value(1)

    @property
    def eps(self) -> float:
        """Distance from 1.0 to the next larger value: ``2**-M``; 1 for integers."""
        return 1 if self.encoding == "integer" else math.ldexp(1.0, -self.mantissa_bits)

    def value(self, code: int) -> float:
        """Return the value of a code; the definition, one code at a time.

        Args:
            code: the bit pattern as an unsigned integer, ``0 <= code < 2**bits``: sign (if any), exponent, fraction from the most significant bit down.

        Returns:
            The exact value; an ``int`` for integers. Every format here fits in a Python float.

        Raises:
            UnknownNameError: ``code`` is out of range.
        """
        if not 0 <= code < 1 << self.bits:
            raise UnknownNameError(f"{self.name} code", str(code), (), remedy=f"a code has {self.bits} bits: 0 to 2**{self.bits} - 1")
        if self.encoding == "integer":
            return code - (code >> self.bits - 1 << self.bits) if self.kind == "int" else code
        if self.encoding == "hif8":
            return _hif8_value(code)
        if self.encoding == "e8m0":
            return math.nan if code == 0xFF else math.ldexp(1.0, code - self.bias)

        top_exponent = (1 << self.exponent_bits) - 1
        top_fraction = (1 << self.mantissa_bits) - 1
        fraction = code & top_fraction
        exponent = code >> self.mantissa_bits & top_exponent
        sign = -1.0 if self.is_signed and code >> self.bits - 1 else 1.0
        if self.encoding == "ieee" and exponent == top_exponent:
            return math.nan if fraction else sign * math.inf
        if self.encoding == "fn" and exponent == top_exponent and fraction == top_fraction:
            return math.nan
        if self.encoding == "fnuz" and code == 1 << self.bits - 1:
            return math.nan
        if exponent == 0:
            return sign * math.ldexp(fraction, 1 - self.bias - self.mantissa_bits)
        return sign * math.ldexp((1 << self.mantissa_bits) + fraction, exponent - self.bias - self.mantissa_bits)


_HIF8_INF = 0b0110_1111
_HIF8_NAN = 0b1000_0000
# Dot prefix -> (exponent bits, mantissa bits); with the sign the fields fill 8 bits (arXiv 2409.16626).
_HIF8_DOTS = (("11", 4, 1), ("10", 3, 2), ("01", 2, 3), ("001", 1, 3), ("0001", 0, 3))


def _hif8_value(code: int) -> float:
    """Decode hif8: sign, dot (a prefix code that says how wide the exponent is), exponent in sign and magnitude, mantissa.

    The leading one of the exponent's magnitude is implicit, so no exponent has two codes. Dot ``0000`` is the denormal mode: the mantissa M = 1..7 extends
    the exponent range, ``2**(M - 23)``; with M = 0 the code is zero or, with the sign, NaN. The largest magnitude is infinity. Source: arXiv 2409.16626;
    the special codes as in HIF8_ZERO_VALUE, HIF8_NAN_VALUE and HIF8_INF_VALUE of opbase, ``hifloat8.h``.

    Args:
        code: 0 to 255, already checked.
    """
    if code in (0, _HIF8_NAN):
        return math.nan if code else 0.0
    sign = -1.0 if code & 0x80 else 1.0
    magnitude = code & 0x7F
    if magnitude == _HIF8_INF:
        return sign * math.inf
    fields = f"{magnitude:07b}"
    if fields.startswith("0000"):
        return sign * math.ldexp(1.0, magnitude - 23)
    _, exponent_bits, mantissa_bits = next(row for row in _HIF8_DOTS if fields.startswith(row[0]))
    mantissa = magnitude & (1 << mantissa_bits) - 1
    exponent = 0
    if exponent_bits:
        stored = magnitude >> mantissa_bits & (1 << exponent_bits) - 1
        implicit_one = 1 << exponent_bits - 1
        exponent = -(stored | implicit_one) if stored & implicit_one else stored | implicit_one
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - mantissa_bits)


# A table reads by columns.
# fmt: off
_TABLE = (
    #      name            kind    bits  E   M  bias  encoding   source   storage   torch dtype    aliases
    Format("fp64",         "float", 64, 11, 52, 1023, "ieee",    _IEEE,   "fp64",   "float64",     ("float64", "double", "f64", "binary64")),
    Format("fp32",         "float", 32,  8, 23,  127, "ieee",    _IEEE,   "fp32",   "float32",     ("float32", "float", "single", "f32", "binary32")),
    Format("fp16",         "float", 16,  5, 10,   15, "ieee",    _IEEE,   "fp16",   "float16",     ("float16", "half", "f16", "binary16")),
    Format("bf16",         "float", 16,  8,  7,  127, "ieee",    "PTX ISA, .bf16", "bf16", "bfloat16", ("bfloat16",)),
    Format("tf32",         "float", 19,  8, 10,  127, "ieee",    "PTX ISA, .tf32", "fp32", None,   ("tensorfloat32",), "computed in fp32 storage"),
    Format("hf32_e8m11",   "float", 20,  8, 11,  127, "ieee",    "asc-devkit, HF32.md", "fp32", None, (), "computed in fp32 storage"),
    Format("hf32_e8m10",   "float", 19,  8, 10,  127, "ieee",    "asc-devkit, HF32.md", "fp32", None, (), "computed in fp32 storage"),
    Format("fp8_e4m3",     "float",  8,  4,  3,    7, "fn",      _OFP8,   "fp8_e4m3", "float8_e4m3fn",
           ("fp8_e4m3fn", "float8_e4m3fn", "e4m3", "e4m3fn", "f8e4m3fn", "fp8e4m3")),
    Format("fp8_e5m2",     "float",  8,  5,  2,   15, "ieee",    _OFP8,   "fp8_e5m2", "float8_e5m2", ("float8_e5m2", "e5m2", "f8e5m2", "fp8e5m2")),
    Format("fp8_e4m3fnuz", "float",  8,  4,  3,    8, "fnuz",    _FNUZ,   "fp8_e4m3fnuz", "float8_e4m3fnuz", ("float8_e4m3fnuz", "e4m3fnuz", "f8e4m3fnuz")),
    Format("fp8_e5m2fnuz", "float",  8,  5,  2,   16, "fnuz",    _FNUZ,   "fp8_e5m2fnuz", "float8_e5m2fnuz", ("float8_e5m2fnuz", "e5m2fnuz", "f8e5m2fnuz")),
    Format("fp6_e2m3",     "float",  6,  2,  3,    1, "finite",  _MX,     "fp6_e2m3", None, ("float6_e2m3", "float6_e2m3fn", "e2m3", "f6e2m3fn"),
           "storage counts four elements in three bytes; some instructions read one a byte"),
    Format("fp6_e3m2",     "float",  6,  3,  2,    3, "finite",  _MX,     "fp6_e3m2", None, ("float6_e3m2", "float6_e3m2fn", "e3m2", "f6e3m2fn"),
           "storage counts four elements in three bytes; some instructions read one a byte"),
    Format("fp4_e2m1",     "float",  4,  2,  1,    1, "finite",  _MX,     "fp4_e2m1", None,
           ("float4_e2m1", "float4_e2m1fn", "float4_e2m1fn_x2", "e2m1", "f4e2m1fn", "e2m1x2"), "torch.float4_e2m1fn_x2 is a byte of two elements"),
    Format("fp4_e1m2",     "float",  4,  1,  2,    1, "finite",  "opbase, float4_e1m2.h", "fp4_e1m2", None,
           ("float4_e1m2", "float4_e1m2fn", "float4_e1m2fn_x2", "e1m2", "e1m2x2"), "two elements a byte, in uint8 tensors"),
    Format("hif8",         "float",  8,  4,  3,    0, "hif8",    "arXiv 2409.16626", "uint8", None, ("hifloat8",),
           "3 fraction bits for exponents -3..3, 2 to 7, 1 to 15, none below 2**-15"),
    Format("e8m0",         "scale",  8,  8,  0,  127, "e8m0",    _MX,     "e8m0",   "float8_e8m0fnu",
           ("ue8m0", "e8m0fnu", "float8_e8m0fnu", "float8_e8m0", "f8e8m0fnu", "fp8_e8m0")),
    Format("ue4m3",        "scale",  7,  4,  3,    7, "fn",      "PTX ISA, .ue4m3", "fp8_e4m3", None, ("fp8_ue4m3",), "fp8_e4m3 with the sign bit zero"),
    Format("int4",         "int",    4,  0,  0,    0, "integer", _INTEGER, "int4",  None,          ("s4",), "two elements a byte; torch.int4 holds no data"),
    Format("int8",         "int",    8,  0,  0,    0, "integer", _INTEGER, "int8",  "int8",        ("s8",)),
    Format("int16",        "int",   16,  0,  0,    0, "integer", _INTEGER, "int16", "int16",       ("s16", "i16")),
    Format("int32",        "int",   32,  0,  0,    0, "integer", _INTEGER, "int32", "int32",       ("s32", "i32")),
    Format("int64",        "int",   64,  0,  0,    0, "integer", _INTEGER, "int64", "int64",       ("s64", "i64")),
    Format("uint8",        "uint",   8,  0,  0,    0, "integer", _INTEGER, "uint8", "uint8",       ("u8",)),
    Format("uint32",       "uint",  32,  0,  0,    0, "integer", _INTEGER, "uint32", "uint32",     ("u32",)),
    Format("uint64",       "uint",  64,  0,  0,    0, "integer", _INTEGER, "uint64", "uint64",     ("u64",)),
)
# fmt: on

FORMATS: Mapping[str, Format] = MappingProxyType({row.name: row for row in _TABLE})
"""Every concrete format by its canonical name, widest first within a family."""

DEVICE_RESOLVED: Mapping[str, tuple[str, ...]] = MappingProxyType({"hf32": ("hf32_e8m10", "hf32_e8m11")})
"""Names that mean one of several formats, decided by the device that computes; a recipe may ask for one, ``resolved`` makes it concrete."""

AMBIGUOUS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fp8": ("fp8_e4m3", "fp8_e5m2"),
        "float8": ("fp8_e4m3", "fp8_e5m2"),
        "f8": ("fp8_e4m3", "fp8_e5m2", "fp64"),  # numpy's code for float64
        "float8_e4m3": ("fp8_e4m3", "fp8_e4m3fnuz"),  # in ml_dtypes and LLVM an IEEE variant with infinities and a maximum of 240, which is not in the table
        "f8e4m3": ("fp8_e4m3", "fp8_e4m3fnuz"),
        "fp6": ("fp6_e2m3", "fp6_e3m2"),
        "float6": ("fp6_e2m3", "fp6_e3m2"),
        "fp4": ("fp4_e2m1", "fp4_e1m2"),
        "float4": ("fp4_e2m1", "fp4_e1m2"),
        "f4": ("fp4_e2m1", "fp4_e1m2", "fp32"),  # numpy's code for float32
        "i8": ("int8", "int64"),  # numpy counts bytes, LLVM counts bits
        "i4": ("int4", "int32"),
        "int": ("int32", "int64"),
    }
)
"""Spellings that are refused because people mean different formats by them."""

_SPELLINGS: Mapping[str, Format] = MappingProxyType({spelling: row for row in _TABLE for spelling in (row.name, *row.aliases)})


def _spelling(value: object) -> str:
    """Return what ``value`` calls itself, lower case, without a namespace; the name of its type if it is neither text nor a dtype."""
    kind = type(value)
    if isinstance(value, str):
        text = value
    elif isinstance(value, type):
        # Scalar types of numpy and ml_dtypes are classes; the builtin float is 64 bits wide while the word means fp32, so a builtin class is named as one.
        text = f"class {value.__name__}" if value.__module__ == "builtins" else value.__name__
    elif "dtype" in kind.__name__.lower():
        # numpy: .name leaves the byte order out. torch: has no .name, str() says it.
        text = str(getattr(value, "name", value))
    else:
        text = f"{kind.__name__} object"
    return text.strip().lower().removeprefix("torch.").removeprefix("ml_dtypes.").replace("-", "_")


def parse_format(value: object) -> Format:
    """Return the concrete format that ``value`` names.

    Args:
        value: a ``Format``; a canonical name or alias in any case, with or without a ``torch.`` or ``ml_dtypes.`` prefix; or a torch, numpy or
            ml_dtypes dtype object. The word ``float`` is torch's (fp32); the builtin class ``float`` is refused.

    Raises:
        UnknownNameError: no format has that name, several could be meant (``fp8``), or the device decides (``hf32``); the message says which.
    """
    if isinstance(value, Format):
        return value
    spelling = _spelling(value)
    if spelling in _SPELLINGS:
        return _SPELLINGS[spelling]
    if choices := DEVICE_RESOLVED.get(spelling):
        remedy = f"the device decides what {spelling} is; before a device is chosen name {' or '.join(choices)}"
        raise UnknownNameError("format", spelling, choices, remedy=remedy)
    if choices := AMBIGUOUS.get(spelling):
        raise UnknownNameError("format", spelling, choices, remedy=f"{spelling} could mean several formats; name one of {', '.join(choices)}")
    raise UnknownNameError("format", spelling, (*FORMATS, *DEVICE_RESOLVED))


def format_name(value: object) -> str:
    """Return the canonical name of ``value``, as ``parse_format`` does, but keep a name that the device resolves (``hf32``).

    Raises:
        UnknownNameError: as ``parse_format``, except for names in ``DEVICE_RESOLVED``.
    """
    if not isinstance(value, Format) and (spelling := _spelling(value)) in DEVICE_RESOLVED:
        return spelling
    return parse_format(value).name


def resolved(value: object, available: Iterable[str]) -> Format:
    """Return the concrete format that ``value`` means on a device.

    Args:
        value: anything that ``format_name`` accepts.
        available: canonical names of the formats that the device computes in; consulted only if the device decides.

    Raises:
        UnknownNameError: ``value`` names nothing, or not exactly one of its choices is available.
    """
    name = format_name(value)
    if name not in DEVICE_RESOLVED:
        return parse_format(name)
    offered = set(available)
    found = [choice for choice in DEVICE_RESOLVED[name] if choice in offered]
    if len(found) != 1:
        remedy = f"the device must offer exactly one of {', '.join(DEVICE_RESOLVED[name])}; it offers {', '.join(found) or 'none'}"
        raise UnknownNameError("format", name, DEVICE_RESOLVED[name], remedy=remedy)
    return FORMATS[found[0]]
