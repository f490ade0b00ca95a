"""Residual additions right in front of a norm, done by the norm's kernel.

A decoder layer's own forward is read for ``hidden = residual + hidden; residual = hidden; hidden = self.norm(hidden)``,
and made anew with one call in the place of the three statements.
"""

from __future__ import annotations

import ast
from typing import Any

from torch import nn

from . import norms
from .hooks import has_hooks
from .local import is_local
from .replaced import Forward, forward_of, is_replaced, replace_forward
from .rewrite import rewritten

KIND = "residual addition and norm"
_HELPER = "_liger_dist_add_and_normalize"


def replace(module: nn.Module, *, owner: str) -> str:
    """Replaces the forward of a decoder layer.

    Raises:
        LeftAloneError: it has no such statements, or no plain source.
    """
    replace_forward(module, KIND, True, owner=owner)
    return "addition and norm at once"


@forward_of(KIND)
def _make_forward(forward: Any) -> Forward:
    if forward.__name__ == "forward" and forward.__code__.co_name == "forward_with_checkpointing":
        # Transformers wraps the forward of every subclass of its layers anew, so also that of the one made here.
        forward = forward.__wrapped__
    made: Forward = rewritten(forward, _fuse_additions, {_HELPER: _add_and_normalize})
    return made


def _add_and_normalize(norm: nn.Module, residual: Any, hidden_states: Any) -> tuple[Any, Any]:
    """The normalised sum and the sum. The norm is called as a module, and on the sum alone where somebody listens."""
    is_plain = is_local(residual) and is_local(hidden_states) and residual.shape == hidden_states.shape
    if is_plain and residual.dtype == hidden_states.dtype and is_replaced(norm, norms.KIND) and not has_hooks(norm):
        normalized, total = norm(hidden_states, liger_dist_residual=residual)
        return normalized, total
    total = residual + hidden_states
    return norm(total), total


def _fuse_additions(definition: ast.FunctionDef) -> bool:
    found = False
    for node in ast.walk(definition):
        for _, statements in ast.iter_fields(node):
            if isinstance(statements, list) and statements and isinstance(statements[0], ast.stmt):
                found |= _fuse_in(statements)
    return found


def _fuse_in(statements: list[ast.stmt]) -> bool:
    found = False
    for index in range(len(statements) - 2):
        fused = _fused(*statements[index : index + 3])
        if fused is not None:
            statements[index : index + 3] = [fused, statements[index + 1], _discard(statements[index + 2])]
            found = True
    return found


def _fused(add: ast.stmt, keep: ast.stmt, normalize: ast.stmt) -> ast.stmt | None:
    """``normed, sum = helper(self.norm, a, b)``, when the three are an addition, a copy and a norm of the sum."""
    total, addition = _assignment(add)
    kept, copied = _assignment(keep)
    normed, call = _assignment(normalize)
    if not (isinstance(addition, ast.BinOp) and isinstance(addition.op, ast.Add)):
        return None
    if not (isinstance(copied, ast.Name) and copied.id == total and kept is not None and normed is not None):
        return None
    is_norm = (
        isinstance(call, ast.Call)
        and not call.keywords
        and len(call.args) == 1
        and isinstance(call.args[0], ast.Name)
        and call.args[0].id in (total, kept)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "self"
    )
    if not is_norm or total is None or normed == kept:
        return None
    assert isinstance(call, ast.Call)
    return ast.parse(
        f"{_NORMED}, {total} = {_HELPER}({ast.unparse(call.func)}, {ast.unparse(addition.left)}, "
        f"{ast.unparse(addition.right)})"
    ).body[0]


_NORMED = "_liger_dist_normed"


def _discard(normalize: ast.stmt) -> ast.stmt:
    normed, _ = _assignment(normalize)
    return ast.parse(f"{normed} = {_NORMED}").body[0]


def _assignment(statement: ast.stmt) -> tuple[str | None, ast.expr | None]:
    """Name and value of a plain assignment to one name."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        if isinstance(target, ast.Name):
            return target.id, statement.value
    return None, None
