"""torch_npu's global settings that change the arithmetic.

An attribute that ``torch.npu.matmul`` or ``torch.npu.conv`` does not know is silently ignored when it is set and reads back None; here that is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpbackend.backend import Switch
from mpbackend.errors import BackendError, UnknownNameError
from mpbackend.train.switches import DETERMINISTIC
from mpbackend_ascend.implementations import CONVERTING
from mpbackend_ascend.npu import npu, torch_npu

BOOLEANS = ("False", "True")

UNSET = "None"
"""``matmul.cube_math_type`` where ``matmul.allow_hf32`` and the precision mode decide."""
DEFAULT = "default"
"""A setting that was never made, so that torch_npu's default for the device holds."""

CUBE_MATH_TYPES = ("KEEP_DTYPE", "ALLOW_FP32_DOWN_PRECISION", "USE_FP16", "USE_HF32", "USE_FP32_ADD")
"""CANN's cubeMathType by number, as ``torch_npu.npu.npu_config`` numbers them."""

PRECISION_MODE = "ACL_PRECISION_MODE"
PRECISION_MODES = ("allow_fp32_to_fp16", "must_keep_origin_dtype")
INTERNAL_FORMATS = ("disable", "enable")
INF_NAN = "inf_nan"
SATURATING = "saturating"

SETTINGS = {"matmul": ("allow_hf32", "cube_math_type"), "conv": ("allow_hf32",)}
"""The attributes that torch_npu knows, by the object of ``torch.npu`` that has them."""


def switches() -> list[Switch]:
    """Return every switch. Those of the matrix come first: a plan sets them, and the fence of a session reads all of them."""
    return [
        flag("matmul", "allow_hf32", "fp32 matrix products of A2, A3 and 950 may use HF32"),
        flag("conv", "allow_hf32", "fp32 convolutions of A2, A3 and 950 may use HF32; torch_npu starts with True"),
        Switch(
            name="matmul.cube_math_type",
            get=read_cube_math_type,
            set=write_cube_math_type,
            allowed=(UNSET, *CUBE_MATH_TYPES),
            meaning="cubeMathType of every matrix product; overrides matmul.allow_hf32",
        ),
        option("precision_mode", PRECISION_MODE, PRECISION_MODES, "what compiled operators may do with fp32; also chooses cubeMathType below A2"),
        option("allow_internal_format", "ALLOW_INTERNAL_FORMAT", INTERNAL_FORMATS, "private layouts; without them convolutions take another operator"),
        Switch(
            name="jit_compile",
            get=lambda: str(not npu().is_jit_compile_false()),
            set=lambda value: npu().set_compile_mode(jit_compile=value == "True"),
            allowed=BOOLEANS,
            meaning="operators are compiled for each shape, a route that follows precision_mode",
        ),
        inf_nan_mode(),
        DETERMINISTIC,
    ]


def read_attribute(owner: str, name: str) -> Any:
    """Return a setting of ``torch.npu.<owner>``.

    Raises:
        UnknownNameError: torch_npu does not know it: it would ignore a value silently.
    """
    value = getattr(getattr(npu(), owner), name)
    if value is None and name not in SETTINGS.get(owner, ()):
        raise UnknownNameError(
            "switch",
            f"{owner}.{name}",
            [f"{key}.{known}" for key, names in SETTINGS.items() for known in names],
            remedy="torch_npu ignores a value that is assigned to it",
        )
    return value


def write_attribute(owner: str, name: str, value: object) -> None:
    """Set ``torch.npu.<owner>.<name>`` and read it back; for code that wants to set one by hand and not be ignored.

    Raises:
        UnknownNameError: torch_npu does not know it.
        BackendError: it reads back another value.
    """
    read_attribute(owner, name)
    setattr(getattr(npu(), owner), name, value)
    found = read_attribute(owner, name)
    if found != value:
        raise BackendError(f"torch.npu.{owner}.{name} = {value!r}", found=f"it reads back {found!r}", remedy="the installed torch_npu ignores the setting")


