"""Which source files the code of a kernel class is made from: its modules and what they import.

Followed are, transitively, the imports that stand anywhere in a file, also in functions, from the
modules of the class and its bases on. In are

- of our own, modules of ``kernel_api.implementations``, ``.providers`` and ``.epilogue``: they make
  the code, or wrap what does. All other of our modules find, check, cache and time kernels: out. So
  are the performance models among the providers, modules called ``model``: they rank kernels.
- of others, modules of the package of whoever imports them, and those that are not installed.
  Installed packages are told apart by their versions.

Only Python sources are: what a module reads from data files does not count.

An ``__init__.py`` that imports what stands beside it, to register it or to pass it on, does not
make its package one piece. It counts without its own import statements and ``__all__``, and of
what it imports only that is followed which its other statements use, or which is asked of it by
name. Where a package itself is what is passed around, where modules are imported by names that
are not in the source (``import_module``), and where a package makes up what is asked of it
(``__getattr__``), all of the package is in.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from kernel_api import _log
from kernel_api._cached_property import cached_property

logger = _log.logger(__name__)

_OWN = "kernel_api"
_OWN_PACKAGES = tuple(f"{_OWN}.{name}" for name in ("implementations", "providers", "epilogue"))
#: Last part of the names of ours that rank kernels.
_RANKING = "model"
#: What names of these start with.
_FOLLOWED = tuple(f"{one}." for one in _OWN_PACKAGES) + _OWN_PACKAGES

#: What imports modules by names that are computed.
_BY_NAME = ("import_module", "__import__")


class Source(NamedTuple):
    """A file as far as it counts.

    Attributes:
        path: Where it is.
        sha256: Of what counts.
        content: SHA-256 of all of it.
        changed: When it came to be what it is, in seconds of the epoch; the date that it bears may
            be that of an original.
    """

    path: str
    sha256: str
    content: str
    changed: float

    @property
    def name(self) -> str:
        """Of the file, without the folder."""
        return os.path.basename(self.path)


def sources(kernel_class: type) -> list[Source] | None:
    """Of the code of a class, in an order that neither folders nor other imports change.

    None where one of the class's modules has no source file, such as that of a notebook, and for
    a class that stands in none that may be in.
    """
    walk = _walked(kernel_class)
    if walk is None:
        return None
    found = {source(one.path, one.sha256) for one in walk.files.values()}
    return sorted(found, key=lambda one: (one.name, one.sha256, one.path)) or None


def installed_by(kernel_class: type) -> list[str]:
    """What is installed and imported by the sources of a class that are not ours: the names of
    modules without a package."""
    walk = _walked(kernel_class)
    targets: set[str] = set()
    for module, file in walk.files.items() if walk is not None else ():
        if _top(module) != _OWN:
            targets.update(_top(one) for bound in file.bound.values() for one in bound)
    places = {one: _file_of(one) for one in sorted(targets - {_OWN})}
    return [one for one, place in places.items() if place is not None and _is_installed(place)]


def _walked(kernel_class: type) -> _Walk | None:
    walk = _Walk()
    for name in modules_of(kernel_class):
        module = sys.modules.get(name)
        path = getattr(module, "__file__", None) or ""
        if not path.endswith(".py") or not os.path.exists(path):
            return None
        walk.start(name, getattr(module, "__package__", None) or "", path)
    return walk


def modules_of(kernel_class: type) -> list[str]:
    """The modules that the class and its bases stand in, those that are in."""
    names = dict.fromkeys(cls.__module__ for cls in kernel_class.__mro__)
    return [n for n in names if n != "builtins" and (_top(n) != _OWN or is_ours(n))]


def is_ours(module: str) -> bool:
    """Whether a module is one of ours that may be in."""
    return module in _own_modules()


def own_files() -> list[str]:
    """Where our modules that may be in are."""
    return sorted(_own_modules().values())


_read: dict[str, tuple[tuple[int, int, int], bytes, str, float]] = {}


def source(path: str, sha256: str) -> Source:
    """A file in its present state; raises OSError if it cannot be read."""
    content, changed = _content(path)[1:]
    return Source(path, sha256, content, changed)


def _content(path: str) -> tuple[bytes, str, float]:
    """The bytes, their SHA-256 and when they changed; read once for as long as they stay.

    What is put in the place of a file may have an older date, but no older entry of its folder.
    Links and modes change that as well, so of a file that was read before, its date counts.
    """
    stat = os.stat(path)
    state = stat.st_ino, stat.st_mtime_ns, stat.st_size
    known = _read.get(path)
    if known is None or known[0] != state:
        with open(path, "rb") as file:
            data = file.read()
        changed = max(stat.st_mtime, stat.st_ctime)
        known = _read[path] = state, data, hashlib.sha256(data).hexdigest(), changed
    return known[1:]


class _Walk:
    """Follows imports from file to file.

    Attributes:
        files: Those that are in, by the names of their modules.
    """

    def __init__(self) -> None:
        self.files: dict[str, _File] = {}
        self._reached: set[str] = set()
        self._whole: set[str] = set()
        self._places: dict[str, str | None] = {}

    def start(self, module: str, package: str, path: str) -> None:
        """Take a module that a class stands in."""
        self._places[module] = path
        for around in _prefixes(module)[:-1]:
            self._run(around, module)
        self._take(module, package, path)

    def _run(self, module: str, importer: str) -> None:
        """Take a module that is imported, if it is in."""
        path = self._place(module)
        if module in self.files or path is None or not path.endswith(".py"):
            return
        if _top(module) in (_OWN, _top(importer)) or not _is_installed(path):
            self._take(module, module if _is_init(path) else module.rpartition(".")[0], path)

    def _take(self, module: str, package: str, path: str) -> None:
        if module in self.files:
            return
        file = self.files[module] = _file(path, package, _top(module) == _OWN)
        if file.imports_by_name:
            for whole in (_top(module), *_OWN_PACKAGES):
                self._take_all(whole, module)
        for name, targets in file.bound.items():
            if not _is_init(path) or name in file.needed or name == "*":
                for target in targets:
                    self._bind(file, name, target, module)

    def _bind(self, file: _File, name: str, target: str, importer: str) -> None:
        """Follow what a name of a file stands for; of a package, what is asked of it."""
        if not self._is_package(target):
            self._reach(target, importer)
        elif self._is_in(target, importer):
            for used in file.used:
                if used == name or used.startswith(f"{name}."):
                    self._reach(target + used[len(name) :], importer)

    def _is_in(self, module: str, importer: str) -> bool:
        """Whether a module is followed; it is taken then, with the packages around it."""
        for one in _prefixes(module):
            self._run(one, importer)
        return module == _OWN or module in self.files

    def _reach(self, dotted: str, importer: str) -> None:
        """Follow ``package.module.name``: what are modules, and what a package calls so."""
        if dotted in self._reached:
            return
        self._reached.add(dotted)
        for module in _prefixes(dotted):
            if self._place(module) is None and module != _OWN:
                continue  # a folder without an __init__.py, or no module
            self._run(module, importer)
            file = self.files.get(module)
            if not self._is_package(module) or (file is None and module != _OWN):
                return
            name, _, rest = dotted[len(module) + 1 :].partition(".")
            if name in ("", "*"):
                self._take_all(module, importer)
            elif file is None:
                continue
            elif name in file.bound:
                for target in file.bound[name]:
                    # Of `from .name import name` there is no end otherwise.
                    inside = target.startswith(f"{module}.{name}.")
                    self._reach(f"{target}.{rest}" if rest and not inside else target, module)
            elif file.makes_up_names and self._place(f"{module}.{name}") is None:
                self._take_all(module, importer)

    def _take_all(self, package: str, importer: str) -> None:
        """Take every module of a package, and all that it passes on."""
        if package in self._whole:
            return
        self._whole.add(package)
        for one in _OWN_PACKAGES if package == _OWN else (package,):
            path = self._place(one)
            if path is not None and _is_init(path) and self._is_in(one, importer):
                for module, place in _modules_below(one, os.path.dirname(path)):
                    self._places[module] = place
                    self._run(module, importer)
                    for targets in self.files[module].bound.values():
                        for target in targets:
                            self._reach(target, module)

    def _place(self, module: str) -> str | None:
        if module not in self._places:
            self._places[module] = _file_of(module)
        return self._places[module]

    def _is_package(self, module: str) -> bool:
        path = self._place(module)
        return module == _OWN or (path is not None and _is_init(path))


# One file ----------------------------------------------------------------------------------


class _File:
    """What a source file imports.

    Attributes:
        sha256: Of what counts of its text.
        bound: What its imports stand for, as dotted names, by the names that they are bound to.
        imports_by_name: Whether it may import what its text does not say.
        makes_up_names: Whether it is an ``__init__.py`` with a function ``__getattr__``.
        needed: Of an ``__init__.py``, the names that its own statements use.
    """

    def __init__(self, path: str, package: str, data: bytes) -> None:
        self.path, self._data = path, data
        self.needed, self.makes_up_names = set[str](), False
        if _is_init(path):
            tree = _parsed(data)
            own = [one for one in tree.body if not _passes_on(one)]
            lazy = [one for one in own if _makes_up_names(one)]
            self.makes_up_names = bool(lazy)
            self.needed = {_top(name) for one in own for name in _names(one)}
            self.needed |= {name for one in own for name, _ in _imports(one, package)}
            data = b"".join(_lines(own, data))
            spoken = b"".join(_lines([one for one in own if one not in lazy], self._data))
        else:
            tree, spoken = _import_statements(data), data
        self.imports_by_name = any(one.encode() in spoken for one in _BY_NAME)
        self.sha256 = hashlib.sha256(data).hexdigest()
        self.bound: dict[str, list[str]] = {}
        for name, target in _imports(tree, package):
            self.bound.setdefault(name, []).append(target)

    @cached_property
    def used(self) -> frozenset[str]:
        """The names in its statements, with what is behind dots."""
        return frozenset(_names(_parsed(self._data)))


_files: dict[tuple[str, str], tuple[str, _File]] = {}


def _file(path: str, package: str, ours: bool) -> _File:
    """Parsed once for as long as it stays the same."""
    data, content, _ = _content(path)
    known = _files.get((path, package))
    if known is None or known[0] != content:
        file = _File(path, package, data)
        if ours:  # others are in by their versions
            file.bound = {
                name: kept
                for name, targets in file.bound.items()
                if (kept := [one for one in targets if one == _OWN or one.startswith(_FOLLOWED)])
            }
        known = _files[path, package] = content, file
    return known[1]


def _parsed(data: bytes) -> ast.Module:
    """Empty for what this Python cannot parse, and so does not run."""
    try:
        return ast.parse(data)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _import_statements(data: bytes) -> ast.Module:
    """A tree with all import statements of a source, and little else.

    Parsing everything takes ten times as long. Only lines with the word are parsed, as they are or
    with what follows up to a closing parenthesis. Whatever may be read in another way than in its
    place (no statement by itself, triple quotes, a line that continues another) needs the whole.
    """
    statements, end = [], 0
    while (word := data.find(b"import", end)) >= 0:
        start = data.rfind(b"\n", 0, word) + 1
        end = _end_of(data, word, b"\n")
        if b"(" in data[start:end] and b")" not in data[start:end]:
            end = _end_of(data, data.find(b")", end), b"\n")
        if re.search(rb"\bimport\b", data[start:end]):
            statements.append(data[start:end].strip())
    text = b"\n".join(statements)
    if any(one in text for one in (b'"""', b"'''")) or any(
        one in data for one in (b"\\\n", b"\r", b"\f")
    ):
        return _parsed(data)
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return _parsed(data)


