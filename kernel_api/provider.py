"""Providers: sources of kernels. Registration checks everything before it changes anything, but for
the library's own classes, which its tests check."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from kernel_api import _locks, _log
from kernel_api._numbers import are_names, whole_number
from kernel_api._settings import setting
from kernel_api.errors import ArgumentError, PluginWarning, RegistrationError
from kernel_api.status import Status
from kernel_api.targets import is_compute_capability

if TYPE_CHECKING:
    from kernel_api.kernel import Kernel

logger = _log.logger(__name__)

ENTRY_POINT_GROUP = "kernel_api.providers"

#: Of the environment: names of the providers to ask, separated by commas.
_NAMES = "KERNEL_API_PROVIDERS"

#: ``raw_setting(PROVIDERS)`` is what it says, for keys of what calls remember.
PROVIDERS = os.fsencode(_NAMES)

#: Of the environment: paths of bundles, separated by colons.
_BUNDLES = "KERNEL_API_BUNDLE"

#: What the modules of our providers and kernels begin with.
_OURS = "kernel_api.providers."

_BUILT_IN = {
    "cutedsl": "kernel_api.providers.cutedsl",
    "torch": "kernel_api.providers.torch",
    "reference": "kernel_api.providers.reference",
}

K = TypeVar("K", bound=type)

#: Of the registry; held for moments. Nobody imports a module meanwhile: another thread may be
#: importing it, and wait for this to register what it defines.
_lock = _locks.rlock()
#: Of the one thread that loads providers and plug-ins.
_scan_lock = _locks.rlock()
_providers: dict[str, type[Provider]] = {}
_scanned = False
_scanner: int | None = None
#: What other threads have registered while one scans.
_of_others: set[type] = set()
_generation = 0


class Provider:
    """A source of kernels. A subclass gives ``name`` and is registered by being subclassed.

    Kernel classes join with the decorator::

        @MyProvider.register
        class MyGemm(ka.Kernel): ...

    Attributes:
        name: How ``get_kernels(providers=[...])`` and metadata call it.
        rank: Place among the providers; kernels of a lower rank are listed first.
        architectures: Compute capabilities, such as 90, that its compiler generates code for; None
            for all.
        distributions: What its kernels run that is not compiled from their sources, by the names
            that pip has for it: what was measured holds for these versions of it.
    """

    name: ClassVar[str] = ""
    rank: ClassVar[int] = 0
    architectures: ClassVar[tuple[int, ...] | None] = None
    distributions: ClassVar[tuple[str, ...]] = ()
    _families: ClassVar[dict[str, type[Kernel]]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.name or not isinstance(cls.name, str):
            raise RegistrationError(f"provider {cls.__qualname__} needs a name")
        if whole_number(cls.rank) is None:
            raise RegistrationError(
                f"provider {cls.__qualname__} has rank {cls.rank!r}; expected a whole number"
            )
        _require_architectures(cls)
        if not are_names(cls.distributions):
            raise RegistrationError(
                f"provider {cls.__qualname__} has distributions {cls.distributions!r}; expected a "
                f"tuple of names, as in ('torch',)"
            )
        cls._families = {}
        with _lock:
            previous = _providers.get(cls.name)
            if previous is not None and _path(previous) != _path(cls):
                raise RegistrationError(
                    f"provider name {cls.name!r} is taken by {_path(previous)}; {_path(cls)} "
                    f"needs another"
                )
            _providers[cls.name] = cls
            _registered(cls)

    @classmethod
    def register(cls, kernel_class: K = None) -> K:  # type: ignore[assignment]
        """Offer a kernel class to discovery; registering it again replaces it. A class is of one
        provider: it is withdrawn from another one.

        Raises RegistrationError naming everything that the class lacks, or that contradicts.
        """
        if cls is Provider:
            raise RegistrationError(
                "kernel_api.Provider is the base of providers; register with a class derived from "
                "it that has a name"
            )
        missing = [] if are_ours(cls, kernel_class) else list(cls.missing_from(kernel_class))
        with _lock:
            missing = missing or list(cls._taken_from(kernel_class))
            if missing:
                name = getattr(kernel_class, "__qualname__", repr(kernel_class))
                raise RegistrationError(f"{name} cannot be registered: {'; '.join(missing)}")
            for other in _providers.values():
                for path, one in list(other._families.items()):
                    if one is kernel_class:  # at the place that it had, if it has another one now
                        del other._families[path]
            kernel_class._provider = cls  # type: ignore[attr-defined]
            cls._families[_path(kernel_class)] = kernel_class
            _registered(kernel_class)
        return kernel_class

    @classmethod
    def _taken_from(cls, kernel_class: Any) -> Iterable[str]:
        """That another class has its family's name, as the names of kernels begin with it; or its
        place, which a class has again only if it is written again."""
        from kernel_api._naming import in_names

        name, own = kernel_class.family_name(), _path(kernel_class)
        for path, other in cls._families.items():
            if path != own and in_names(other.family_name()) == in_names(name):
                yield (
                    f"the family {name!r} is {path}; name another family, or unregister that class"
                )
            if path == own and "<locals>" in path and other.family_name() != name:
                yield (
                    f"{path} is the family {other.family_name()!r}; classes that a function makes "
                    f"need a __qualname__ each, as in the class body"
                )

    @classmethod
    def unregister(cls, kernel_class: type) -> None:
        """Withdraw a kernel class; raises ArgumentError if it was not registered."""
        with _lock:
            if cls._families.pop(_path(kernel_class), None) is None:
                raise ArgumentError(
                    f"{kernel_class.__qualname__} is not registered with {cls.name}"
                )
            registry_changed()

    @classmethod
    def families(cls) -> list[type[Kernel]]:
        """The registered kernel classes, in the order of registration."""
        with _lock:
            return list(cls._families.values())

    @classmethod
    def available(cls) -> Status:
        """Whether the provider's compiler or library is here."""
        return Status.success()

    @classmethod
    def missing_from(cls, kernel_class: Any) -> Iterable[str]:
        """What a class lacks to be registered with this provider."""
        from kernel_api._declaration import faults, faults_of_class
        from kernel_api.kernel import Kernel

        if not (isinstance(kernel_class, type) and issubclass(kernel_class, Kernel)):
            yield "it must be a class derived from kernel_api.Kernel"
            if kernel_class is None:
                yield f"write @{cls.__qualname__}.register without parentheses"
            return
        yield from faults_of_class(kernel_class)
        declared = kernel_class.space is not None
        if declared and not kernel_class.operands:
            yield "it declares a space but no operands"
        elif declared:
            yield from faults(kernel_class)
        if not declared and not _overrides(kernel_class, "generate_kernels", Kernel):
            yield "it needs generate_kernels, or a declared space and operands"
        if not _overrides(kernel_class, "_run", Kernel):
            yield "it needs _run"


