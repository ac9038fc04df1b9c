"""Global switches of torch itself, which it has on every device; a backend adds those of its own."""

from __future__ import annotations

import torch

from mpbackend.backend import Switch

DETERMINISM = ("default", "warn", "error")
"""The words of ``torch.set_deterministic_debug_mode``, by number."""

DETERMINISTIC = Switch(
    name="deterministic",
    get=lambda: DETERMINISM[torch.get_deterministic_debug_mode()],
    set=torch.set_deterministic_debug_mode,
    allowed=DETERMINISM,
    meaning="operators without a deterministic algorithm warn or raise",
)

ENCODER_FASTPATH = Switch(
    name="mha.fastpath",
    get=lambda: str(torch.backends.mha.get_fastpath_enabled()).lower(),
    set=lambda value: torch.backends.mha.set_fastpath_enabled(value == "true"),
    allowed=("true", "false"),
    meaning="the fused inference path of nn.TransformerEncoderLayer, which autocast does not reach",
)
"""Off under a 16-bit recipe: evaluation would silently compute in fp32 what training computes in 16 bits."""
