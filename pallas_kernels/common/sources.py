"""What a compiled kernel was made of: a digest of its sources and its shape, so that a report knows what is stale."""

import ast
import hashlib
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1]
OTHERS = {"tpu": "gpu", "gpu": "tpu"}
NOT_COMPILED = ("reference", "cpu", "native", "bench", "arg_specs", "report", "kernel_report", "sources")
"""Files of an operation that no kernel for an accelerator is made of; shapes count one by one."""


def code_digest(op: str, backend: str, spec: Any) -> str:
    """16 hexadecimal digits over the code of an operation's `tpu` or `gpu` kernel and one of its shapes.

    The code is that of the operation, of `common` and of the operations it uses, without comments, docstrings and
    what only type checkers read.
    """
    own = _files(op, backend)
    used = {name for text in map(Path.read_text, own) for name in re.findall(r"from pallas_kernels\.(\w+)", text)}
    files = {*own, *(path for name in used - {"cpu_native"} for path in _files(name, backend))}
    digest = hashlib.sha256(repr(spec).encode())
    for path in sorted(files):
        digest.update(f"\n{path.relative_to(FOLDER)}\n{_code(path)}".encode())
    return digest.hexdigest()[:16]


def _files(op: str, backend: str) -> list[Path]:
    paths = (FOLDER / op).glob("*.py")
    return [p for p in paths if p.stem not in NOT_COMPILED and not p.stem.startswith(OTHERS[backend])]


def _code(path: Path) -> str:
    tree = _Bare().visit(ast.parse(path.read_text()))
    return ast.dump(tree)


class _Bare(ast.NodeTransformer):
    """Leaves out docstrings and annotations, and imports that only these need."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if _is_string(node) else self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        return None if node.module in ("typing", "collections.abc", "jaxtyping") else node


def _is_string(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)
