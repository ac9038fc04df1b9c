"""``mpbackend probe``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mpbackend.backend import Backend
from mpbackend.cli.options import emit, out_option, say, split_names, warn_unavailable
from mpbackend.device import Device
from mpbackend.errors import BackendError, UnknownNameError
from mpbackend.formats import FORMATS
from mpbackend.matrix import Matrix
from mpbackend.numerics.accumulate import arithmetic_for
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.fingerprint import Fingerprint, compare
from mpbackend.plugins import load_plugins
from mpbackend.report.probes import probe_document, probe_report
from mpbackend.report.view import Report
from mpbackend.selection import select_device

if TYPE_CHECKING:
    import torch

    Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

WIDE = ("fp32", "fp16", "bf16")
"""Formats whose products come in the same format; those of narrower ones come in fp32."""

PROBED = tuple(name for name, form in FORMATS.items() if form.kind == "float" and form.encoding in ("ieee", "fn", "fnuz") and form.bits <= 32)
"""Formats that a probe can ask about."""


@click.command()
@click.option("--device", "spec", required=True, metavar="SPEC", help="What to probe: a backend, and an address such as cpu:0 or emu:h100.")
@click.option(
    "--format", "formats", multiple=True, metavar="FORMAT", help="Format of the operands; repeatable, several joined by commas. All that are multiplied."
)
@click.option("--print", "output", type=click.Choice(("text", "md", "json")), default="text", show_default=True, help="What to print.")
@out_option
def command(spec: str, formats: tuple[str, ...], output: str, out: Path | None) -> None:
    """Find out from products alone how a device multiplies matrices, and compare that with what its rows say.

    Only matrix products are asked of the device. What no product tells is said, and never guessed.
    """
    plugins = load_plugins()
    selection = select_device(spec, plugins)
    products = {
        name: product_of(selection.backend, selection.device, name) for name in chosen_formats(selection.backend, selection.device, split_names(formats))
    }
    matrix = plugins.matrix()
    reports, documents = [], []
    for name, product in products.items():
        say(f"probing {name} on {selection.device.key}", err=True)
        claim = claimed(matrix, selection.device, name)
        fingerprint = probed(product, name, emulated=selection.device.kind == "emulated")
        findings = compare(fingerprint, claim) if claim is not None else ()
        about = {"device": selection.device.key, "kind": selection.device.kind, "claimed": claim.source if claim is not None else ""}
        reports.append(probe_report(fingerprint, findings, **about))
        documents.append(probe_document(fingerprint, findings, **about))
    emit(joined(reports), output, documents if output == "json" else None, out)
    warn_unavailable(plugins)


def joined(reports: Sequence[Report]) -> Report:
    """Return several reports as one, each under its title."""
    if len(reports) == 1:
        return reports[0]
    blocks = [block._replace(title=report.title) if place == 0 else block for report in reports for place, block in enumerate(report.blocks)]
    return Report("Probed products", blocks)


def chosen_formats(backend: Backend, device: Device, names: Sequence[str]) -> Sequence[str]:
    """Return the formats to probe: those named, else all of plain products that the backend runs and a probe can ask about.

    Raises:
        UnknownNameError: a probe cannot ask about one.
        BackendError: none is named and the backend runs none.
    """
    for name in names:
        if name not in PROBED:
            raise UnknownNameError("format to probe", name, PROBED, remedy="probes ask about floating-point formats of at most 32 bits")
    runs = [row.a for row in backend.implements(device) if row.op == "matmul" and row.a == row.b and row.scaling == "none" and row.level is not None]
    chosen = names or tuple(name for name in dict.fromkeys(runs) if name in PROBED)
    if not chosen:
        raise BackendError(f"probe of {device.key}", found=f"backend {backend.name!r} runs no plain product", remedy="name a format with --format")
    return chosen


def product_of(backend: Backend, device: Device, name: str) -> Product:
    """Return what multiplies in a format on a device.

    Raises:
        UnknownNameError: the device does not multiply it.
        BackendError: the backend offers no product to probes.
    """
    product: Callable[[Device, str], Product] | None = getattr(backend, "product", None)
    if product is None:
        raise BackendError(f"probe of {device.key}", found=f"backend {backend.name!r} has no product()", remedy="ask its authors for one, or update the plugin")
    return product(device, name)


def claimed(matrix: Matrix, device: Device, name: str) -> Arithmetic | None:
    """Return what the rows of a device say about a plain product; None where they say nothing."""
    try:
        return arithmetic_for(matrix, device.arch, name, name, output=output_of(name))
    except UnknownNameError:
        return None


def output_of(name: str) -> str:
    """Return the format that products of a format come in."""
    return name if name in WIDE else "fp32"


def probed(product: Product, name: str, *, emulated: bool) -> Fingerprint:
    """Return what a probe of one format found."""
    import torch

    from mpbackend.numerics.probes import probe

    before = torch.get_num_threads()
    try:
        # Products of a probe are small: emulated ones take longer on threads that wait for each other.
        torch.set_num_threads(1 if emulated else before)
        return probe(product, a=name, b=name, output=output_of(name))
    finally:
        torch.set_num_threads(before)
