"""The paper's own words on each claim, and which of them are central.

The rule looks at sentences, never at results:

* *central* is the main clause of the first sentence that says what the claim's figure (or theorem)
  shows, and of every sentence on it, the abstract's among them, whose subject is UPGD (in the
  ablation, the learner with its gate). The abstract's "continues to improve" is not asked where the
  section says "maintain" (claim 2), nor its "avoids it" (a drop) beside "continually improves"
  (claim 9);
* the clause is the one after *shows that* or *we notice that*; clauses joined by *and*, *but*,
  *whereas* or *unlike* are main clauses, too. Where the main clause only says "the same trends"
  (claim 7), its place is taken by the clause that says which;
* *side* is everything else: further sentences, relative and participle clauses, exceptions,
  examples in brackets, numbers, and lists of methods or problems.

The marks stand here and nowhere else, beside the words. Statements
(:mod:`upgd.paper.statements`) name the part that they belong to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Quote(NamedTuple):
    """Words of the paper that statements judge."""

    part: str  # its name in statements
    central: bool
    words: str
    where: str

    def __str__(self) -> str:
        """With quotation marks if the words are the paper's."""
        return f"({self.words})" if self.where == OURS else f"“{self.words}” ({self.where})"


CENTRAL, SIDE = True, False
OURS = "ours"
"""Where words are that the paper does not have."""
_ABSTRACT = (
    "UPGD continues to improve performance and surpasses or is competitive with all methods in all "
    "problems"
)
_TOYS = "appendix on the toy regression problem"
_ABLATION = "appendix on the ablation"

