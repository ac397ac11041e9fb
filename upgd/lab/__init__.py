"""The laboratory: anybody's rule, optimizer, network or stream, judged against every rival.

>>> from upgd import lab
>>> study = lab.Study("studies/mine")  # a folder; resumes
>>> study.run("label-permuted-digits", ["upgd-w", "sgd"], seeds=5, lr=0.05)  # doctest: +SKIP

A rule of your own is a plain function of scalars; see :func:`method`, and :func:`layered_method`
for rules that see layers and units. An optimizer class of
PyTorch's kind, a network and a stream enter by :func:`optimizer`, :func:`network` and
:func:`problem`.
"""

from upgd.lab.checking import Checks, check
from upgd.lab.comparing import compare
from upgd.lab.comparison import Comparison
from upgd.lab.definitions import layered_method, method, network, optimizer, problem
from upgd.lab.study import Study
from upgd.lab.views import Picture, Rankings, Table
from upgd.rules.ops import absolute, clip, exp, log, maximum, minimum, sigmoid, sign, sqrt
from upgd.rules.vocabulary import Phase, Recycle
from upgd.study.extensions import use

__all__ = [
    "Checks",
    "Comparison",
    "Phase",
    "Picture",
    "Rankings",
    "Recycle",
    "Study",
    "Table",
    "absolute",
    "check",
    "clip",
    "compare",
    "exp",
    "layered_method",
    "log",
    "maximum",
    "method",
    "minimum",
    "network",
    "optimizer",
    "problem",
    "sigmoid",
    "sign",
    "sqrt",
    "use",
]
