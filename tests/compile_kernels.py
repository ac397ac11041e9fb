"""Compile the Triton kernels for sm_90 without a GPU: ``python -m tests.compile_kernels``.

Without ``TRITON_INTERPRET``, since interpreted kernels are not compiled.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from upgd.engine.dense import Learner, in_groups
from upgd.engine.dense_cuda import Tuning, scaling
from upgd.kernels import triton_noise, triton_sample, triton_stored, triton_update
from upgd.kernels.rules import fills_padding
from upgd.kernels.triton_rules import compile_rules, compile_traces
from upgd.optim.registry import get

INTEGERS = {
    *("offset", "first", "first_group", "mine", "runs", "P", "A", "UNITS", "LENGTH", "window"),
    *("windows", "ROWS", "inputs", "units", "outputs", "pitch", "base", "begin"),
    *("wide", "first_pitch", "first_begin", "row_at", "n", "decay_at", "decay_pitch", "TENSORS"),
}
LONG_INTEGERS = {"seed"}
DOUBLES = {"hyper", "corrections", "series", "decays", "squares"}
LONGS = {"seeds", "clock", "diverged", "began"}
BYTES = {"measured"}
WORDS = {
    *("layer_table", "group_table", "iota", "index", "labels", "permutations", "slots"),
    *("items", "rows", "kinds"),
}


def pointer(name: str) -> str:
    """The type of an argument, from its name."""
    if name in INTEGERS | LONG_INTEGERS:
        return "i32" if name in INTEGERS else "i64"
    kinds = ((DOUBLES, "*fp64"), (LONGS, "*i64"), (WORDS, "*i32"), (BYTES, "*u8"))
    return next((kind for names, kind in kinds if name in names), "*fp32")


def build(kernel: Any, warps: int = 4, **constants: Any) -> None:
    """Compile one kernel."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else pointer(n) for n in names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(names)
            if signature[n].startswith("*") or n in ("P", "A", "pitch", "base", "begin")
        },
    )
    options = {"num_warps": warps}
    if constants.get("EARLY"):
        options["launch_pdl"] = True
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(kernel.__name__, constants.get("METHOD", ""), len(compiled.asm["cubin"]))


def main() -> None:
    """Compile every kernel in the variants that differ most."""
    early = Tuning.ahead if hasattr(tl.extra.cuda, "gdc_wait") else 0
    for second in (False, True):
        both: dict[str, Any] = {"SECOND": second, "FEATURES": 3 if second else 0}
        methods = [get(name)[0].method for name in ("feature-upgd", "feature-upgd-2nd-local")]
        both["TRACE"] = compile_traces(methods, "float32")[0] if second else None
        both["EARLY"] = 0 if second else early
        shape = {"ACTIVATION": 2 if second else 0}
        build(triton_sample.backward_kernel, BR=32, BC=32, **shape, **both)
        build(
            triton_sample.head_kernel,
            **{"LAYERS": 3, "BC": 128, "PART": 32, "OUT": 16, "IN": 1024, "SQUARED": second},
            **{"INPUTS": 0, "FORWARD": True, "DUES": second, "APART": second, "SLOTS": 32},
            **shape,
            **both,
        )
    build(triton_sample.diagnose_kernel, LAYERS=3, BC=256, EARLY=early)
    build(triton_sample.fetch_kernel, INPUTS=0, IN=1024)
    build(triton_update.product_kernel, warps=1, BLOCK=128, HIDDEN=True, ACTIVATION=0)
    for name in ("upgd", "upgd-2nd-local", "feature-upgd-2nd", "feature-n-upgd-local", "s-rwalk"):
        _, [group] = in_groups([Learner(name, {}, 0)])
        rules = compile_rules(group.row.method, "float32")
        local = group.reduce == "row_norm"
        common: dict[str, Any] = {"LOCAL": local, "APART": False}
        if group.reduce:
            build(
                triton_update.reduce_kernel,
                1,
                **{"RULE": rules.reduce, "SECOND": group.second, "BLOCK": 128, "STAGES": 2},
                **{"EARLY": 0 if local else early, "LAYERS": 3},
                **common,
            )
        for hidden in (False, True):
            build(
                triton_update.update_kernel,
                1,
                **{"RULE": rules.update, "BLOCK": 128, "STAGES": 2},
                **{"SECOND": group.second and not group.features},
                **{
                    "FILLS": fills_padding(group.row.method),
                    "GLOBAL": group.reduce == "max",
                    "FEATURES": scaling(group),
                },
                **{"PART": 32, "NOISE": group.noise, "LAYERS": 3, "STATES": len(group.states)},
                **{"HIDDEN": hidden, "ACTIVATION": 0, "EARLY": 0 if hidden else early},
                **common,
            )
        print("update_kernel", name)
        if not group.features and not group.second:
            stored = {"NOISE": group.noise, "GLOBAL": group.reduce == "max", "BLOCK": 256}
            stored["STATES"] = len(group.states)
            build(triton_stored.update_kernel, RULE=rules.update, **stored, **common)
            if group.reduce == "max":
                build(triton_stored.reduce_kernel, RULE=rules.reduce, APART=True, BLOCK=256)
    _, [local_group] = in_groups([Learner("upgd-local", {}, 0)])
    build(
        triton_stored.norm_kernel,
        RULE=compile_rules(local_group.row.method, "float32").reduce,
        BLOCK=256,
    )
    build(triton_noise._normal_kernel, BLOCK=triton_noise.BLOCK)


if __name__ == "__main__":
    main()
