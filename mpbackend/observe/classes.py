"""The five classes of a run as they are held: parameters, activations, gradients, optimizer state, communication."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from mpbackend.observe.memory import state_tensors, tensor_bytes


def observed_classes(
    model: torch.nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    activations: Mapping[str, int],
    *,
    gradients: Iterable[torch.Tensor] = (),
    state: Iterable[torch.Tensor] = (),
) -> dict[str, dict[str, int]]:
    """Return the bytes of the five classes by format, of the tensors that are held now; call it before gradients are cleared.

    Args:
        model: the model.
        optimizers: one or several. A tensor that one of them updates and that is no parameter of the model (an fp32 copy) counts as optimizer state, as in
            arXiv 1910.02054, section 3.
        activations: ``SavedActivations.bytes`` of the step.
        gradients: gradients held elsewhere than in ``grad``.
        state: state held elsewhere than in ``Optimizer.state``.

    Returns:
        Class to format to bytes. ``communication`` is empty in a single process and ``{"unknown": 0}`` in a group, whose traffic is not seen here.
    """
    several = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    parameters = list(model.parameters())
    own = {id(parameter) for parameter in parameters}
    updated = [parameter for optimizer in several for group in optimizer.param_groups for parameter in group["params"]]
    masters = [parameter for parameter in updated if id(parameter) not in own]
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    return {
        "parameters": tensor_bytes(parameters),
        "activations": dict(activations),
        "gradients": tensor_bytes([*(tensor.grad for tensor in (*parameters, *masters) if tensor.grad is not None), *gradients]),
        "optimizer state": tensor_bytes(
            [
                *(master for master in masters if is_held(master)),
                *(tensor for optimizer in several for tensor in state_tensors(optimizer)),
                *state,
            ]
        ),
        "communication": {"unknown": 0} if distributed else {},
    }


def is_held(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has memory for its elements: no storage of 0 bytes, and not one element that stands for all of them, as a released copy has."""
    return tensor.untyped_storage().nbytes() > 0 and (tensor.numel() < 2 or any(tensor.stride()))
