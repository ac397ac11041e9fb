"""A step of a layered method that has a rule of its own for several samples.

Layers may have different numbers of samples, as where positions of a sequence are averaged. Those
of a batch's element lie side by side, so that the smallest number divides the others: sums over the
network then have a value for each element, to which a layer adds the mean of its samples there. If
it does not divide them, all samples are one element.

Rules read, besides what others read:

=============  =================================================================================
``overlap``    over layers: the inner product of each sample's gradient with the samples' mean
               gradient, by the method's :class:`~upgd.rules.vocabulary.Metric`; 0 outside of
               linear layers
``positions``  over layers: the number of the layer's samples in an element
``outside``    over layers: 1 outside of linear layers, else 0
``samples``    over the network: the number of elements
=============  =================================================================================

Over the network, :func:`upgd.rules.ops.mean` is the mean over elements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from upgd.optim.layer_step import Layer, LayerStep
from upgd.rules.vocabulary import Method, Phase

if TYPE_CHECKING:
    from upgd.optim.layered import LayerOptimizer


def has_several(layers: list[Layer]) -> bool:
    """Whether a layer has more than one sample."""
    return any(layer.x is not None and len(layer.x) > 1 for layer in layers)


class BatchStep(LayerStep):
    """Runs the phases of an optimizer's method for several samples."""

    def __init__(self, opt: LayerOptimizer, layers: list[Layer]) -> None:
        super().__init__(opt, layers)
        counts = [len(layer.x) for layer in layers if layer.x is not None]
        least = min(counts)
        self.samples = least if all(count % least == 0 for count in counts) else 1
        for layer in layers:
            count = self.samples if layer.x is None else len(layer.x)
            layer.constants["positions"] = count / self.samples
        self.by_sample = True

    def _method(self, opt: LayerOptimizer) -> Method:
        assert opt.method.several is not None
        return opt.method.several

    def _run(self, phase: Phase, layer: Layer) -> None:
        if "overlap" in phase.reads:
            layer.live["overlap"] = self._overlap(layer)
        super()._run(phase, layer)
        layer.live.pop("overlap", None)

    def _summand(self, value: Tensor) -> Tensor:
        """The mean of a layer's samples in each element; one value is that of all elements."""
        return value.reshape(self.samples, -1).mean(1) if value.numel() > 1 else value.reshape(())

    def _overlap(self, layer: Layer) -> Tensor:
        """By the gradient of the layer, or by products of samples where those are fewer."""
        metric, x, d = self.method.metric, layer.x, layer.d
        if x is None or d is None or metric is None:
            return layer.owner.new_zeros(1)
        inputs, factor = self._kept(layer, "inputs"), self._kept(layer, "layers")[metric.factor]
        x = x - inputs[metric.mean]
        scaled, count = x * inputs[metric.scale], len(x)
        if count * (x.shape[1] + d.shape[1]) < 2 * x.shape[1] * d.shape[1]:
            return ((d @ d.T) * (scaled @ x.T + factor)).mean(1)
        change = scaled @ (d.T @ x / count).T + factor * d.mean(0)
        return (change * d).sum(1)
