"""Run the real Python layer of Transformer Engine without its libraries, and print what was found as JSON.

Its compiled extension, Triton and ONNX are replaced by modules that answer anything; its linear layer, its autocast and its delayed scaling are then what the
release ships, on the CPU. No product runs. For a process of its own: it changes torch.
"""

from __future__ import annotations

import enum
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

os.environ |= {"NVTE_PROJECT_BUILDING": "1", "NVTE_TORCH_COMPILE": "0", "NVTE_UNFUSED_FP8_UPDATE": "1"}
warnings.simplefilter("ignore")

import torch  # noqa: E402 - after the variables that Transformer Engine reads when it is imported

EXTENSION = "transformer_engine_torch"
OTHERS = frozenset({"triton", "onnxscript", "onnx", "einops", "nvdlfw_inspect", "cutlass"})

ENUMS = {
    "DType": {"kByte": 0, "kInt32": 1, "kFloat32": 2, "kFloat16": 3, "kBFloat16": 4, "kFloat8E4M3": 5, "kFloat8E5M2": 6, "kFloat4E2M1": 7},
    "FP8FwdTensors": {f"GEMM{number}_{name}": 3 * number + place - 3 for number in (1, 2, 3) for place, name in enumerate(("INPUT", "WEIGHT", "OUTPUT"))},
    "FP8BwdTensors": {f"GRAD_{name}{number}": 2 * number + place - 2 for number in (1, 2, 3) for place, name in enumerate(("OUTPUT", "INPUT"))},
    "NVTE_Fused_Attn_Backend": {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2},
}
"""Enumerations of the extension whose members the Python layer compares with its own."""


class Anything(types.ModuleType):
    """A module that has every attribute."""

    __path__: list[str] = []  # noqa: RUF012 - what makes a module a package
    __version__ = "3.4.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module that has every attribute in the place of each one that is missing."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in OTHERS else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def load() -> tuple[Any, Any, Any]:
    """Return the modules ``pytorch``, ``common.recipe`` and ``pytorch.quantization``."""
    extension = Anything(EXTENSION)
    for name, members in ENUMS.items():
        setattr(extension, name, enum.IntEnum(name, members))
    sys.modules[EXTENSION] = extension
    sys.meta_path.append(Finder())
    common: Any = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda *_: None
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    engine = importlib.import_module("transformer_engine.pytorch")
    quantization: Any = importlib.import_module("transformer_engine.pytorch.quantization")
    quantization.check_fp8_support = lambda: (True, "")
    quantization.FP8GlobalStateManager.is_fp8_available = classmethod(lambda cls: (True, ""))
    torch.set_autocast_enabled("cuda", True)
    return engine, importlib.import_module("transformer_engine.common.recipe"), quantization


def main() -> None:
    """Print what was found."""
    from mpbackend.lowbit import low_bit
    from mpbackend.recipe import parse_recipe
    from mpbackend_cuda.execution import EngineExecution, read_window, windows
    from mpbackend_cuda.te_convert import convert_model, restore_plain
    from mpbackend_cuda.te_recipes import lower

    engine, recipes, quantization = load()
    found: dict[str, Any] = {}
    for text in ("fp8", "fp8-delayed"):
        low = low_bit(parse_recipe(text))
        lowered = lower(low, recipes)
        execution = EngineExecution(engine.autocast, lowered.recipe, delayed=low.mode == "delayed")
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 48, bias=False), torch.nn.Linear(48, 10))
        plain_keys = list(model.state_dict())
        before = {name: id(parameter) for name, parameter in model.named_parameters()}
        inp = torch.randn(5, 32)
        expected = model(inp)
        rows = convert_model(model, low, lowered, engine.Linear, execution, 4)
        layer: Any = model[0]
        loaded = model.load_state_dict(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 48, bias=False), torch.nn.Linear(48, 10)).state_dict())
        found[text] = {
            "actions": [row["action"] for row in rows],
            "is a layer of Transformer Engine": isinstance(layer, engine.Linear) and not isinstance(layer, torch.nn.Linear),
            "same parameters": before == {name: id(parameter) for name, parameter in model.named_parameters()},
            "loads plain weights": not loaded.missing_keys and not loaded.unexpected_keys,
            "more keys": sorted(set(model.state_dict()) - set(plain_keys)),
            "same outside": expected.shape == model(inp).shape,
            "region": list(regions(execution, quantization)),
            "restored": restore_plain(model),
        }
    low = low_bit(parse_recipe("fp8-delayed:scaling.history=4,scaling.margin=1"))
    for algorithm in ("max", "most_recent"):
        found[algorithm] = streams(low, algorithm, engine, recipes, quantization)
    assert read_window(torch.nn.Linear(1, 1)) == windows(torch.nn.Linear(1, 1)) == {}
    print(json.dumps(found))


def regions(execution: Any, quantization: Any) -> Iterator[bool]:
    """Yield whether Transformer Engine is on: before a session's context, in it before and after the first layer, and after it."""
    manager = quantization.FP8GlobalStateManager
    yield manager.is_fp8_enabled()
    with execution.context():
        yield manager.is_fp8_enabled()
        execution.enter()
        yield manager.is_fp8_enabled()
    yield manager.is_fp8_enabled()


def streams(low: Any, algorithm: str, engine: Any, recipes: Any, quantization: Any) -> list[bool]:
    """Return, for each step of a stream of amaxes, whether Transformer Engine and the plain lowering of the core end it with the same scales."""
    import msgspec

    from mpbackend.train.reference import AmaxWindow
    from mpbackend_cuda.execution import EngineExecution, read_window
    from mpbackend_cuda.te_convert import convert_model
    from mpbackend_cuda.te_recipes import lower

    low = msgspec.structs.replace(low, algorithm=algorithm)
    lowered = lower(low, recipes)
    execution = EngineExecution(engine.autocast, lowered.recipe, delayed=True)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64))
    convert_model(model, low, lowered, engine.Linear, execution, 1)
    layer: Any = model[0]
    for name, mode, count in (("scaling_fwd", "forward", 3), ("scaling_bwd", "backward", 2)):
        layer.fp8_meta[name] = quantization.DelayedScalingRecipeState(lowered.recipe, mode=mode, num_quantizers=count, device=torch.device("cpu"))
    layer.fp8_meta["recipe"] = lowered.recipe
    window = AmaxWindow(3, low.window, low.algorithm)
    same = []
    for step in range(10):
        amaxes = torch.tensor([100.0 if step == 1 else 1.0 + step, 0.0 if step == 3 else 2.0, 0.5 / (step + 1)])
        with execution.context():
            execution.enter()
            quantization.FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(layer.fp8_meta)
            layer.fp8_meta["scaling_fwd"].amax_history[0].copy_(amaxes)
        window.push(amaxes)
        scales = read_window(layer)["scaling_fwd.scale"]
        same.append(torch.equal(scales, 448.0 / window.present / 2.0**low.margin))
    quantization.FP8GlobalStateManager.reset()
    return same


if __name__ == "__main__":
    main()
