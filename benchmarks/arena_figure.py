"""README's figure: what SelfTunedSGD, UPGD-W, Adam and SGD do on streams of the arena.

    python benchmarks/arena_figure.py

Reads docs/results/arena/full; writes docs/streams.png and .svg.
"""

from pathlib import Path

from upgd.arena import evidence
from upgd.arena.drawing import draw_curves
from upgd.arena.scores import judge

DOCS = Path(__file__).parents[1] / "docs"
NAMES = {
    "self-tuned-sgd": "SelfTunedSGD, defaults",
    "upgd-w": "UPGD-W, tuned",
    "adamw": "AdamW, tuned",
    "sgdw": "SGD with decay, tuned",
}
STREAMS = {
    "input-permuted-mnist": "Pixels of MNIST permuted every 5 000",
    "label-permuted-emnist": "Labels of EMNIST permuted every 2 500",
    "stationary-mnist": "MNIST, nothing changes",
}


def main() -> None:
    """Draw the figure."""
    found = evidence.read(DOCS / "results" / "arena" / "full")
    paths = [DOCS / f"streams.{kind}" for kind in ("png", "svg")]
    for path in draw_curves(found, judge(found, "tuned"), *paths, names=NAMES, streams=STREAMS):
        print(path)


if __name__ == "__main__":
    main()
