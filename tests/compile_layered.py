"""Compile layered learners' kernels for sm_90 without a GPU: ``python -m tests.compile_layered``.

Without ``TRITON_INTERPRET``, since interpreted kernels are not compiled.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.compile_kernels import pointer
from upgd.kernels.layout import Layout
from upgd.kernels.triton_layered import arguments, compile_program
from upgd.kernels.triton_program import Program
from upgd.optim.registry import get

SIZES = (784, 300, 150, 10)
LONGS = {"began", "diverged", "seeds"}


def build(program: Program) -> Any:
    """Compile one kernel as a stack launches it."""
    kernel = compile_program(program)
    names, integers = arguments()
    signature = {n: "i32" if n in integers else pointer(n) for n in names}
    signature |= dict.fromkeys(LONGS, "*i64")
    pointers = [i for i, n in enumerate(names) if signature[n].startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={},
        attrs={(i,): [["tt.divisibility", 16]] for i in pointers},
    )
    tiles = program.tiles
    options = {"num_warps": tiles.warps, "num_stages": 1, "maxnreg": tiles.registers}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main() -> None:
    """Compile kernels that differ most."""
    layout = Layout(SIZES)
    norms: dict[str, Any] = {"layer_norm": True, "input_norm": True, "permuted": True}
    for name, options in (
        ("centred-sgd", {"permuted": True, "diagnosed": True}),
        ("sgdw", norms),
        ("upgd", {"squared": True}),
        ("adamw", {"activation": 2}),
    ):
        method = get(name)[0].method
        found = build(Program(method, layout, "float32", **options))
        print(name, len(found.asm["cubin"]), found.metadata.shared)


if __name__ == "__main__":
    main()
