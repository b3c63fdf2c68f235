"""What is seen of a user's program before it is shipped: objects that exist only on Spark's driver, and its imports.

`dumps` finds objects such as a SparkSession in exactly what would be shipped, while that is pickled; errors call an
object by its name in the user's code. `find_in_source` and `find_in_function` find what a program surely imports, so
that its workers import it before they join a world. Surely: at the top of its file, in the functions that are used
there, and in its own modules that it imports, but not below an `if`. What the program sets in `os.environ` before an
import is part of the answer. The search ends where the program sets something that only the running program knows, and
executes nothing of the user's. Caller's thread.
"""

from __future__ import annotations

import ast
import inspect
import io
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path
from tokenize import TokenError
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from spark_elastic.errors import InvalidInput
from spark_elastic.worker.imports import AS_HOROVOD, PACKAGE, is_installed_spec
from spark_elastic.worker.pickling import WorkerPickler

DRIVER_ONLY = {
    "Accumulator", "Broadcast", "Column", "DataFrame", "HiveContext", "RDD", "SQLContext", "SparkContext",
    "SparkSession",
}  # fmt: skip
_COLLECT = "collect what the function needs, or write it to a path that workers can read"
ADVICE = {"Broadcast": "pass its value instead", "DataFrame": _COLLECT, "RDD": _COLLECT}


def dumps(call: object, called: str = "", modules: dict[str, None] | None = None) -> bytes:
    """cloudpickle of (fn, args, kwargs), or of another object that errors are to call by a name. modules: gets the
    names of modules that loading it imports. Raises InvalidInput: something is Spark's driver's, or cannot be
    pickled."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, call, called, {} if modules is None else modules).dump(call)
    except InvalidInput:
        raise
    except Exception as error:  # objects may raise anything while they are pickled
        raise InvalidInput(
            f"{called or 'the function or an argument'} cannot be pickled ({error}): create such objects inside the "
            "function that uses them."
        ) from error
    return buffer.getvalue()


class _Pickler(WorkerPickler):
    def __init__(self, file: io.BytesIO, call: object, called: str, modules: dict[str, None]) -> None:
        super().__init__(file)
        self._call, self._called = call, called or "the function"
        self._modules = modules

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType) and isinstance(obj.__module__, str):
            self._modules[obj.__module__] = None
        if kind := _find_driver_only_kind(obj):
            name = _find_name(obj, self._call)
            where = f"{name!r}, a {kind}," if name else f"a {kind},"
            advice = ADVICE.get(kind, "get what it needs before, and pass that")
            raise InvalidInput(f"{self._called} uses {where} which lives on Spark's driver only: {advice}.")
        return super().reducer_override(obj)


def _find_driver_only_kind(value: object) -> str | None:
    """The kind of an object that must not be shipped; None for any other object."""
    for parent in type(value).__mro__:
        package = parent.__module__.split(".")[0]
        if package == "py4j":
            return "Java object"
        if package == "pyspark" and parent.__name__ in DRIVER_ONLY:
            return parent.__name__
    return None


def _find_name(wanted: object, call: object) -> str:
    """The name of an object in the user's code; "" if it is nested too deeply."""
    seen: set[int] = set()
    level = [("", call)]
    for _ in range(6):
        deeper = []
        for path, value in level:
            for name, child in _iterate_children(value):
                if child is wanted:
                    return name or path
                if id(child) not in seen:
                    seen.add(id(child))
                    deeper.append((name or path, child))
        level = deeper
    return ""