def _end_of(data: bytes, start: int, what: bytes) -> int:
    found = data.find(what, start) if start >= 0 else -1
    return found if found >= 0 else len(data)


def _imports(tree: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """The names that are bound by import statements anywhere in a tree, and to what."""
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname is None:
                    yield _top(alias.name), _top(alias.name)
                yield alias.asname or alias.name, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
            for alias in node.names:
                yield alias.asname or alias.name, f"{base}.{alias.name}"


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """A tree and every statement in it; several times faster than looking at all of it."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, block, ())


def _names(tree: ast.AST) -> Iterator[str]:
    """``a.b.c`` for each name in a tree, with as much as is behind dots."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        behind: list[str] = []
        end = node
        while isinstance(end, ast.Attribute):
            behind.append(end.attr)
            end = end.value
        if isinstance(end, ast.Name):
            yield ".".join([end.id, *reversed(behind)])
        else:
            waiting += ast.iter_child_nodes(node)


def _passes_on(statement: ast.stmt) -> bool:
    """Whether it is an import, or says what ``*`` stands for."""
    if isinstance(statement, ast.Assign):
        return any(isinstance(one, ast.Name) and one.id == "__all__" for one in statement.targets)
    return isinstance(statement, (ast.Import, ast.ImportFrom))


def _makes_up_names(statement: ast.stmt) -> bool:
    """Whether it defines a function ``__getattr__``, under a condition too: such as one that hides
    it from checkers of types."""
    if isinstance(statement, (ast.If, ast.Try)):
        return any(map(_makes_up_names, (*statement.body, *statement.orelse)))
    return getattr(statement, "name", None) == "__getattr__"


def _lines(statements: Iterable[ast.stmt], data: bytes) -> Iterator[bytes]:
    lines = data.splitlines(keepends=True)
    for one in statements:
        first = min([one.lineno, *(d.lineno for d in getattr(one, "decorator_list", ()))])
        yield from lines[first - 1 : one.end_lineno]


# Where files are ---------------------------------------------------------------------------


def _top(name: str) -> str:
    return name.partition(".")[0]


@functools.lru_cache(maxsize=4096)
def _prefixes(dotted: str) -> tuple[str, ...]:
    """``a``, ``a.b``, ``a.b.c``."""
    parts = dotted.split(".")
    return tuple(".".join(parts[: count + 1]) for count in range(len(parts)))


def _is_init(path: str) -> bool:
    return os.path.basename(path) == "__init__.py"


@functools.lru_cache(maxsize=1)
def _own_modules() -> dict[str, str]:
    """The files of our own modules that may be in."""
    found: dict[str, str] = {}
    for package in _OWN_PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        for folder in spec.submodule_search_locations or ():
            found.update(_modules_below(package, folder))
    return found


def _modules_below(package: str, folder: str) -> Iterator[tuple[str, str]]:
    for entry in sorted(os.scandir(folder), key=lambda one: one.name):
        name, dot, suffix = entry.name.partition(".")
        if entry.name == "__init__.py":
            yield package, entry.path
        elif suffix == "py" and not (name == _RANKING and package.startswith(_FOLLOWED)):
            yield f"{package}.{name}", entry.path
        elif not dot and name.isidentifier() and entry.is_dir():
            yield from _modules_below(f"{package}.{name}", entry.path)


def _file_of(name: str) -> str | None:
    """The file of a module, found without importing anything."""
    top, *rest = name.split(".")
    if top == _OWN:
        return _own_modules().get(name)
    if top in sys.builtin_module_names or top in sys.stdlib_module_names:
        return None
    places: list[str] | None = None
    origin: str | None = None
    for part in (top, *rest):
        spec = PathFinder.find_spec(part, places) or (
            _spec_by_others(part) if part is top else None
        )
        if spec is None or (spec.origin is None and not spec.submodule_search_locations):
            return None
        origin = spec.origin
        places = list(spec.submodule_search_locations or ())
    return origin


def _spec_by_others(top: str) -> Any:
    """Of a module without a package, by other finders, such as those of editable installations."""
    for finder in sys.meta_path:
        find = None if finder is PathFinder else getattr(finder, "find_spec", None)
        try:
            spec = None if find is None else find(top, None)
        except Exception:
            logger.debug("%r does not say where %s is", finder, top, exc_info=True)
            spec = None
        if spec is not None:
            return spec
    return None


#: Folders that packages are installed to, wherever they are.
_INSTALLED = frozenset(("site-packages", "dist-packages"))


@functools.lru_cache(maxsize=1)
def _installed_places() -> tuple[str, ...]:
    """Those that Python knows, and what of its path has packages with their metadata."""
    known = [sysconfig.get_paths()[n] for n in ("stdlib", "platstdlib", "purelib", "platlib")]
    of_path = filter(_has_metadata, sys.path)
    return tuple(dict.fromkeys([*known, *of_path]))


def _has_metadata(place: str) -> bool:
    try:
        return bool(place) and any(Path(place).glob("*.dist-info"))
    except OSError:  # imports pass over what cannot be read, too
        return False


def _is_installed(path: str) -> bool:
    one = Path(path)
    if not _INSTALLED.isdisjoint(one.parts):
        return True
    return any(one.is_relative_to(place) for place in _installed_places())
