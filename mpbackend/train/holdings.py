"""What the optimizers hold: shadows in the place of 16-bit parameters, everything else as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from mpbackend.errors import SessionError
from mpbackend.roles import MasterKind
from mpbackend.train.casting import Casting, short
from mpbackend.train.edits import follow_masters, void_terms
from mpbackend.train.kept import PARTS
from mpbackend.train.moments import Moments, settle
from mpbackend.train.shadow import Round, Shadow


class Holdings:
    """The parameters of several optimizers, looked up freshly: a group may be added between two steps.

    Args:
        model: the model; tensors that are no parameters of it stay as they are.
        optimizers: the optimizers, changed in place.
        casting: what was cast, and casts a parameter that comes later.
        moments: formats of the state that moves with a parameter.
        dtype: the working format.
        master: what keeps the lost bits; None where the optimizers update 16-bit parameters by themselves and there are no shadows.
        sums: whether gradients are summed in fp32 as they arrive.
        rounding: rounds updated weights; None for to nearest.

    Attributes:
        shadows: by the id of the parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        casting: Casting,
        moments: Moments,
        *,
        dtype: torch.dtype,
        master: MasterKind | None,
        sums: bool,
        rounding: Round | None,
    ) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)
        self._casting = casting
        self._moments = moments
        self._dtype = dtype
        self._master = master
        self._sums = sums
        self._rounding = rounding
        self._names: dict[int, str] = {}
        self._held: dict[int, Tensor | Shadow] = {}
        self._kinds: dict[int, tuple[Tensor, torch.dtype, torch.device]] = {}
        self.shadows: dict[int, Shadow] = {}

    def refresh(self) -> None:
        """Take over parameters that the optimizers hold and did not hold before.

        Raises:
            SessionError: one stands twice.
        """
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                held = group["params"]
                for index, tensor in enumerate(held):
                    if id(tensor) not in self._held:
                        held[index] = self._adopt(optimizer, tensor)

    def _adopt(self, optimizer: torch.optim.Optimizer, tensor: Tensor) -> Tensor:
        """Return what an optimizer is to hold in the place of a tensor, its state moved there."""
        if id(tensor) in self.shadows:
            found = f"parameter {self.shadows[id(tensor)].name} is held twice by the optimizers"
            raise SessionError("working weights", found=found, remedy="give each parameter to one group of one optimizer")
        low = self._dtype != torch.float32 and tensor.is_floating_point() and not self._casting.keeps(tensor)
        name = self._name(tensor) if low else None
        if name is not None and tensor.dtype != self._dtype:
            self._casting.cast(tensor, self._dtype)
        self._kinds[id(tensor)] = (tensor, tensor.dtype, tensor.device)
        if name is None or self._master is None:
            self._held[id(tensor)] = tensor
            return tensor
        original = self._casting.originals[id(tensor)][1] if id(tensor) in self._casting.originals else None
        shadow = Shadow(name, tensor, original, self._master, sums=self._sums, rounding=self._rounding)
        self._held[id(shadow.tensor)] = self.shadows[id(tensor)] = shadow
        if tensor in optimizer.state:
            state = optimizer.state.pop(tensor)
            self._moments.widen(state, torch.float32)
            optimizer.state[shadow.tensor] = state
        return shadow.tensor

    def _name(self, tensor: Tensor) -> str | None:
        """Return the name of a parameter of the model; None for any other tensor."""
        if id(tensor) not in self._names:  # a module may have been added since
            self._names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        return self._names.get(id(tensor))

    def shadow(self, tensor: Tensor) -> Shadow | None:
        """Return the shadow that an optimizer's tensor belongs to; None for one that stands for itself."""
        held = self._held.get(id(tensor))
        return held if isinstance(held, Shadow) else None

    def source(self, tensor: Tensor) -> Tensor:
        """Return the tensor whose ``grad`` holds the gradient sum of a tensor that an optimizer holds."""
        shadow = self.shadow(tensor)
        return tensor if shadow is None else shadow.source

    def sources(self) -> Iterator[Tensor]:
        """Yield the source of every tensor that the optimizers hold, once for each place."""
        self.refresh()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for tensor in group["params"]:
                    shadow = self.shadow(tensor)
                    if shadow is None:
                        yield tensor
                    else:
                        shadow.collect()
                        yield shadow.source

    def others(self) -> int:
        """Return how many tensors the optimizers hold that are no parameters of the model."""
        own = {id(parameter) for parameter in self._model.parameters()}
        return sum(1 for held in self._held.values() if isinstance(held, Tensor) and id(held) not in own)

    def check_kinds(self, asked: str) -> None:
        """Check that what the optimizers hold is still in the format and on the device that it had when the session took it.

        Raises:
            SessionError: somebody cast or moved the model; names the first parameter.
        """
        for tensor, dtype, device in self._kinds.values():
            if tensor.dtype != dtype or tensor.device != device:
                name = self._name(tensor)
                told = f"a tensor of shape {tuple(tensor.shape)}" if name is None else f"parameter {name}"
                found = f"{told} is {short(tensor.dtype)} on {tensor.device}, the session has it in {short(dtype)} on {device}"
                raise SessionError(asked, found=found, remedy="do not cast or move the model before close(); a recipe says the format of parameters")

    def follow(self, shadows: Sequence[Shadow]) -> None:
        """Follow parameters that somebody else wrote: what is kept of another value is void. See ``mpbackend.train.edits``.

        Args:
            shadows: of parameters that passed ``check_kinds``.
        """
        if self._master == "fp32":
            follow_masters([shadow.tensor for shadow in shadows], [shadow.parameter for shadow in shadows], self._dtype)
        elif self._master == "kahan":
            void_terms([term for shadow in shadows if (term := shadow.compensation) is not None], [shadow.parameter for shadow in shadows])

    @torch.no_grad()
    def follow_all(self) -> None:
        """Follow every parameter, also one that was cast or moved; one of another shape is left to whoever wrote it."""
        for shadow in self.shadows.values():
            if shadow.parameter.shape != shadow.tensor.shape:
                continue
            written = shadow.parameter.detach().to(shadow.tensor.device)
            if shadow.persistent:
                follow_masters([shadow.tensor], [written], self._dtype)
            elif shadow.compensation is not None:
                void_terms([shadow.compensation], [written.to(self._dtype)])

    def kept(self) -> dict[str, dict[str, Tensor]]:
        """Return masters and Kahan terms by the parameter's name; see ``mpbackend.train.kept``."""
        shadows = list(self.shadows.values())
        masters = {shadow.name: shadow.tensor.detach() for shadow in shadows if shadow.persistent}
        terms = {shadow.name: shadow.compensation for shadow in shadows if shadow.compensation is not None}
        return dict(zip(PARTS, (masters, terms), strict=True))

    def give_back(self) -> None:
        """Stop summing, and give the optimizers the parameters and their state back."""
        for shadow in self.shadows.values():
            shadow.close()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["params"] = [tensor if (found := self.shadow(tensor)) is None else found.parameter for tensor in group["params"]]
            for shadow in self.shadows.values():
                if shadow.tensor in optimizer.state:
                    optimizer.state[shadow.parameter] = optimizer.state.pop(shadow.tensor)

    def settle(self) -> None:
        """Cast moments to the format of their parameters where that loses nothing; see ``mpbackend.train.moments.settle``."""
        for optimizer in self._optimizers:
            for parameter in list(optimizer.state):
                settle(optimizer.state, parameter)
