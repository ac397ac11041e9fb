# mypy: ignore-errors
"""Short vectors of numbers inside numba functions, as LLVM has them on every processor.

A loop over scalars is a vector loop only if the compiler can prove that it may be one, and the
order of its sums is then up to the compiler. Here both are explicit: ``load`` gives
:data:`LANES` numbers, operators work on all of them, ``store`` puts them back. Nothing is specific
to a processor; LLVM splits vectors to fit its registers.

Products and sums may fuse into one rounding; where it matters which, :func:`fused` says so. Needs
numba.
"""

from __future__ import annotations

import operator
from functools import partial

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

LANES = 16
"""Four registers on ARM, two with AVX2; rows of weights are padded to a multiple."""
FUSE = ("contract",)


class Vector(types.Type):
    """LANES numbers of one type."""

    def __init__(self, dtype: types.Type) -> None:
        self.dtype = dtype
        super().__init__(name=f"Vector({dtype})")

    @property
    def real(self) -> bool:
        """Whether it holds floating-point numbers."""
        return isinstance(self.dtype, types.Float)


def _llvm(dtype: types.Type) -> ir.Type:
    if dtype == types.float32:
        return ir.FloatType()
    if dtype == types.float64:
        return ir.DoubleType()
    return ir.IntType(1 if isinstance(dtype, types.Boolean) else dtype.bitwidth)


def _llvm_vector(dtype: types.Type) -> ir.Type:
    return ir.VectorType(_llvm(dtype), LANES)


@register_model(Vector)
class _Model(models.PrimitiveModel):
    def __init__(self, dmm, fe_type) -> None:
        super().__init__(dmm, fe_type, _llvm_vector(fe_type.dtype))


def _spread(builder, value, dtype):
    """The same number in all lanes."""
    vector = _llvm_vector(dtype)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.IntType(32)(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), None)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def built(signature, build):
    """An intrinsic from ``build(builder, *arguments)``."""
    return signature, lambda context, builder, sig, args: build(builder, *args)


# -------------------------------------------------------------------------- operators
_OPERATORS = {
    operator.add: ("fadd", "add"),
    operator.sub: ("fsub", "sub"),
    operator.mul: ("fmul", "mul"),
    operator.truediv: ("fdiv", None),
    operator.xor: (None, "xor"),
    operator.and_: (None, "and_"),
    operator.or_: (None, "or_"),
    operator.lshift: (None, "shl"),
    operator.rshift: (None, "lshr"),
}


def _binary(op, real, whole):
    @infer_global(op)
    class Typing(AbstractTemplate):
        def generic(self, args, kws):
            vectors = [a for a in args if isinstance(a, Vector)]
            if not vectors or len(args) != 2:
                return None
            kind = vectors[0]
            if (real if kind.real else whole) is None:
                return None
            if all(a == kind or a == kind.dtype for a in args):
                return signature(kind, *args)
            return None

    def lower(context, builder, sig, args):
        kind = sig.return_type
        full = [
            value if isinstance(a, Vector) else _spread(builder, value, kind.dtype)
            for a, value in zip(sig.args, args, strict=True)
        ]
        if kind.real:
            return getattr(builder, real)(*full, flags=FUSE)
        return getattr(builder, whole)(*full)

    for left, right in ((Vector, Vector), (Vector, types.Number), (types.Number, Vector)):
        lower_builtin(op, left, right)(lower)


for _op, (_real, _integer) in _OPERATORS.items():
    _binary(_op, _real, _integer)


@infer_global(operator.neg)
class _Negative(AbstractTemplate):
    def generic(self, args, kws):
        if len(args) == 1 and isinstance(args[0], Vector) and args[0].real:
            return signature(args[0], *args)
        return None


@lower_builtin(operator.neg, Vector)
def _negative(context, builder, sig, args):
    return builder.fneg(args[0], flags=FUSE)


# --------------------------------------------------------------------------- memory
def _place(context, builder, where, value, index, dtype):
    """The address of element `index` of an array or behind a pointer, for a whole vector."""
    if isinstance(where, types.Array):
        value = context.make_array(where)(context, builder, value).data
    return builder.bitcast(builder.gep(value, [index]), _llvm_vector(dtype).as_pointer())


