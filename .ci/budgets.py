"""File and function budgets: a module is a page, a function fits on a screen."""

import ast
import statistics
import sys
from pathlib import Path

FILE_CAP, FILE_SOFT, FILE_MEDIAN, FUNCTION_CAP, ARCHITECTURE_CAP = 500, 300, 120, 40, 60


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the body, without signature and docstring."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not body:
        return 0
    return (node.end_lineno or node.lineno) - body[0].lineno + 1


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    sizes, faults = [], []
    for path in sorted((root / "anabranch").rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(root)
        lines = text.count("\n")
        if lines > 3:  # package markers are not files to read
            sizes.append(lines)
        if lines > FILE_CAP:
            faults.append(f"{name}: {lines} lines, cap {FILE_CAP}")
        elif lines > FILE_SOFT:
            print(f"note: {name}: {lines} lines, soft cap {FILE_SOFT}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and function_lines(node) > FUNCTION_CAP:
                faults.append(f"{name}:{node.lineno} {node.name}: {function_lines(node)} lines, cap {FUNCTION_CAP}")
    if (median := statistics.median(sizes)) > FILE_MEDIAN:
        faults.append(f"median file is {median} lines, cap {FILE_MEDIAN}")
    architecture = (root / "docs/architecture.md").read_text(encoding="utf-8").count("\n")
    if architecture > ARCHITECTURE_CAP:
        faults.append(f"docs/architecture.md: {architecture} lines, cap {ARCHITECTURE_CAP}")
    print("\n".join(faults) or f"budgets kept: {len(sizes)} files, median {median:.0f} lines, longest {max(sizes)}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