def flag(owner: str, name: str, meaning: str) -> Switch:
    """Return the switch of a true-or-false attribute of ``torch.npu.<owner>``."""
    return Switch(
        name=f"{owner}.{name}",
        get=lambda: str(read_attribute(owner, name)),
        set=lambda value: write_attribute(owner, name, value == "True"),
        allowed=BOOLEANS,
        meaning=meaning,
    )


def read_option(key: str) -> str:
    """Return an option of torch_npu's runtime; empty when it was never set."""
    value = torch_npu()._C._npu_getOption(key)
    return value.decode() if value else ""


def write_option(key: str, value: str) -> None:
    """Set an option of torch_npu's runtime; an empty text unsets it."""
    torch_npu()._C._npu_setOption({key: value})


def option(name: str, key: str, values: tuple[str, ...], meaning: str) -> Switch:
    """Return the switch of an option that can be unset again."""
    return Switch(
        name=name,
        get=lambda: read_option(key) or DEFAULT,
        set=lambda value: write_option(key, "" if value == DEFAULT else value),
        allowed=(DEFAULT, *values),
        meaning=meaning,
    )


def read_cube_math_type() -> str:
    """Return the name of the present cubeMathType. The option is read, since another torch_npu may lack the attribute."""
    value = read_option("CUBE_MATH_TYPE")
    return CUBE_MATH_TYPES[int(value)] if value else UNSET


def write_cube_math_type(value: str) -> None:
    """Set cubeMathType; ``None`` unsets it, for which the attribute has no way."""
    write_option("CUBE_MATH_TYPE", "" if value == UNSET else str(CUBE_MATH_TYPES.index(value)))


def check_overrides(arch: str) -> None:
    """Check that nothing overrides ``matmul.allow_hf32`` for fp32 products, which is what a plan sets.

    Args:
        arch: architecture key; on those whose products of fp32 are fp16 anyway there is nothing to override.

    Raises:
        BackendError: ``matmul.cube_math_type`` is set, or the precision mode sends fp32 products to fp16.
    """
    found = read_cube_math_type()
    if found not in (UNSET, "KEEP_DTYPE"):
        raise BackendError("fp32 matrix products", found=f"matmul.cube_math_type = {found} overrides the plan", remedy="leave it unset before prepare()")
    if arch not in CONVERTING and read_option(PRECISION_MODE) == PRECISION_MODES[0]:
        text = f"precision_mode = {PRECISION_MODES[0]} computes them in fp16"
        raise BackendError("fp32 matrix products", found=text, remedy=f"torch.npu.set_option({{{PRECISION_MODE!r}: {PRECISION_MODES[1]!r}}}) before prepare()")


def overflow_mode() -> str:
    """Return how this process's devices overflow; makes no device context.

    Raises:
        BackendError: torch_npu refuses the environment, as ``INF_NAN_MODE_ENABLE=0`` alone on Atlas A2 and A3.
    """
    try:
        supported = torch_npu()._C._npu_is_support_inf_nan()
    except RuntimeError as error:
        raise BackendError(
            "the overflow mode", found=str(error).splitlines()[0], remedy="unset INF_NAN_MODE_ENABLE; INF_NAN_MODE_FORCE_DISABLE=1 saturates"
        ) from error
    return INF_NAN if supported else SATURATING


def inf_nan_mode() -> Switch:
    """Return the switch that only reports: the environment decides before the process starts."""

    def refuse(value: str) -> None:
        if value != overflow_mode():
            remedy = "start the process with INF_NAN_MODE_FORCE_DISABLE=1 to saturate on Atlas A2 and A3; other devices have one mode"
            raise BackendError(f"switch inf_nan_mode = {value!r}", found=f"this process runs in {overflow_mode()!r}", remedy=remedy)

    read: Callable[[], str] = overflow_mode
    return Switch(name="inf_nan_mode", get=read, set=refuse, allowed=(overflow_mode(),), meaning="overflow gives inf and NaN, or the largest finite value")