@intrinsic
def load(typingctx, where, index):
    """The LANES numbers from ``where[index]`` on."""

    def code(context, builder, sig, args):
        place = _place(context, builder, where, *args, where.dtype)
        return builder.load(place, align=where.dtype.bitwidth // 8)

    return Vector(where.dtype)(where, types.intp), code


@intrinsic
def store(typingctx, where, index, vector):
    """Put `vector` at ``where[index]`` and behind."""

    def code(context, builder, sig, args):
        place = _place(context, builder, where, *args[:2], where.dtype)
        builder.store(args[2], place, align=where.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(where, types.intp, vector), code


@intrinsic
def address(typingctx, array, index):
    """A pointer to ``array[index]``."""

    def code(context, builder, sig, args):
        data = context.make_array(array)(context, builder, args[0]).data
        return builder.gep(data, [args[1]])

    return types.CPointer(array.dtype)(array, types.intp), code


@intrinsic
def advanced(typingctx, pointer, count):
    """A pointer `count` elements on."""
    return built(pointer(pointer, types.intp), lambda b, p, n: b.gep(p, [n]))


@intrinsic
def call(typingctx, function, *arguments):
    """Call a C function without a result, by its address."""
    kinds = arguments[0] if len(arguments) == 1 else arguments

    def code(context, builder, sig, args):
        values = cgutils.unpack_tuple(builder, args[1])
        llvm = [context.get_value_type(kind) for kind in kinds]
        pointer = ir.FunctionType(ir.VoidType(), llvm).as_pointer()
        builder.call(builder.inttoptr(args[0], pointer), values)
        return context.get_dummy_value()

    return types.void(types.intp, types.StarArgTuple.from_types(kinds)), code


# ------------------------------------------------------------------ making and taking apart
@intrinsic
def spread(typingctx, value):
    """The same number in all lanes."""
    return built(Vector(value)(value), lambda b, x: _spread(b, x, value))


@intrinsic
def full(typingctx, value):
    """A vector as it is; a number in all lanes."""
    if isinstance(value, Vector):
        return built(value(value), lambda b, x: x)
    return built(Vector(value)(value), lambda b, x: _spread(b, x, value))


@intrinsic
def zeros(typingctx, where):
    """LANES times the number 0, in the type of an array or pointer."""
    vector = Vector(where.dtype)
    return built(vector(where), lambda b, _: ir.Constant(_llvm_vector(where.dtype), None))


@intrinsic
def lanes(typingctx):
    """0, 1, 2, …"""
    return built(
        Vector(types.uint32)(),
        lambda b: ir.Constant(_llvm_vector(types.uint32), list(range(LANES))),
    )


def _fold(builder, vector, combine):
    """Combine halves until one number is left; the order is fixed."""
    count = LANES
    while count > 1:
        count //= 2
        parts = []
        for start in (0, count):
            numbers = list(range(start, start + count))
            mask = ir.Constant(ir.VectorType(ir.IntType(32), count), numbers)
            parts.append(builder.shuffle_vector(vector, vector, mask))
        vector = combine(*parts)
    return builder.extract_element(vector, ir.IntType(32)(0))


@intrinsic
def total(typingctx, vector):
    """The sum over lanes."""
    return built(vector.dtype(vector), lambda b, x: _fold(b, x, b.fadd))


@intrinsic
def widened(typingctx, vector):
    """As float64."""
    wide = Vector(types.float64)
    return built(
        wide(vector), lambda b, x: x if vector == wide else b.fpext(x, _llvm_vector(wide.dtype))
    )


# ----------------------------------------------------------------------------- choices
@intrinsic
def less(typingctx, a, b):
    """Where `a` is less than `b`, both vectors of the same type; of words, without sign."""
    compare = "fcmp_ordered" if a.real else "icmp_unsigned"
    return built(Vector(types.boolean)(a, b), lambda b, x, y: getattr(b, compare)("<", x, y))


@intrinsic
def equal(typingctx, a, b):
    """Where two vectors of words are the same."""
    return built(Vector(types.boolean)(a, b), lambda b, x, y: b.icmp_unsigned("==", x, y))


@intrinsic
def choose(typingctx, mask, a, b):
    """`a` where the mask is set, `b` elsewhere."""
    return built(a(mask, a, b), lambda b, mask, x, y: b.select(mask, x, y))


# ------------------------------------------------------------------------ mathematics
def _llvm_call(builder, name, args):
    """Call an LLVM intrinsic whose arguments and result have one type."""
    kind = args[0].type
    full = f"llvm.{name}." + (f"v{kind.count}" if isinstance(kind, ir.VectorType) else "")
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    full += "f64" if isinstance(element, ir.DoubleType) else "f32"
    llvm = ir.FunctionType(kind, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, llvm, full), args)


def _mathematical(name, *kinds):
    """An LLVM intrinsic on operands of one type; where one is a vector, numbers become vectors."""
    kind = next((each for each in kinds if isinstance(each, Vector)), kinds[0])
    if not _known(kind) or any(each not in (kind, getattr(kind, "dtype", kind)) for each in kinds):
        return None

    def build(builder, *args):
        pairs = zip(kinds, args, strict=True)
        full = [value if own == kind else _spread(builder, value, own) for own, value in pairs]
        return _llvm_call(builder, name, full)

    return built(kind(*kinds), build)


def _known(kind):
    return isinstance(kind, types.Float) or (isinstance(kind, Vector) and kind.real)


@intrinsic
def sqrt(typingctx, a):
    """Square roots."""
    return _mathematical("sqrt", a)


@intrinsic
def absolute(typingctx, a):
    """Magnitudes."""
    return _mathematical("fabs", a)


@intrinsic
def fused(typingctx, a, b, c):
    """``a·b + c``, rounded once where the processor can; numbers or vectors."""
    return _mathematical("fmuladd", a, b, c)


@intrinsic
def exp(typingctx, a):
    """Powers of e; of vectors, one after the other."""
    return _mathematical("exp", a)


@intrinsic
def log(typingctx, a):
    """Logarithms; of vectors, one after the other."""
    return _mathematical("log", a)


@intrinsic
def sign(typingctx, a):
    """-1, 0 or 1; NaN stays."""
    if not _known(a):
        return None

    width = LANES if isinstance(a, Vector) else None

    def code(context, builder, sig, args):
        one, zero = (ir.Constant(args[0].type, [x] * width if width else x) for x in (1.0, 0.0))
        found = builder.select(builder.fcmp_ordered(">", args[0], zero), one, args[0])
        return builder.select(builder.fcmp_ordered("<", args[0], zero), builder.fneg(one), found)

    return a(a), code


@intrinsic
def maximum(typingctx, a, b):
    """The larger; NaN if either is."""
    return _mathematical("maximum", a, b)


@intrinsic
def minimum(typingctx, a, b):
    """The smaller; NaN if either is."""
    return _mathematical("minimum", a, b)


def _extreme(name, vector):
    return built(
        vector.dtype(vector), lambda b, x: _fold(b, x, lambda *halves: _llvm_call(b, name, halves))
    )


@intrinsic
def largest(typingctx, vector):
    """The largest over lanes; NaN if any is."""
    return _extreme("maximum", vector)


@intrinsic
def smallest(typingctx, vector):
    """The smallest over lanes; NaN if any is."""
    return _extreme("minimum", vector)


# ------------------------------------------------------------------------------- words
@intrinsic
def product(typingctx, words, multiplier):
    """High and low words of the 64-bit products of a vector of 32-bit words and one word."""
    pair = types.UniTuple(words, 2)
    half = LANES // 2

    def code(context, builder, sig, args):
        # Multiplied in halves and taken apart by shuffles: as shifts and truncations the optimiser
        # would move them behind exclusive ors of twice the width.
        index = partial(ir.Constant, ir.VectorType(ir.IntType(32), half))
        wide = ir.VectorType(ir.IntType(64), half)
        by = builder.zext(_spread(builder, args[1], types.uint32), _llvm_vector(types.uint64))
        parts = []
        for start in (0, half):
            lanes = index(list(range(start, start + half)))
            a = builder.zext(builder.shuffle_vector(args[0], args[0], lanes), wide)
            b = builder.shuffle_vector(by, by, lanes)
            parts.append(builder.bitcast(builder.mul(a, b), _llvm_vector(types.uint32)))
        split = []
        for start in (1, 0):  # the low word comes first in memory
            mask = [start + 2 * k for k in range(LANES)]
            mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), mask)
            split.append(builder.shuffle_vector(*parts, mask))
        return context.make_tuple(builder, pair, split)

    return pair(words, types.uint32), code


@intrinsic
def shifted(typingctx, words, count):
    """Words with sign, divided by two `count` times."""
    return built(words(words, types.uint32), lambda b, x, n: b.ashr(x, _spread(b, n, types.uint32)))


@intrinsic
def bits(typingctx, vector):
    """float32 as words."""
    return built(
        Vector(types.uint32)(vector), lambda b, x: b.bitcast(x, _llvm_vector(types.uint32))
    )


@intrinsic
def number(typingctx, words):
    """Words as float32."""
    return built(
        Vector(types.float32)(words), lambda b, x: b.bitcast(x, _llvm_vector(types.float32))
    )


def _like(like):
    return Vector(getattr(like, "dtype", like))


@intrinsic
def converted(typingctx, words, like):
    """Words, without sign, as numbers of the type of `like`."""
    return built(
        _like(like)(words, like), lambda b, x, _: b.uitofp(x, _llvm_vector(_like(like).dtype))
    )


@intrinsic
def converted_signed(typingctx, words, like):
    """Words with sign as numbers of the type of `like`."""
    return built(
        _like(like)(words, like), lambda b, x, _: b.sitofp(x, _llvm_vector(_like(like).dtype))
    )