def are_ours(*classes: Any) -> bool:
    """Whether all stand in our modules: tests check what they declare, so that processes need not
    wait for it."""
    return all(isinstance(one, type) and str(one.__module__).startswith(_OURS) for one in classes)


def _require_architectures(provider: type[Provider]) -> None:
    given = provider.architectures
    if given is None:
        return
    if not isinstance(given, (tuple, list)) or not all(map(is_compute_capability, given)):
        raise RegistrationError(
            f"provider {provider.__qualname__} has architectures {given!r}; expected a tuple of "
            f"compute capabilities, as in (90,), or None for all"
        )


def _overrides(cls: type, name: str, base: type) -> bool:
    return getattr(cls, name, None) is not None and (
        getattr(getattr(cls, name), "__func__", getattr(cls, name))
        is not getattr(getattr(base, name), "__func__", getattr(base, name))
    )


def _path(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def registered_class(path: str) -> type | None:
    """The registered kernel class at ``module:qualname``."""
    with _lock:
        for provider in _providers.values():
            if path in provider._families:
                return provider._families[path]
    return None


def _registered(cls: type) -> None:
    if _scanner is not None and _scanner != threading.get_ident():
        _of_others.add(cls)
    registry_changed()


def registry_changed() -> None:
    """Make every memoised query forget its answer."""
    global _generation
    _generation += 1


def generation() -> int:
    """A number that changes whenever a provider or kernel class does."""
    return _generation


def providers(chosen: Iterable[str | type[Provider]] | None = None) -> list[type[Provider]]:
    """The providers asked for by name or class, or all, in the order that kernels are listed.

    ``KERNEL_API_PROVIDERS`` (names separated by commas) narrows what "all" means.
    """
    _scan()
    if chosen is None:
        return list(_by_default(setting(PROVIDERS), generation()))
    return _chosen(chosen)


@functools.lru_cache(maxsize=16)
def _by_default(said: bytes | None, valid_for: int) -> list[type[Provider]]:
    named = os.fsdecode(said or b"")
    names = [n.strip() for n in named.split(",") if n.strip()] if named else None
    if names == []:
        raise ArgumentError(
            f"{_NAMES} is {named!r}, which names no provider; expected names separated by commas, "
            f"or nothing"
        )
    try:
        return _chosen(names)
    except ArgumentError as error:
        raise ArgumentError(f"{_NAMES} is {named!r}: {error}") from None


def _chosen(chosen: Iterable[str | type[Provider]] | None) -> list[type[Provider]]:
    with _lock:
        known = dict(_providers)
    if chosen is None:
        found = list(known.values())
    else:
        if isinstance(chosen, (str, type)):
            chosen = [chosen]
        if not isinstance(chosen, Iterable):
            raise ArgumentError(
                f"providers is {chosen!r}; expected names or classes of providers, such as "
                f"['torch'], or None for all"
            )
        found = list(dict.fromkeys(_resolve(one, known) for one in chosen))
    return sorted(found, key=lambda p: p.rank)


def _resolve(one: Any, known: dict[str, type[Provider]]) -> type[Provider]:
    if isinstance(one, type) and issubclass(one, Provider) and one is not Provider:
        return one
    if isinstance(one, str) and one in known:
        return known[one]
    raise ArgumentError(f"no provider is called {one!r}; there are {', '.join(sorted(known))}")


def _scan() -> None:
    """Load the built-in providers and the installed plug-ins, once."""
    global _scanned, _scanner
    if _scanned:
        return
    with _scan_lock:
        # Other threads wait for the lock; a provider that asks while it is loaded does not.
        if _scanned or _scanner is not None:
            return
        _scanner = threading.get_ident()
        try:
            plug_ins = sorted(_entry_points(), key=lambda e: e.name)
            for name, module in _BUILT_IN.items():
                _load(f"provider {name!r}", functools.partial(_import, module), module)
            for entry in plug_ins:
                others = [_module(other) for other in plug_ins if other is not entry]
                keeps = functools.partial(_is_of, others, _module(entry))
                load = functools.partial(_plug_in, entry)
                _load(f"provider {entry.name!r}", load, _module(entry), keeps)
            for path in filter(None, os.environ.get(_BUNDLES, "").split(os.pathsep)):
                _load(f"bundle {path!r}", functools.partial(_bundle, path))
            _scanned = True
        finally:
            _scanner = None
            _of_others.clear()


def _entry_points() -> Iterable[importlib.metadata.EntryPoint]:
    return importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)


