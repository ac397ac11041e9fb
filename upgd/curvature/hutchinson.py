"""Hutchinson's estimate of a Hessian diagonal: unbiased, for twice differentiable graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from upgd.curvature.walk import Tap, UnsupportedOperationError


def hutchinson(
    loss: Tensor,
    edges: Sequence[GradientEdge],
    taps: Sequence[Tap | None],
    samples: int,
    seed: int | None,
    retain_graph: bool = False,
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradient and ``E[z·Hz]`` over random signs z, for the tensors at `edges`.

    Where there is a tap, one sign is drawn per feature and multiplies the tensor's value:
    summed over a feature's elements, the result is the second derivative with respect to a
    factor on that feature. Factors on several layers interact, but only off the diagonal.
    For edges beyond the length of `taps` only the gradient is taken.
    """
    gradients = torch.autograd.grad(loss, edges, create_graph=True, allow_unused=True)
    curved = [i for i in range(len(taps)) if (g := gradients[i]) is not None and g.requires_grad]
    generators: dict[torch.device, torch.Generator] = {}
    totals: list[Tensor | None] = [None] * len(edges)
    for sample in range(samples if curved else 0):
        signs = [_signs(gradients[i], taps[i], seed, generators) for i in curved]
        with _explained():
            products = torch.autograd.grad(
                [gradients[i] for i in curved],
                [edges[i] for i in curved],
                signs,
                retain_graph=retain_graph or sample + 1 < samples,
                allow_unused=True,
            )
        for i, z, product in zip(curved, signs, products, strict=True):
            if product is not None:
                part = z * product / samples
                total = totals[i]
                totals[i] = part if total is None else total + part
    return [None if g is None else g.detach() for g in gradients], totals


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        raise UnsupportedOperationError(
            f"'hutchinson' differentiates twice, and PyTorch cannot here: {error}. For attention, "
            "run the forward pass under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        ) from error


def _signs(
    like: Tensor, tap: Tap | None, seed: int | None, made: dict[torch.device, torch.Generator]
) -> Tensor:
    shape = list(like.shape)
    if tap is not None:
        shape = [n if axis == tap.axis else 1 for axis, n in enumerate(shape)]
    if seed is not None and like.device not in made:
        made[like.device] = torch.Generator(like.device).manual_seed(seed)
    generator = made.get(like.device)
    bits = torch.randint(0, 2, shape, device=like.device, generator=generator, dtype=like.dtype)
    signs = bits.mul_(2).sub_(1)
    return signs if tap is None else signs * tap.value
