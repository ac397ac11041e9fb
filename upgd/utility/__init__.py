"""Utilities of weights and features: the true ones and the paper's approximations.

The utility of a weight (or of a feature) is the loss without it minus the loss with it. The
true one takes a forward pass for each of them; :func:`true_utility` runs many of those at once.
The approximations take derivatives: ``-g·w`` (first order) and ``½·h·w² - g·w`` (second order),
and the same with gates fixed at 1 for features.

Functions that take a `model` and a `loss` expect a loss without arguments that runs the model,
such as ``lambda: F.mse_loss(model(x), y)``, and return a dict with an entry per parameter or per
layer of features.
"""

from upgd.utility.approximations import approximate, feature_utility, outgoing_sums, weight_utility
from upgd.utility.common import Kind, Scope, Utilities
from upgd.utility.propagation import LayerUtility, propagated_utility
from upgd.utility.ranks import Correlation, rank_correlation, spearman
from upgd.utility.true import MEMORY, true_feature_utility, true_utility, true_weight_utility

__all__ = [
    "MEMORY",
    "Correlation",
    "Kind",
    "LayerUtility",
    "Scope",
    "Utilities",
    "approximate",
    "feature_utility",
    "outgoing_sums",
    "propagated_utility",
    "rank_correlation",
    "spearman",
    "true_feature_utility",
    "true_utility",
    "true_weight_utility",
    "weight_utility",
]
