"""Which module may import which: the table of the house, and the parser that finds breaches of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

LOW = "errors config protocol"
"""Everyone may know these."""

ALLOWED: dict[str, str] = {
    "errors": "",
    "protocol": "errors",
    "config": "errors protocol",
    "prefix": LOW,
    "scheduler": f"{LOW} prefix",
    "actors": LOW,
    "engine": LOW,
    "memory": LOW,
    "worker": f"{LOW} prefix engine",
    # the host side: what an app holds
    "options": f"{LOW} prompts",
    "prompts": LOW,
    "prefill_options": f"{LOW} handle options prompts",
    "handle": f"{LOW} scheduler",
    "info": f"{LOW} actors.lifecycle memory scheduler",
    "completion": f"{LOW} scheduler",
    "watch": f"{LOW} info",
    "client": f"{LOW} completion handle options prefill_options scheduler",
    "locate": "errors",
    "desk": f"{LOW} options prefix scheduler watch",
    "allowance": f"{LOW} prefix",
    "librarian": f"{LOW} prefix scheduler.ports scheduler.stimuli",
    "listening": f"{LOW} actors info scheduler watch",
    "names": f"{LOW} actors",
    "residency": f"{LOW} actors names scheduler.ports scheduler.stimuli watch",
    "snapshots": f"{LOW} actors info",
    "host": f"{LOW} actors allowance client desk info librarian listening locate memory options prefix residency scheduler "
    "snapshots store watch",
    "testing": f"{LOW} engine.fake_draw engine.fake_text worker.fallback",
    "__init__": f"{LOW} client completion handle host info memory options prefill_options scheduler watch",
    # fetched models
    "catalog": "",
    "children": "",
    "store": "errors",
    "download": "errors catalog children store",
    "fetch": "errors catalog children download store",
    # the command line
    "doctor": f"{LOW} actors.blas children download store",
    "cli": f"{LOW} __init__ allowance catalog completion doctor fetch info options prefix store watch",
}
"""Component of runtime/: the components it may import, or single modules of them. Its own is always allowed."""

HEAVY = {"mlx", "mlx_lm", "mlx_vlm", "transformers", "tokenizers", "huggingface_hub", "safetensors", "numpy", "torch"}
HEAVY_HOME = "engine/"


def breaches(package: Path) -> list[str]:
    """One line for each forbidden import in the tree of the package `runtime` at `package`, wherever in a file it stands."""
    found = []
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package).as_posix()
        component = inside.split("/", 1)[0].removesuffix(".py")
        if component not in ALLOWED:
            found.append(f"{inside}: not in the table of arrows; give it a place there")
            continue
        allowed = {component, *ALLOWED[component].split()}
        for line, module in imports(ast.parse(path.read_text("utf-8"), str(path)), inside):
            top, _, rest = module.partition(".")
            if top in HEAVY and not inside.startswith(HEAVY_HOME):
                found.append(f"{inside}:{line}: {module}: only {HEAVY_HOME} may import {top}")
            if top == "runtime" and not any(f"{rest}.".startswith(f"{target}.") for target in allowed):
                found.append(f"{inside}:{line}: {component} may not import {rest}")
    return found


def imports(tree: ast.Module, inside: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import of a file: at its top, in functions, under TYPE_CHECKING, by import_module."""
    package = ["runtime", *inside.split("/")[:-1]]
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield node.lineno, "runtime.__init__" if alias.name == "runtime" else alias.name
            case ast.ImportFrom(module=module, names=names, level=level):
                parts = package[: len(package) - level + 1] if level else []
                base = ".".join([*parts, *([module] if module else [])])
                for alias in names:
                    if base == "runtime" and alias.name not in ALLOWED:
                        yield node.lineno, "runtime.__init__"  # a public name
                    else:
                        yield node.lineno, f"{base}.{alias.name}"  # a module, or a name inside one
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[ast.Constant(value=str(module)), *_]):
                if name in ("import_module", "__import__"):
                    yield node.lineno, module
