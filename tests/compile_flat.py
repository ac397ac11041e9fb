"""Compile the fused optimizers' Triton kernels for sm_90, no GPU needed.

``TRITON_INTERPRET=0 python -m tests.compile_flat [method ...]`` prints for each kernel
how many of its loads and stores move four numbers at a time.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from upgd.kernels import flat
from upgd.kernels import triton_flat as kernels
from upgd.kernels.rules import STATES
from upgd.kernels.triton_rules import compile_rules
from upgd.optim.registry import METHODS
from upgd.rules.vocabulary import Method

TYPES = {
    **dict.fromkeys(("tensors", "clocks", "draw"), "*i64"),
    **dict.fromkeys(("items", "rows", "done", "iota"), "*i32"),
    **dict.fromkeys(("numbers", "slots"), "*fp64"),
    "norms": "*fp32",
    "finishing": "i32",
}


def build(kernel: Any, **constants: Any) -> str:
    """The kernel's PTX."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else TYPES[n] for n in names}
    pointers = [i for i, n in enumerate(names) if signature[n].startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in pointers},
    )
    options = {"num_warps": kernels.WARPS}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return str(compiled.asm["ptx"])


def build_method(method: Method, half: bool = False) -> dict[str, str]:
    """The PTX of its two passes; with `half`, weights and traces are bfloat16."""
    rules = compile_rules(method, "float32")
    reduction = method.phases[0].reduce if flat.uses_eta(method) else None
    common = {"SECOND": "curvature" in method.needs, "REAL": tl.float32}
    common |= {"KIND": tl.bfloat16 if half else tl.float32, "BLOCK": kernels.BLOCK}
    trace = {"TRACE": common["KIND"]}
    names = [method.decays.get(state) for state in method.states]
    decays = [-1 if name is None else method.numbers.index(name) for name in names]
    decays += [-1] * (len(STATES) - len(decays))
    passes = {}
    first = {**common, "LIMIT": method.limit(torch.float32)}
    if reduction == "max":
        passes["first"] = build(
            kernels.reduce_kernel, RULE=rules.reduce, DECAY=-1, **first, **trace
        )
    elif reduction == "row_norm":
        passes["first"] = build(kernels.norms_kernel, RULE=rules.reduce, **first, **trace)
    else:
        passes["first"] = build(kernels.check_kernel, **first)
    passes["second"] = build(
        kernels.update_kernel,
        **{f"D{k}": place for k, place in enumerate(decays)},
        **{"RULE": rules.update, "STATES": len(method.states), "NOISE": "noise" in method.needs},
        **{"CUT": False, "GLOBAL": reduction == "max", "LOCAL": reduction == "row_norm"},
        DECAY=-1,
        PERIOD=-1 if method.period is None else method.numbers.index(method.period),
        ROUND=half,
        **trace,
        **common,
    )
    return passes


def main() -> None:
    """Compile what was asked for."""
    for name in sys.argv[1:] or ["upgd", "upgd-2nd-local", "ada-upgd", "s-rwalk"]:
        for half in (False, True):
            for which, ptx in build_method(METHODS[name].method, half).items():
                wide = rf".global\S*\.v{2 if half else 4}"  # 16 bits come as pairs
                loads, stores = (len(re.findall(op + wide, ptx)) for op in ("ld", "st"))
                print(name, which, "bfloat16" if half else "float32", loads, stores)


if __name__ == "__main__":
    main()