def _iterate_children(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, FunctionType):
        code, known = value.__code__, _get_variables(value, value.__code__)
        names = [*code.co_freevars, *sorted(_collect_names(code))]
        yield from ((name, known[name]) for name in names if name in known)
        yield from (("", default) for default in value.__defaults__ or ())
        yield from (value.__kwdefaults__ or {}).items()
    elif isinstance(value, MethodType):
        yield from (("", value.__self__), ("", value.__func__))
    elif isinstance(value, partial):
        yield from (("", value.func), ("", value.args), ("", value.keywords))
    elif isinstance(value, Mapping):
        yield from ((key if isinstance(key, str) else "", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from (("", item) for item in value)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from vars(value).items()


def _collect_names(code: CodeType) -> set[str]:
    """Global, attribute and module names that the code uses, nested functions included."""
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*map(_collect_names, nested))


# ---- imports

# Methods of `sys.path` and `os.environ`
CHANGES = {"insert", "update", "setdefault", "pop", "popitem", "clear"}
SETTERS = {"putenv", "unsetenv", "load_dotenv"}
WATCHED = {"environ", "path", "modules"}  # of `os` and `sys`: what an import depends on


def find_in_source(source: bytes, folder: str, package: str = "") -> tuple[str, ...]:
    """The early imports of a script or module. folder: searched first. package: for relative imports."""
    return _Search(folder).list_found(lambda search: search.read_source(source, package))


def find_in_function(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The early imports of a function: the modules that it uses, and those that it imports if its source is known."""
    return _Search("").list_found(lambda search: search.read_function(fn))


class _SetAtRunTime(Exception):
    """The program sets a variable or module path to what is not known before it runs, and what follows may read it."""


@dataclass
class _Scope:
    """What names mean in one file or function."""

    package: str = ""  # for relative imports
    functions: dict[str, list[ast.stmt]] = field(default_factory=dict)  # bodies of those not used yet
    modules: dict[str, str] = field(default_factory=dict)  # names of imported modules
    optional: bool = False  # the imports may fail: they stand in a `try`


class _Search:
    def __init__(self, folder: str) -> None:
        self.found: list[str] = []
        self._path = [folder] if folder else []
        self._seen: set[object] = set()

    def list_found(self, read: Callable[[_Search], None]) -> tuple[str, ...]:
        with suppress(_SetAtRunTime):
            read(self)
        return tuple(dict.fromkeys(self.found))

    def read_source(self, source: bytes, package: str) -> None:
        with suppress(SyntaxError, ValueError):  # the worker that runs it says so
            self._walk(ast.parse(source).body, _Scope(package))

    def read_function(self, fn: Any) -> None:
        while isinstance(fn, partial):
            fn = fn.func
        fn = inspect.unwrap(fn)
        code = getattr(fn, "__code__", None)
        if not isinstance(code, CodeType) or code in self._seen:
            return
        self._seen.add(code)
        scope, known = _Scope(), _get_variables(fn, code)
        for name in sorted({*_collect_names(code), *code.co_freevars} & known.keys()):
            self._add_object(known[name], fn)
            if isinstance(known[name], ModuleType):
                scope.modules[name] = known[name].__name__
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
        except (OSError, TypeError, SyntaxError, ValueError, TokenError):
            return  # typed into an interpreter, a part of an expression, or the file of its name is another one
        for node in tree.body:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            self._walk(getattr(node, "body", []) if is_function else [node], scope)

    def _add_object(self, value: object, user: Any) -> None:
        """What loading a function imports for an object that it uses."""
        if isinstance(value, FunctionType) and value.__globals__ is user.__globals__:
            self.read_function(value)
            return
        name = getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", None)
        if isinstance(name, str):  # objects may answer to any name
            self._add(name, "", _Scope())

    def _walk(self, statements: list[ast.stmt], scope: _Scope) -> None:
        for statement in statements:
            match statement:
                case ast.Import(names):
                    for alias in names:
                        self._add(alias.name, "", scope)
                        root = alias.name.partition(".")[0]
                        scope.modules[alias.asname or root] = alias.name if alias.asname else root
                case ast.ImportFrom(module, names, level):
                    name = "." * level + (module or "")
                    for alias in names:
                        with suppress(ImportError):  # beyond the top-level package
                            whole = resolve_name(name, scope.package) if level else name
                            self._add(whole, alias.name.replace("*", ""), scope)
                case ast.FunctionDef(name, _, body) | ast.AsyncFunctionDef(name, _, body):
                    scope.functions[name] = body
                    self._use(statement.decorator_list, scope)
                case ast.ClassDef():
                    self._use([*statement.bases, *statement.decorator_list], scope)
                    self._walk(statement.body, scope)
                case ast.If(test, body) if ast.unparse(test).startswith("__name__ =="):
                    self._walk(body, scope)
                case ast.If():
                    _check_changes(statement)
                case ast.Try(body, handlers):
                    before, scope.optional = scope.optional, scope.optional or bool(handlers)
                    self._walk(body, scope)
                    scope.optional = before
                    self._walk([*statement.orelse, *statement.finalbody], scope)
                case ast.With() | ast.AsyncWith():
                    self._use([item.context_expr for item in statement.items], scope)
                    self._walk(statement.body, scope)
                case ast.For() | ast.While():
                    self._walk(statement.body, scope)
                case _:
                    variables = _read_variables(statement)
                    if variables is None:
                        _check_changes(statement)
                    self.found += variables or []
                    self._use([statement], scope)

    def _use(self, nodes: list[Any], scope: _Scope) -> None:
        """Follow the functions whose names stand here, and import the parts of modules: some are loaded when used."""
        used: list[str] = []
        for node in (inner for part in nodes for inner in ast.walk(part)):
            match node:
                case ast.Attribute(ast.Name(name), attribute) if name in scope.modules:
                    self._add(scope.modules[name], attribute, scope)
                case ast.Name(name):
                    used.append(name)
        for name in used:
            self._walk(scope.functions.pop(name, []), scope)

    def _add(self, module: str, name: str, scope: _Scope) -> None:
        """Add `import module`, or `from module import name`; of a module of the user's, what that imports."""
        if AS_HOROVOD in sys.modules and module.partition(".")[0] == "horovod":
            module = sys.modules[AS_HOROVOD].find_target(module) or "__main__"
        root = module.partition(".")[0]
        if root in sys.stdlib_module_names or root == "__main__":
            return
        spec = self._find(root)
        if spec is None or root == PACKAGE or is_installed_spec(spec):
            text = f"{module}:{name}" if name else module
            self.found.append(f"{text}?" if scope.optional else text)
            return
        for file, package in _list_files(spec, f"{module}.{name}".split(".")[1:]):
            if file not in self._seen:
                self._seen.add(file)
                self.read_source(file.read_bytes(), package)

    def _find(self, root: str) -> ModuleSpec | None:
        """As Python finds it for the program, without importing it."""
        own = PathFinder.find_spec(root, self._path)
        if own is not None and own.origin is not None:  # a folder without an `__init__.py` comes last
            return own
        try:
            return find_spec(root) or own
        except (ImportError, ValueError):  # a loaded module may have no spec
            return own


def _get_variables(fn: Any, code: CodeType) -> Mapping[str, Any]:
    """What the names of a function mean, its own variables apart."""
    known = dict(fn.__globals__)
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=False):
        with suppress(ValueError):  # a variable that was not assigned yet
            known[name] = cell.cell_contents
    return known


def _list_files(spec: ModuleSpec, parts: list[str]) -> Iterator[tuple[Path, str]]:
    """The files that the import of a module of the user's runs, each with its package. parts: behind the first name."""
    package = spec.name
    if spec.submodule_search_locations is None:
        if spec.origin is not None and spec.origin.endswith(".py"):
            yield Path(spec.origin), ""
        return
    folder = Path(next(iter(spec.submodule_search_locations)))
    for part in ["", *parts]:
        file = folder / f"{part}.py"
        if part and file.is_file():
            yield file, package
            return
        folder, package = folder / part, f"{package}.{part}".rstrip(".")
        if (folder / "__init__.py").is_file():
            yield folder / "__init__.py", package


def _read_variables(statement: ast.stmt) -> list[str] | None:
    """The variables of the environment that a statement sets to constants; None: it does something else."""
    match statement:
        case ast.Assign([ast.Subscript(place, name)], value):
            sign = ""
        case ast.Expr(ast.Call(ast.Attribute(place, "setdefault"), [name, value])):
            sign = "?"
        case _:
            return None
    match name, value:
        case ast.Constant(str(variable)), ast.Constant(str(text)) if _is_watched(place):
            return [f"{variable}{sign}={text}"]
    return None


def _check_changes(node: ast.AST) -> None:
    """Raises _SetAtRunTime: what is below the node changes what later imports depend on."""
    for part in ast.walk(node):
        match part:
            case ast.Assign(targets) | ast.Delete(targets):
                places = [target.value if isinstance(target, ast.Subscript) else target for target in targets]
            case ast.Call(ast.Attribute(place, method)) if method in CHANGES:
                places = [place]
            case ast.Call(ast.Name(name) | ast.Attribute(_, name)) if name in SETTERS:
                raise _SetAtRunTime
            case _:
                continue
        if any(map(_is_watched, places)):
            raise _SetAtRunTime


def _is_watched(node: ast.AST) -> bool:
    match node:
        case ast.Name("environ"):
            return True
        case ast.Attribute(ast.Name("os" | "sys"), name):
            return name in WATCHED
    return False
