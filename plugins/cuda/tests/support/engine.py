"""A stand-in for Transformer Engine that records how it is called and computes on the CPU.

It keeps the habits that matter to a caller of release 2.20: recipes drop unknown arguments, scales of current scaling are rounded as class attributes say,
layers want a GPU, refuse misaligned shapes in all three products, keep a quantized weight on request, and pickle the state of delayed scaling.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

import torch
from torch.nn import functional

KindT = TypeVar("KindT", bound=type)


class Format(Enum):
    """Formats, each with its largest value forward and backward."""

    E2M1 = (6, 6)
    E4M3 = (448, 448)
    HYBRID = (448, 57344)


@dataclasses.dataclass(frozen=True)
class MMParams:
    """Accumulation of a product."""

    use_split_accumulator: bool = True


@dataclasses.dataclass(frozen=True)
class QParams:
    """Rounding of scales."""

    power_2_scale: bool = False


def lenient(kind: KindT) -> KindT:
    """Make a dataclass whose constructor drops arguments that it does not know."""
    made: Any = dataclasses.dataclass(kind)
    strict: Callable[..., None] = made.__init__
    known = {field.name for field in dataclasses.fields(made)}

    def init(self: Any, **values: Any) -> None:
        strict(self, **{name: value for name, value in values.items() if name in known})

    made.__init__ = init
    result: KindT = made
    return result


@lenient
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False


@lenient
class Float8CurrentScaling:
    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp = QParams()
    fp8_quant_fwd_weight = QParams()
    fp8_quant_bwd_grad = QParams()
    fp8_gemm_fprop: MMParams = MMParams(False)
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_dpa: bool = True
    backward_override: str | None = "high_precision"


@lenient
class Float8BlockScaling:
    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    fp8_quant_fwd_inp = QParams(True)
    fp8_quant_fwd_weight = QParams(True)
    fp8_quant_bwd_grad = QParams(True)
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams()
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()

    def __post_init__(self) -> None:
        assert self.fp8_gemm_fprop.use_split_accumulator, "Split accumulator required for fprop."


@lenient
class MXFP8BlockScaling:
    margin: int = 0
    fp8_format: Format = Format.E4M3


@lenient
class NVFP4BlockScaling:
    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3


@dataclasses.dataclass
class Window:
    """State of delayed scaling of one direction: three tensors (input, weight, output) forward, two backward."""

    scale: torch.Tensor
    amax_history: torch.Tensor


@dataclasses.dataclass
class Call:
    """One forward pass of a layer: tokens, whether low-bit, and what it was told about micro-batches."""

    tokens: int
    low_bit: bool
    first: bool | None


class Engine:
    """The state of the process, what was called, and the modules.

    Attributes:
        calls: forward passes of layers.
        regions: arguments of each region that was entered.
        depth: regions that are open.
        windows: forward windows that the end of a region updates.
        multiple: what the sides of every product must be a multiple of.
    """

    def __init__(self, multiple: int = 16) -> None:
        self.calls: list[Call] = []
        self.regions: list[dict[str, Any]] = []
        self.depth = 0
        self.enabled = False
        self.recipe: Any = None
        self.windows: list[Window] = []
        self.multiple = multiple
        self.pytorch = self._modules()
        self.recipes = types.ModuleType("transformer_engine.common.recipe")
        vars(self.recipes).update({kind.__name__: kind for kind in (Format, MMParams, QParams, DelayedScaling, Float8CurrentScaling, Float8BlockScaling)})
        vars(self.recipes).update({kind.__name__: kind for kind in (MXFP8BlockScaling, NVFP4BlockScaling)})

    def _modules(self) -> types.ModuleType:
        engine = self

        class Autocast:
            """A region; entered once at a time."""

            def __init__(self, enabled: bool = True, calibrating: bool = False, recipe: Any = None, amax_reduction_group: Any = None) -> None:
                self._arguments = {"enabled": enabled, "calibrating": calibrating, "recipe": recipe, "amax_reduction_group": amax_reduction_group}
                self._before: tuple[bool, Any] | None = None

            def __enter__(self) -> None:
                assert self._before is None, "entered more than once concurrently"
                self._before = (engine.enabled, engine.recipe)
                engine.enabled, engine.recipe = self._arguments["enabled"], self._arguments["recipe"]
                engine.depth += 1
                engine.regions.append(self._arguments)

            def __exit__(self, *error: object) -> None:
                assert self._before is not None
                (engine.enabled, engine.recipe), self._before = self._before, None
                engine.depth -= 1
                if engine.depth == 0 and torch.is_grad_enabled():
                    engine.update_windows()

        class Linear(torch.nn.Module):
            """A linear layer; a subclass of nothing that torch knows."""

            def __init__(self, in_features: int, out_features: int, bias: bool = True, params_dtype: Any = None, device: str = "cuda") -> None:
                super().__init__()
                if not torch.cuda.is_available():
                    raise RuntimeError("TransformerEngine needs CUDA.")
                self.in_features, self.out_features = in_features, out_features
                self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
                if bias:
                    self.bias: Any = torch.nn.Parameter(torch.empty(out_features, dtype=params_dtype, device=device))
                else:
                    self.bias = torch.empty(0, device=device)
                self.fp8_meta: dict[str, Any] = {}
                self.kept: torch.Tensor | None = None

            def init_fp8_metadata(self, num_gemms: int = 1) -> None:
                """Make the windows of delayed scaling, once."""
                if engine.enabled and isinstance(engine.recipe, DelayedScaling) and "scaling_fwd" not in self.fp8_meta:
                    for name, count in (("scaling_fwd", 3 * num_gemms), ("scaling_bwd", 2 * num_gemms)):
                        self.fp8_meta[name] = Window(torch.ones(count), torch.zeros(engine.recipe.amax_history_len, count))
                    engine.windows.append(self.fp8_meta["scaling_fwd"])

            def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
                """Multiply, and record the call."""
                tokens = inp.numel() // inp.shape[-1]
                engine.calls.append(Call(tokens, engine.enabled, is_first_microbatch))
                self.init_fp8_metadata()
                if engine.enabled and any(side % engine.multiple for side in (tokens, self.in_features, self.out_features)):
                    raise ValueError(f"product of sides {tokens}, {self.in_features}, {self.out_features}: not divisible by {engine.multiple}")
                if window := self.fp8_meta.get("scaling_fwd"):
                    window.amax_history[0, 0] = inp.detach().abs().amax()
                    window.amax_history[0, 1] = self.weight.detach().abs().amax()
                weight: torch.Tensor = self.weight
                if is_first_microbatch is not None:
                    if is_first_microbatch or self.kept is None:
                        self.kept = weight.detach().clone()
                    weight = weight + (self.kept - weight).detach()
                return functional.linear(inp, weight, self.bias if self.bias.numel() else None)

            def get_extra_state(self) -> torch.Tensor:
                """Return a pickle for delayed scaling, else nothing."""
                return torch.full((7,), 128, dtype=torch.uint8) if self.fp8_meta else torch.empty(0, dtype=torch.uint8)

            def set_extra_state(self, state: torch.Tensor) -> None:
                """Refuse a pickle."""
                if state.numel():
                    raise RuntimeError("Refusing to load pickled Transformer Engine extra state")

        module = types.ModuleType("transformer_engine.pytorch")
        vars(module).update({"autocast": Autocast, "Linear": Linear})
        for name in ("is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available", "is_nvfp4_available"):
            setattr(module, name, lambda return_reason=False: (True, "") if return_reason else True)
        return module

    def update_windows(self) -> None:
        """Make a scale of each window, and move the window on."""
        for window in self.windows:
            amax = window.amax_history.amax(0)
            window.scale.copy_(torch.where(amax > 0, 448 / amax, window.scale))
            window.amax_history.copy_(window.amax_history.roll(-1, 0))
            window.amax_history[0].zero_()