def _load(
    what: str,
    load: Callable[[], Any],
    module: str = "",
    keeps: Callable[[type], bool] = lambda cls: False,
) -> None:
    """What cannot be loaded is a warning, and registers nothing: the others still answer.

    What was interrupted registers nothing either, and is imported anew the next time.

    Args:
        module: That is imported.
        keeps: Whether a provider or kernel class that was registered meanwhile is of others.
    """
    with _lock:
        named = dict(_providers)
        families = {provider: dict(provider._families) for provider in named.values()}
    imported = set(sys.modules)
    try:
        load()
    except KeyboardInterrupt:
        if module not in sys.modules:  # else another thread imports it
            _restore(named, families, keeps)
            for name in set(sys.modules) - imported:
                if name.startswith(f"{module}."):  # what it registers, it does when it is imported
                    del sys.modules[name]
        raise
    except (Exception, SystemExit) as error:
        logger.debug("%s failed to load", what, exc_info=True)
        _restore(named, families, keeps)
        warnings.warn(
            f"{what} could not be loaded and is left out: {error!r}", PluginWarning, stacklevel=2
        )


def _restore(
    named: dict[str, type[Provider]],
    families: dict[type[Provider], dict[str, type[Kernel]]],
    keeps: Callable[[type], bool],
) -> None:
    """Make the registry what it was, but for what was added and is to be kept."""

    def kept(added: dict[str, K]) -> dict[str, K]:
        return {name: cls for name, cls in added.items() if cls in _of_others or keeps(cls)}

    with _lock:
        before = {**kept(_providers), **named}
        _providers.clear()
        _providers.update(before)
        for provider in _providers.values():
            known = {**kept(provider._families), **families.get(provider, {})}
            provider._families.clear()
            provider._families.update(known)
            for kernel_class in known.values():
                kernel_class._provider = provider
        registry_changed()


def _module(entry: importlib.metadata.EntryPoint) -> str:
    return entry.value.partition(":")[0].strip()


def _is_of(others: list[str], own: str, cls: type) -> bool:
    """Whether a class stands in the module of another plug-in, or below it, which was imported.

    It is not imported again when it is its turn.
    """
    name = cls.__module__
    above = [one for one in (*others, own) if f"{name}.".startswith(f"{one}.")]
    return max(above, key=len, default=None) in others and name in sys.modules


def _import(module: str) -> None:
    importlib.import_module(module)


def _plug_in(entry: importlib.metadata.EntryPoint) -> None:
    found = entry.load()
    is_provider = isinstance(found, type) and issubclass(found, Provider)
    if not (is_provider or isinstance(found, types.ModuleType)):
        raise RegistrationError(
            f"{entry.value} is {found!r}, which is no Provider; expected a class that is one, or a "
            f"module that registers its kernels on import"
        )


def _bundle(path: str) -> None:
    from kernel_api.bundle import load_bundle

    load_bundle(path)


def rescan() -> None:
    """Look for installed plug-ins again on the next query."""
    global _scanned
    with _scan_lock:
        _scanned = False
        registry_changed()


def _forget_in_child() -> None:
    """A thread that scanned when the process was forked is not in this one."""
    global _scanner
    if _scanner != threading.get_ident():
        _scanner = None


os.register_at_fork(after_in_child=_forget_in_child)