QUOTED: Mapping[int, tuple[Quote, ...]] = {
    1: (
        Quote("highest", CENTRAL, "The correlation is the highest for the second-order utility "
              "throughout learning", "section 4.1"),
        Quote("first", SIDE, "the first-order utility becomes less correlated when the learner "
              "plateaus", "section 4.1"),
        Quote("magnitude", SIDE, "The weight-magnitude utility shows a small correlation to the "
              "true utility that gets smaller", "section 4.1"),
        Quote("squared", SIDE, "The correlation of the squared-gradient utility increases with "
              "time steps but remains smaller than that of the first-order utility",
              "section 4.1"),
        Quote("random", SIDE, "random ordering as a baseline, which maintains zero correlation "
              "with the true utility", "section 4.1"),
    ),
    2: (
        Quote("decay", CENTRAL, "methods that only address catastrophic forgetting (e.g., S-EWC) "
              "continue to decay in performance", "section 4.2"),
        Quote("maintain", CENTRAL, "whereas methods that address loss of plasticity alone (e.g., "
              "S&P) or together with catastrophic forgetting (e.g., UPGD) […] maintain their "
              "performance level", "section 4.2"),
        Quote("except", SIDE, "except S-RWalk", "section 4.2"),
        Quote("competitive", CENTRAL, _ABSTRACT, "abstract"),
    ),
    3: (
        Quote("correlated", CENTRAL, "plasticity and accuracy are strongly correlated",
              "section 4.2"),
    ),
    4: (
        Quote("all", CENTRAL, "for all methods, the fraction of zero activations increases and ℓ0 "
              "gradient norm decreases substantially", "section 4.2"),
        Quote("except", SIDE, "except for UPGD-W along with Non-protecting UPGD-W and S&P",
              "section 4.2"),
    ),
    5: (
        Quote("improve", CENTRAL, "methods addressing catastrophic forgetting continually improve "
              "their performance", "section 4.3"),
        Quote("competitive", CENTRAL, _ABSTRACT, "abstract"),
        Quote("all", SIDE, "all learners can improve their performance", "section 4.3"),
        Quote("majority", SIDE, "the majority of methods have negative values, reflecting no loss "
              "of plasticity", "section 4.3"),
        Quote("top", SIDE, "learners without an explicit mechanism for addressing forgetting "
              "(e.g., AdamW) can reach a maximum accuracy of slightly above 40%", "section 4.3"),
    ),
    6: (
        Quote("improve", CENTRAL, "methods addressing catastrophic forgetting, including UPGD-W "
              "but except S-RWalk and S-SI, keep improving their performance", "section 4.4"),
        Quote("outperform", CENTRAL, "and outperform methods that only address loss of plasticity",
              "section 4.4"),
        Quote("competitive", CENTRAL, _ABSTRACT, "abstract"),
        Quote("struggles", SIDE, "S-RWalk, which addressed catastrophic forgetting in the previous "
              "problem, struggles in this problem", "section 4.4"),
        Quote("rest", SIDE, "the performance of S-SI and the rest of the methods keeps "
              "deteriorating over time", "section 4.4"),
        Quote("most", SIDE, "most learners indeed suffer from loss of plasticity", "section 4.4"),
    ),
    7: (
        Quote("best", CENTRAL, "the same trends manifested in the previous problem, where methods "
              "addressing catastrophic forgetting (e.g., S-EWC) performed the best",
              "section 4.4"),
        Quote("maintained", CENTRAL, "whereas methods addressing loss of plasticity (e.g., S&P) "
              "only maintained their performance at a lower level", "section 4.4"),
        Quote("competitive", CENTRAL, _ABSTRACT, "abstract"),
        Quote("trends", SIDE, "the same trends manifested in the previous problem",
              "section 4.4; there S-EWC and S-MAS improve, S-RWalk struggles, S-SI and the rest "
              "deteriorate, most lose plasticity"),
    ),
    8: (
        Quote("both", CENTRAL, "both metrics of UPGD-W are among the best overall values across "
              "all problems", "section 4.4"),
    ),
    9: (
        Quote("improves", CENTRAL, "AdaUPGD continually improves its performance", "section 4.5"),
        Quote("collapse", CENTRAL, "unlike Adam, which suffers from policy collapse",
              "section 4.5"),
        Quote("others", SIDE, "settings of the authors' code, which are not in the text", OURS),
    ),
    10: (
        Quote("inputs: SGD", CENTRAL, "the performance of SGD degrades with changing targets even "
              "when using linear neural networks", _TOYS),
        Quote("inputs: UPGD", CENTRAL, "UPGD cannot only maintain its plasticity but also improve "
              "its performance rapidly with changing targets", _TOYS),
        Quote("inputs: others", SIDE, "compared to other methods", _TOYS),
        Quote("inputs: S&P", SIDE, "S&P outperforms the linear-layer baseline. However, PGD and "
              "Non-protecting UPGD perform better than S&P", _TOYS),
        Quote("sign: SGD", CENTRAL, "the performance of SGD degrades with changing targets, "
              "indicating that it does not utilize learned features", _TOYS),
        Quote("sign: UPGD", CENTRAL, "the performance [of UPGD] keeps improving with changing "
              "targets compared to the other methods", _TOYS),
        Quote("sign: others", SIDE, "S&P, Non-protecting UPGD, and PGD do not lose plasticity over "
              "time but perform worse than UPGD", _TOYS),
        Quote("second", SIDE, "the second-order approximated utility improves performance over the "
              "first-order approximated utility in these problems", _TOYS),
    ),
    11: (
        Quote("over SGD", CENTRAL, "UPGD improves performance over SGD",
              "appendix on stationary MNIST"),
    ),
    12: (
        Quote("separately", CENTRAL, "both weight perturbation and weight decay separately improve "
              "SGD performance", _ABLATION),
        Quote("gating", CENTRAL, "When utility gating is added on top of weight decay and weight "
              "perturbation, the learner can improve its performance continually in all "
              "label-permuted problems and slightly improve its performance on input-permuted "
              "MNIST", _ABLATION),
        Quote("decay", SIDE, "the role of weight decay seems to be more important in "
              "Input-permuted MNIST and Label-permuted mini-ImageNet", _ABLATION),
        Quote("together", SIDE, "the combination of weight decay and weight perturbation makes the "
              "learner maintain its performance", _ABLATION),
        Quote("alone", CENTRAL, "Using utility gating on top of SGD allows SGD to maintain its "
              "performance instead of dropping on input-permuted MNIST and improves its "
              "performance continually on label-permuted problems", _ABLATION),
        Quote("role", SIDE, "The role of weight decay and weight perturbation is not significant "
              "in label-permuted problems", _ABLATION),
        Quote("including", SIDE, "but including both with utility gating improves performance and "
              "plasticity on input-permuted MNIST", _ABLATION),
    ),
    13: (
        Quote("propagation", CENTRAL, "the true weight utility […] can be propagated using the "
              "following recursive formulation", "theorem on utility propagation"),
        Quote("conservation", CENTRAL, "the sum of output-weight utilities to a feature equals the "
              "sum of its input-weight utilities", "theorem on conservation, as restated"),
        Quote("convergence", CENTRAL, "the algorithm converges to a stationary point",
              "appendix on convergence, as restated"),
    ),
    14: (
        Quote("hardly", CENTRAL, "Adam suffers from catastrophic forgetting and hence hardly "
              "improves performance", "figure 1"),
        Quote("worse", CENTRAL, "Adam loses plasticity as newer and newer tasks are presented and "
              "performs much worse than Adam with restarts later", "figure 1"),
        Quote("UPGD", CENTRAL, "In contrast, our proposed method, UPGD, quickly learns and "
              "maintains plasticity throughout learning", "figure 1"),
        Quote("stable", SIDE, "The stable performance of Adam-Restarts", "section 1"),
    ),
}  # fmt: skip
"""By claim; in each, all parts that its statements name."""
