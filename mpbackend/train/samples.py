"""Small arguments for any operator of torch, so that it can be run to see which formats it works in.

Most are made from the operator's schema; the table holds those whose operands must fit each other. Values keep every operator in its domain: square operands
are positive definite, all elements are between 0 and 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

Arguments = tuple[list[Any], dict[str, Any]]
"""Positional and named arguments."""

SIDE = 4
"""Length of most dimensions."""

SCALARS: Mapping[str, Any] = {
    "dim": 0,
    "exponent": 3,
    "interpolation_mode": 0,
    "n_fft": SIDE,
    "normalized_shape": [SIDE],
    "num_groups": 2,
    "output_padding": 0,
    "output_size": 3,
    "p": 2,
    "padding": 0,
    "padding_mode": 0,
    "q": 0.5,
    "quant_max": 127,
    "quant_min": 0,
    "self": 3,
    "zero_point": 0,
}
"""Values of arguments by name; what is not here is 1 or False. A number fills a list of its length."""

TEXTS: Mapping[str, str] = {"p": "fro"}
"""Values of texts by name; what is not here is empty."""


class Maker:
    """Makes operands.

    Args:
        device: where.
        dtype: format of floating-point operands.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    def real(self, *shape: int) -> torch.Tensor:
        """Return a floating-point operand: 1/8 everywhere, 5/8 on the diagonal of square matrices, exact in 16 bits."""
        values = torch.full(shape, 0.125, dtype=self.dtype, device=self.device)
        if len(shape) > 1 and shape[-1] == shape[-2]:
            values = values + torch.eye(shape[-1], dtype=self.dtype, device=self.device) * 0.5
        return values

    def whole(self, *shape: int, value: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Return an integer operand: indices or classes."""
        return torch.full(shape, value, dtype=dtype, device=self.device)


def batch(m: Maker, n: int) -> torch.Tensor:
    """Return one sample of two channels with ``n`` spatial dimensions."""
    return m.real(1, 2, *[SIDE] * n)


FITTING: Mapping[str, Callable[[Maker], list[Any]]] = {
    "_grid_sampler_2d_cpu_fallback": lambda m: [batch(m, 2), m.real(1, 4, 4, 2), 0, 0, False],
    "_native_multi_head_attention": lambda m: [*[m.real(1, 4, 4)] * 3, 4, 2, m.real(12, 4), m.real(12), m.real(4, 4), m.real(4)],
    "_scaled_dot_product_flash_attention": lambda m: [m.real(1, 2, 4, 8)] * 3,
    "_thnn_fused_gru_cell": lambda m: [m.real(4, 12), m.real(4, 12), m.real(4, 4)],
    "_thnn_fused_lstm_cell": lambda m: [m.real(4, 16), m.real(4, 16), m.real(4, 4)],
    "addbmm": lambda m: [m.real(4, 4), m.real(2, 4, 4), m.real(2, 4, 4)],
    "addmv": lambda m: [m.real(4), m.real(4, 4), m.real(4)],
    "addr": lambda m: [m.real(4, 4), m.real(4), m.real(4)],
    "baddbmm": lambda m: [m.real(2, 4, 4)] * 3,
    "batch_norm": lambda m: [m.real(4, 4), *[m.real(4)] * 4, True, 0.1, 1e-5, False],
    "bilinear": lambda m: [m.real(4, 4), m.real(4, 4), m.real(2, 4, 4)],
    "bmm": lambda m: [m.real(2, 4, 4)] * 2,
    "conv_tbc": lambda m: [m.real(4, 1, 2), m.real(1, 2, 2), m.real(2)],
    "cosine_embedding_loss": lambda m: [m.real(4, 4), m.real(4, 4), m.whole(4, value=1)],
    "cross": lambda m: [m.real(4, 3), m.real(4, 3), 1],
    "cross_entropy_loss": lambda m: [m.real(4, 4), m.whole(4)],
    "ctc_loss.IntList": lambda m: [m.real(4, 1, 3), m.whole(1, 2, value=1), [4], [2]],
    "ctc_loss.Tensor": lambda m: [m.real(4, 1, 3), m.whole(1, 2, value=1), m.whole(1, value=4), m.whole(1, value=2)],
    "dot": lambda m: [m.real(4)] * 2,
    "einsum": lambda m: ["ij,jk->ik", [m.real(4, 4)] * 2],
    "fractional_max_pool2d": lambda m: [batch(m, 2), [2] * 2, [2] * 2, m.real(1, 2, 2)],
    "fractional_max_pool3d": lambda m: [batch(m, 3), [2] * 3, [2] * 3, m.real(1, 2, 3)],
    "grid_sampler": lambda m: [batch(m, 2), m.real(1, 4, 4, 2), 0, 0, False],
    "grid_sampler_2d": lambda m: [batch(m, 2), m.real(1, 4, 4, 2), 0, 0, False],
    "grid_sampler_3d": lambda m: [batch(m, 3), m.real(1, 4, 4, 4, 3), 0, 0, False],
    "gru_cell": lambda m: [m.real(4, 4), m.real(4, 4), m.real(12, 4), m.real(12, 4)],
    "index_copy": lambda m: [m.real(4, 4), 0, m.whole(4), m.real(4, 4)],
    "index_put": lambda m: [m.real(4, 4), [m.whole(4)], m.real(4, 4)],
    "linalg_householder_product": lambda m: [m.real(4, 4), m.real(4)],
    "linalg_tensorinv": lambda m: [m.real(4, 4), 1],
    "linalg_tensorsolve": lambda m: [m.real(4, 4), m.real(4)],
    "lstm_cell": lambda m: [m.real(4, 4), [m.real(4, 4)] * 2, m.real(16, 4), m.real(16, 4)],
    "lu_solve": lambda m: [m.real(4, 4), m.real(4, 4), m.whole(4, value=1, dtype=torch.int32)],
    "max_unpool2d": lambda m: [m.real(1, 2, 2, 2), m.whole(1, 2, 2, 2), [4] * 2],
    "max_unpool3d": lambda m: [m.real(1, 2, 2, 2, 2), m.whole(1, 2, 2, 2, 2), [4] * 3, [2] * 3, [0] * 3],
    "mkldnn_rnn_layer": lambda m: [
        *(m.real(3, 2, 4), m.real(16, 4), m.real(16, 4), m.real(16), m.real(16), m.real(1, 2, 4), m.real(1, 2, 4)),
        *(False, [], 2, 4, 1, True, False, False, False),
    ],
    "multi_margin_loss": lambda m: [m.real(4, 4), m.whole(4)],
    "multilabel_margin_loss": lambda m: [m.real(4, 4), m.whole(4, 4)],
    "multilabel_margin_loss_forward": lambda m: [m.real(4, 4), m.whole(4, 4), 1],
    "mv": lambda m: [m.real(4, 4), m.real(4)],
    "nanquantile": lambda m: [m.real(4, 4), m.real(2)],
    "nll_loss": lambda m: [m.real(4, 4), m.whole(4)],
    "nll_loss2d": lambda m: [batch(m, 2), m.whole(1, 4, 4)],
    "orgqr": lambda m: [m.real(4, 4), m.real(4)],
    "ormqr": lambda m: [m.real(4, 4), m.real(4), m.real(4, 4)],
    "prelu": lambda m: [m.real(4, 4), m.real(4)],
    "quantile": lambda m: [m.real(4, 4), m.real(2)],
    "scaled_dot_product_attention": lambda m: [m.real(1, 2, 4, 8)] * 3,
    "scatter_add": lambda m: [m.real(4, 4), 0, m.whole(4, 4), m.real(4, 4)],
    "stft": lambda m: [m.real(8), 4, None, None, m.real(4), False, True, True],
    "stft.center": lambda m: [m.real(8), 4, None, None, m.real(4), True, "reflect", False, True, True],
    "vdot": lambda m: [m.real(4)] * 2,
    "view_as_complex": lambda m: [m.real(4, 2)],
}
"""Operands that must fit each other, by operator without its namespace; an operator whose overloads take other arguments has an entry for each."""


def sample(op: Any, device: torch.device, dtype: torch.dtype) -> Arguments:
    """Return arguments for an operator.

    Args:
        op: an overload of ``torch.ops``.
        device: where its operands are.
        dtype: format of floating-point operands.
    """
    make = Maker(device, dtype)
    name = op._schema.name.partition("::")[2]
    overload = op._schema.overload_name
    fitting = FITTING.get(f"{name}.{overload}" if overload else name)
    if fitting is None and overload != "scalar":
        fitting = FITTING.get(name)
    if fitting is not None:
        return fitting(make), {}
    needed = [argument for argument in op._schema.arguments if not argument.has_default_value()]
    spatial = spatial_dimensions(name)
    positional = [fill(argument, spatial, make) for argument in needed if not argument.kwarg_only]
    return positional, {argument.name: fill(argument, spatial, make) for argument in needed if argument.kwarg_only}


def spatial_dimensions(name: str) -> int:
    """Return the spatial dimensions of an operator by its name: 2 for ``conv2d``, 0 where there are none. A convolution that does not say has 2."""
    found = re.search(r"([123])d|convolution", name)
    return int(found[1] or 2) if found else 0


def fill(argument: Any, spatial: int, make: Maker) -> Any:
    """Return a value for one argument of a schema.

    Args:
        argument: it; has no default.
        spatial: spatial dimensions of the operator.
        make: makes operands.
    """
    kind = str(argument.type)
    if kind == "Tensor":
        if not spatial:
            return make.real(SIDE, SIDE)
        return make.real(2, 2, *[1] * spatial) if argument.name == "weight" else batch(make, spatial)
    if kind == "List[Tensor]":
        return [make.real(SIDE, SIDE)] * 2
    if kind.startswith("Optional"):
        return None
    if kind == "str":
        return TEXTS.get(argument.name, "")
    value = SCALARS.get(argument.name, False if kind == "bool" else 1)
    if kind.startswith("List") and not isinstance(value, list):
        length = argument.N or spatial or 1
        return list(range(length)) if argument.name == "dim" else [value] * length
    return value
