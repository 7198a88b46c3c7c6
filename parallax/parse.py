"""Compositions as text, for command lines and files; parsed, never evaluated."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from parallax.blocks import compile, remat  # noqa: A004  (what one says aloud)
from parallax.core.transform import Transform, compose, override, part
from parallax.errors import ParallaxError
from parallax.step import accumulate, clip, ema
from parallax.store import bf16, compress, dp, fp16, fp32, mixed_precision, shard_zero, zero
from parallax.surgery import fp8
from parallax.tensor import tensor_parallel, tp

VOCABULARY: dict[str, Transform | Callable[..., Transform]] = {
    "accumulate": accumulate,
    "bf16": bf16,
    "clip": clip,
    "compile": compile,
    "compose": compose,
    "compress": compress,
    "dp": dp,
    "ema": ema,
    "fp16": fp16,
    "fp32": fp32,
    "fp8": fp8,
    "mixed_precision": mixed_precision,
    "override": override,
    "part": part,
    "remat": remat,
    "shard_zero": shard_zero,
    "tensor_parallel": tensor_parallel,
    "tp": tp,
    "zero": zero,
}


def parse(
    text: str, *, more: Mapping[str, Transform | Callable[..., Transform]] | None = None
) -> Transform:
    """Read a composition from text such as `"tp(2), zero(2), bf16"`.

    Args:
        text: Transforms separated by commas, as one would write them in Python; arguments are
            literals or transforms.
        more: Further names, for one's own transforms.

    Raises:
        ParallaxError: A name is unknown, or the text is not a list of calls with literals.

    Example:
        >>> parse("zero(2), bf16, clip(1.0)")
        compose(bf16, clip(1.0), zero(2))
    """
    vocabulary = {**VOCABULARY, **(more or {})}
    try:
        body = ast.parse(f"compose({text})", mode="eval").body
    except SyntaxError as error:
        raise ParallaxError(
            f"the composition {text!r} cannot be read: {error.msg}.\n\n"
            'Write transforms separated by commas: "tp(2), zero(2), bf16".'
        ) from None
    # "tp(2)), zero(2" closes the call that the text was put into, and is then a tuple.
    if not isinstance(body, ast.Call):
        raise ParallaxError(
            f"the composition {text!r} cannot be read: unmatched ')'.\n\n"
            'Write transforms separated by commas: "tp(2), zero(2), bf16".'
        )
    if body.keywords:
        raise _not_literal(body.keywords[0], text)
    return compose(*(_read(node, vocabulary, text) for node in body.args))


def _read(node: ast.expr, vocabulary: Mapping[str, Any], text: str) -> Any:
    if isinstance(node, ast.Name):
        found = _known(node.id, vocabulary, text)
        if not isinstance(found, Transform):
            raise ParallaxError(
                f"the composition {text!r} names {node.id} without arguments.\n\n"
                f"Write {node.id}(...), for instance {_example(node.id)}."
            )
        return found
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        make = _known(node.func.id, vocabulary, text)
        if isinstance(make, Transform):
            raise ParallaxError(
                f"the composition {text!r} calls {node.func.id}, which takes no arguments.\n\n"
                f"Write {node.func.id}."
            )
        if any(isinstance(a, ast.Starred) for a in node.args) or any(
            k.arg is None for k in node.keywords
        ):
            raise _not_literal(node, text)
        args = [_argument(a, vocabulary, text) for a in node.args]
        options = {k.arg: _argument(k.value, vocabulary, text) for k in node.keywords if k.arg}
        try:
            return make(*args, **options)
        except ParallaxError:
            raise
        except (TypeError, ValueError) as error:
            told = str(error).rstrip(".?")
            raise ParallaxError(f"the composition {text!r}: {told}.") from None
    raise _not_literal(node, text)


def _argument(node: ast.expr, vocabulary: Mapping[str, Any], text: str) -> Any:
    if isinstance(node, ast.Call | ast.Name):
        return _read(node, vocabulary, text)
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise _not_literal(node, text) from None


def _known(name: str, vocabulary: Mapping[str, Any], text: str) -> Any:
    if name not in vocabulary:
        close = difflib.get_close_matches(name, vocabulary, n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise ParallaxError(
            f"the composition {text!r} names {name!r}, which parallax does not know.\n\n"
            f"{hint}Known: {', '.join(sorted(vocabulary))}."
        )
    return vocabulary[name]


def _not_literal(node: ast.AST, text: str) -> ParallaxError:
    return ParallaxError(
        f"the composition {text!r} holds {ast.unparse(node)!r}, which is no transform.\n\n"
        "Only calls of transforms with literal arguments are read."
    )


def _example(name: str) -> str:
    examples = {
        "tp": "tp(2)",
        "zero": "zero(2)",
        "dp": "dp()",
        "clip": "clip(1.0)",
        "remat": "remat()",
    }
    return examples.get(name, f"{name}(...)")
