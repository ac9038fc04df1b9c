"""What changes the arithmetic on an NPU besides the switches: versions and variables, for the record. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping

DISTRIBUTION = "mpbackend-ascend"

VARIABLES = (
    "ACL_OP_INIT_MODE",
    "ACL_PRECISION_MODE",
    "ASCEND_LAUNCH_BLOCKING",
    "ASCEND_RT_VISIBLE_DEVICES",
    "CLOSE_MATMUL_K_SHIFT",
    "FORCE_OVERFLOW_CHECK",
    "HCCL_ALGO",
    "HCCL_DETERMINISTIC",
    "HCCL_OP_EXPANSION_MODE",
    "INF_NAN_MODE_ENABLE",
    "INF_NAN_MODE_FORCE_DISABLE",
    "LCCL_DETERMINISTIC",
    "PYTORCH_NPU_ALLOC_CONF",
    "TASK_QUEUE_ENABLE",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "TORCH_TRANSFER_TO_NPU",
)
"""Variables of torch_npu, CANN and HCCL that choose formats, the overflow mode, routes, the order of sums, or who answers for the device."""


def environment(versions: Mapping[str, str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the versions of a device and of this plugin, and the variables that are set.

    Args:
        versions: what discovery found on the device.
        environ: the environment; the process's own when omitted.
    """
    variables = os.environ if environ is None else environ
    return {DISTRIBUTION: importlib.metadata.version(DISTRIBUTION), **versions} | {name: variables[name] for name in VARIABLES if name in variables}
