"""Convolutions as products of matrices: windows of the input times the filters (im2col), and both gradients likewise.

The sum of an output runs over the channels, and within a channel over the taps; a library has an order of its own, or another algorithm. A transposed
convolution is the input's gradient of a plain one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from mpbackend_emulator.products import Products

Sizes = Sequence[int]


def convolution(
    products: Products,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
) -> Tensor:
    """Return ``aten::convolution``; the bias is added in the format of the sums."""
    stride, padding, dilation, output_padding = (spread(sizes, x.dim() - 2) for sizes in (stride, padding, dilation, output_padding))
    if transposed:
        sizes = [
            (size - 1) * step - 2 * pad + gap * (taps - 1) + extra + 1
            for size, step, pad, gap, taps, extra in zip(x.shape[2:], stride, padding, dilation, weight.shape[2:], output_padding, strict=True)
        ]
        out = input_gradient(products, x, weight, sizes, stride, padding, dilation, groups)
    else:
        out = convolve(products, pad_by(x, [(pad, pad) for pad in padding]), weight, stride, dilation, groups)
    if bias is not None:
        out = out + bias.to(out.dtype).reshape(-1, *[1] * (x.dim() - 2))
    return out.to(x.dtype)


def convolution_backward(
    products: Products,
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sizes | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return ``aten::convolution_backward``: the gradients of input, weight and bias that are asked for."""
    stride, padding, dilation = (spread(sizes, x.dim() - 2) for sizes in (stride, padding, dilation))
    wanted_x, wanted_weight, wanted_bias = output_mask
    x_gradient = weight_gradient = bias_gradient = None
    margins = [(pad, pad) for pad in padding]
    if wanted_x and transposed:
        x_gradient = convolve(products, pad_by(gradient, margins), weight, stride, dilation, groups).to(x.dtype)
    elif wanted_x:
        x_gradient = input_gradient(products, gradient, weight, x.shape[2:], stride, padding, dilation, groups).to(x.dtype)
    if wanted_weight:
        given, taken = (x, gradient) if transposed else (gradient, x)
        weight_gradient = filter_gradient(products, given, pad_by(taken, margins), weight.shape, stride, dilation, groups).to(weight.dtype)
    if wanted_bias:
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        bias_gradient = wide.sum([0, *range(2, gradient.dim())]).to(gradient.dtype)
    return x_gradient, weight_gradient, bias_gradient


def spread(sizes: Sizes, count: int) -> list[int]:
    """Return one size for each dimension where one is given for all."""
    return list(sizes) * count if len(sizes) == 1 else list(sizes)


def pad_by(x: Tensor, margins: Sequence[tuple[int, int]]) -> Tensor:
    """Return (N, C, *sizes) with zeros around each dimension; a negative margin cuts."""
    flat = [side for margin in reversed(margins) for side in margin]
    return functional.pad(x, flat) if any(flat) else x


def windows(x: Tensor, taps: Sizes, counts: Sizes, stride: Sizes, dilation: Sizes) -> Tensor:
    """Return the windows of (N, C, *sizes) as a view (N, C, *counts, *taps)."""
    x = x.contiguous()
    steps = x.stride()[2:]
    strides = [*x.stride()[:2], *(s * step for s, step in zip(steps, stride, strict=True)), *(s * gap for s, gap in zip(steps, dilation, strict=True))]
    return x.as_strided([*x.shape[:2], *counts, *taps], strides, x.storage_offset())


def columns(x: Tensor, taps: Sizes, counts: Sizes, stride: Sizes, dilation: Sizes, groups: int) -> Tensor:
    """Return the windows of (N, C, *sizes) as matrices (groups, N * positions, channels of a group * taps)."""
    rank = len(taps)
    view = windows(x, taps, counts, stride, dilation)
    view = view.unflatten(1, (groups, -1))  # (N, G, C, *counts, *taps)
    view = view.permute(1, 0, *range(3, 3 + rank), 2, *range(3 + rank, 3 + 2 * rank))
    depth = view.shape[2 + rank :].numel()
    matrices: Tensor = view.reshape(groups, view.shape[1 : 2 + rank].numel(), depth)
    return matrices


def convolve(products: Products, x: Tensor, weight: Tensor, stride: Sizes, dilation: Sizes, groups: int) -> Tensor:
    """Return the convolution of a padded input (N, C, *sizes) with (O, C / groups, *taps), in the format of the sums."""
    taps = weight.shape[2:]
    counts = [(size - gap * (tap - 1) - 1) // step + 1 for size, tap, step, gap in zip(x.shape[2:], taps, stride, dilation, strict=True)]
    left = columns(x, taps, counts, stride, dilation, groups)
    right = weight.reshape(groups, weight.shape[0] // groups, -1).transpose(1, 2)
    out = products.batch("conv", left, right)  # (G, N * positions, O / G)
    apart: Tensor = out.unflatten(1, (x.shape[0], *counts))  # (G, N, *counts, O / G)
    return apart.movedim(-1, 2).transpose(0, 1).flatten(1, 2)


def input_gradient(products: Products, gradient: Tensor, weight: Tensor, sizes: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int) -> Tensor:
    """Return the input's gradient (N, C, *sizes): the gradient, its elements ``stride`` apart, convolved with the turned filters."""
    taps = weight.shape[2:]
    apart = [(size - 1) * step + 1 for size, step in zip(gradient.shape[2:], stride, strict=True)]
    spaced = gradient.new_zeros(*gradient.shape[:2], *apart)
    spaced[(slice(None), slice(None), *(slice(None, None, step) for step in stride))] = gradient
    reach = [gap * (tap - 1) for gap, tap in zip(dilation, taps, strict=True)]
    margins = [(far - pad, size + far - have - (far - pad)) for far, pad, size, have in zip(reach, padding, sizes, apart, strict=True)]
    of_groups: Tensor = weight.unflatten(0, (groups, -1))
    turned = of_groups.transpose(1, 2).flatten(0, 1).flip(list(range(2, weight.dim())))
    return convolve(products, pad_by(spaced, margins), turned, [1] * len(taps), dilation, groups)


def filter_gradient(products: Products, gradient: Tensor, x: Tensor, shape: Sizes, stride: Sizes, dilation: Sizes, groups: int) -> Tensor:
    """Return the filters' gradient: the output's gradient times the windows of the padded input, summed over samples and positions."""
    right = columns(x, shape[2:], gradient.shape[2:], stride, dilation, groups)
    left = gradient.unflatten(1, (groups, -1)).movedim(1, 0).movedim(2, 1).flatten(2)  # (G, O / G, N * positions)
    return products.batch("conv", left, right).reshape(list(shape))
