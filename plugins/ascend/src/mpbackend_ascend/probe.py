"""Asks torch_npu what it sees, in a process of its own: ``python -m mpbackend_ascend.probe`` prints one line of JSON.

Nothing here makes a device context: the SoC's name, the number of devices and the overflow mode are answered without one.
"""

from __future__ import annotations

import ctypes
import importlib
import json
from collections.abc import Callable
from typing import Any

MARK = "mpbackend-ascend-probe "
"""Begins the line of the answer; torch_npu prints lines of its own."""

RUNTIME = "libascendcl.so"
SIMULATOR_SYMBOL = "npu_simulator_version"
"""Defined by the stand-in runtime of this plugin's tests and by nothing of the vendor's."""


def answer_of(question: Callable[[], Any]) -> tuple[Any, str]:
    """Return (answer, ""), or (None, first line of what it raised)."""
    try:
        return question(), ""
    except Exception as error:  # noqa: BLE001 - the vendor's code may raise anything; the caller shows it
        return None, (str(error).splitlines() or [type(error).__name__])[0]


def simulator() -> str:
    """Return the version of the simulator, empty for the vendor's runtime."""
    try:
        version = getattr(ctypes.CDLL(RUNTIME), SIMULATOR_SYMBOL)
    except (OSError, AttributeError):
        return ""
    version.restype = ctypes.c_char_p
    text: bytes = version()
    return text.decode()


def ask() -> dict[str, Any]:
    """Return what torch_npu tells, as plain data."""
    importlib.import_module("torch")
    torch_npu: Any = importlib.import_module("torch_npu")
    native, npu = torch_npu._C, torch_npu.npu
    count, count_error = answer_of(npu.device_count)
    name, name_error = answer_of(lambda: npu.get_device_name(0)) if count else ("", "")
    soc, soc_error = answer_of(native._npu_get_soc_version) if count else (None, "")
    inf_nan, inf_nan_error = answer_of(native._npu_is_support_inf_nan) if count else (None, "")
    cann, _ = answer_of(lambda: npu.utils.get_cann_version("CANN"))
    driver, _ = answer_of(lambda: npu.utils.get_cann_version("DRIVER"))
    return {
        "count": count or 0,
        "name": name or "",
        "soc": soc,
        "inf_nan": inf_nan,
        "error": next(filter(None, (count_error, name_error, soc_error, inf_nan_error)), ""),
        "cann": cann or "",
        "driver": driver or "",
        "simulator": simulator(),
    }


if __name__ == "__main__":
    print(MARK + json.dumps(ask()), flush=True)
