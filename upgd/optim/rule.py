"""The vocabulary of rules under its old name; see :mod:`upgd.rules.vocabulary`."""

from upgd.rules.vocabulary import HYPERPARAMETERS, Hyperparameter, Method, Phase, Reduce

__all__ = ["HYPERPARAMETERS", "Hyperparameter", "Method", "Phase", "Reduce"]
