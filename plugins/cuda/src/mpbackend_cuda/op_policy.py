"""What autocast does with each operator on a GPU, read from the header of the installed torch and checked against its dispatcher."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from mpbackend.backend import PolicyKind
from mpbackend.errors import BackendError
from mpbackend.train.policy import EXTRA, HEADER, sensitive_ops

AUTOCAST_KEY = "AutocastCUDA"
NAMESPACE = "aten::"

SECTIONS: Mapping[str, PolicyKind] = {"AT_FORALL_LOWER_PRECISION_FP": "lower", "AT_FORALL_PROMOTE": "promote"}
"""Lists of the header besides those that mean fp32."""

COMPILED: Mapping[str, PolicyKind] = {"binary_cross_entropy": "banned", "cudnn_convolution": "lower", "cudnn_convolution_transpose": "lower"}
"""Registered in ``aten/src/ATen/autocast_mode.cpp`` for CUDA beside the lists of the header."""

ENTRY = re.compile(r"_\(\s*(?P<name>\w+)\s*(?:,\s*(?P<overload>\w+)\s*)?\)")


class Comparison(NamedTuple):
    """The header against the dispatcher.

    Attributes:
        policy: operators that both have, with their policy.
        unregistered: operators of the header without an autocast kernel.
        unclassified: operators with an autocast kernel that no list names.
    """

    policy: dict[str, PolicyKind]
    unregistered: tuple[str, ...]
    unclassified: tuple[str, ...]


def op_policy() -> dict[str, PolicyKind]:
    """Return the policy of every operator that the installed torch has an autocast kernel for and whose policy is known."""
    return compare().policy


def compare() -> Comparison:
    """Compare the lists of the header with the kernels of the dispatcher. On torch 2.13 they are the same 119 operators.

    Raises:
        BackendError: the header is missing or holds no such list.
    """
    stated = dict(listed())
    registered = kernels()
    return Comparison(
        {name: stated[name] for name in sorted(stated.keys() & registered)},
        tuple(sorted(stated.keys() - registered)),
        tuple(sorted(registered - stated.keys())),
    )


def listed() -> Iterator[tuple[str, PolicyKind]]:
    """Yield each operator of the lists, as ``name`` or ``name.overload``, with its policy."""
    path = Path(torch.__file__).parent / HEADER
    for name in sensitive_ops(path):
        if name not in EXTRA:
            yield name, "fp32"
    text = path.read_text(encoding="utf-8")
    for section, kind in SECTIONS.items():
        body = re.search(rf"#define {section}\(_\)((?:.*\\\n)*.*)", text)
        entries = [".".join(filter(None, match.groups())) for match in ENTRY.finditer(body[1].replace("\\\n", " ") if body else "")]
        if not entries:
            raise BackendError("the autocast lists of the installed torch", found=f"{path.name} of torch {torch.__version__} has no list {section}")
        yield from ((name, kind) for name in entries)
    yield from COMPILED.items()


def kernels() -> set[str]:
    """Return the operators of aten that have an autocast kernel for CUDA. A build of torch without CUDA has them too."""
    found = (name for name in torch._C._dispatch_get_all_op_names() if torch._C._dispatch_has_kernel_for_dispatch_key(name, AUTOCAST_KEY))
    return {name.removeprefix(NAMESPACE) for name in found if name.startswith(NAMESPACE)}
