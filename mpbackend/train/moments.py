"""The formats of an optimizer's moments: as the recipe says between steps, as the arithmetic needs during one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mpbackend.formats import FORMATS
from mpbackend.recipe import Recipe

FIRST = frozenset(["exp_avg", "momentum_buffer", "grad_avg", "exp_avg_diff"])
"""Keys of optimizer state that hold first moments."""

SECOND = frozenset(["exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf", "variance", "row_var", "col_var", "acc_delta"])
"""Keys that hold sums and averages of squares, whole or by rows and columns: those of ``torch.optim`` and of common optimizers in its manner."""


class Moments:
    """Casts the state of one parameter.

    Args:
        recipe: the recipe; ``optimizer.exp_avg`` and ``optimizer.exp_avg_sq`` are the formats between steps.
    """

    def __init__(self, recipe: Recipe) -> None:
        first, second = (dtype_of(name) for name in (recipe.optimizer.exp_avg, recipe.optimizer.exp_avg_sq))
        self._dtypes = dict.fromkeys(FIRST, first) | dict.fromkeys(SECOND, second)
        self._both = {first, second}

    def differ(self, dtype: torch.dtype) -> bool:
        """Tell whether some moment is kept in another format than arithmetic in ``dtype`` makes it."""
        return self._both != {dtype}

    def widen(self, state: dict[str, Any], dtype: torch.dtype) -> None:
        """Cast what is floating in a state to the format of the arithmetic, counters left alone."""
        for key, value in state.items():
            if key != "step" and isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype:
                state[key] = value.to(dtype)

    def narrow(self, state: dict[str, Any]) -> None:
        """Cast the moments in a state to the recipe's formats, to nearest, ties to even; other state keeps the format of the arithmetic."""
        for key, dtype in self._dtypes.items():
            value = state.get(key)
            if isinstance(value, Tensor) and value.dtype != dtype:
                state[key] = value.to(dtype)


def settle(state: Mapping[Any, dict[str, Any]], parameter: Tensor) -> None:
    """Cast moments to the format of their parameter where that loses nothing, so that its optimizer updates it without a session.

    Moments that are wider than the parameter stay: a later session goes on from them.
    """
    for key, value in state.get(parameter, {}).items():
        if key != "step" and isinstance(value, Tensor) and value.is_floating_point() and torch.promote_types(value.dtype, parameter.dtype) == parameter.dtype:
            state[parameter][key] = value.to(parameter.dtype)


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of a format that tensors are stored in."""
    dtype: torch.dtype = getattr(torch, str(FORMATS[name].torch_dtype))
    return dtype
