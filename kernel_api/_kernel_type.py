"""The metaclass of kernels, which reads their class bodies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kernel_api import _compile_cache
from kernel_api.arguments import Arguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.errors import RegistrationError
from kernel_api.space import Rule
from kernel_api.targets import CcLike

if TYPE_CHECKING:
    from kernel_api.kernel import Kernel


class _Namespace(dict[str, Any]):
    """Collects the rules of a class body, which may all be called ``_``."""

    def __init__(self) -> None:
        super().__init__()
        self.rules: list[Rule] = []

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(value, (staticmethod, classmethod)) and isinstance(value.__func__, Rule):
            value = value.__func__  # rules are over what they name, whoever has them
        if isinstance(value, Rule):
            self.rules.append(value)
        elif name == "rules":
            raise RegistrationError(
                f"a class body has rules = {value!r}; rules stand in it by themselves, each a "
                f"function below @rule(...)"
            )
        super().__setitem__(name, value)


class KernelType(type):
    """Metaclass: keeps the rules of a class body, and stands in front of every ``compile``.

    Whoever overrides ``compile`` writes only the compilation; the checks, the cache and the
    sealing of the artifact come from :func:`Kernel._compiled`, also for methods assigned later and
    those of bases that are no kernels. Rules count where they stand in the body of a kernel class:
    elsewhere they raise RegistrationError, for what is not asked would be a wrong "yes".
    """

    _own_rules: tuple[Rule, ...]
    #: Of the class and its bases: all, those that decide a query, those that shape the family.
    rules: tuple[Rule, ...]
    #: With their places among all, because explain prefers the refusal that came last.
    operand_rules: tuple[tuple[int, Rule], ...]
    design_rules: tuple[tuple[int, Rule], ...]
    shaping_rules: tuple[Rule, ...]

    @classmethod
    def __prepare__(cls, name: str, bases: tuple[type, ...], /, **kwargs: Any) -> _Namespace:
        return _Namespace()

    def __new__(
        mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any
    ) -> KernelType:
        cls = super().__new__(mcs, name, bases, dict(namespace), **kwargs)
        for base in cls.__mro__ if bases else ():
            _require_no_rules(base, name)
        if bases and (hook := _unguarded(cls)) is not None:
            type.__setattr__(cls, "compile", _guarded(hook))
        type.__setattr__(cls, "_own_rules", _rules_of(namespace))
        rules = _inherited_rules(cls)
        shaping = tuple(r for r in rules if not (r.needs_args or r.needs_graph))
        deciding = list(enumerate(r for r in rules if r not in shaping))
        of_designs = tuple(one for one in deciding if one[1].needs_design or one[1].needs_graph)
        of_operands = tuple(one for one in deciding if one not in of_designs)
        type.__setattr__(cls, "rules", rules)
        type.__setattr__(cls, "operand_rules", of_operands)
        type.__setattr__(cls, "design_rules", of_designs)
        type.__setattr__(cls, "shaping_rules", shaping)
        return cls

    def __setattr__(cls, name: str, value: Any) -> None:
        if name == "rules" or isinstance(getattr(value, "__func__", value), Rule):
            raise RegistrationError(
                f"{cls.__qualname__}.{name} is set to {value!r}; a rule counts where it stands in "
                f"the body of a class: put it there"
            )
        if name == "compile":
            value = _guarded(value)
        super().__setattr__(name, value)
        if not name.startswith("_provider"):
            from kernel_api.provider import registry_changed

            registry_changed()


def _rules_of(namespace: dict[str, Any]) -> tuple[Rule, ...]:
    """Of a class body; or of a dict in its place, as ``type(name, bases, dict)`` takes it."""
    if isinstance(namespace, _Namespace):
        return tuple(namespace.rules)
    copied: tuple[Rule, ...] = namespace.get("_own_rules", ())  # that of another class
    return copied or tuple(one for one in namespace.values() if isinstance(one, Rule))


def _require_no_rules(base: type, name: str) -> None:
    """Unless the base is a kernel class, whose metaclass has collected them."""
    if isinstance(base, KernelType):
        return
    for one in vars(base).values():
        wrapped = getattr(one, "__func__", one)
        if isinstance(wrapped, Rule):
            raise RegistrationError(
                f"{base.__qualname__}, a base of {name}, has the rule {wrapped.text!r} and is no "
                f"kernel, so that it would not be asked; derive {base.__qualname__} from "
                f"kernel_api.Kernel"
            )


def _unguarded(cls: type) -> Callable[..., Any] | None:
    """The ``compile`` of a class, if its body has it or a base that is no kernel."""
    owner = next(base for base in cls.__mro__ if "compile" in vars(base))
    if owner is not cls and isinstance(owner, KernelType):
        return None
    hook: Callable[..., Any] = vars(owner)["compile"]
    return hook


def _inherited_rules(cls: type) -> tuple[Rule, ...]:
    """The rules of a class and its bases, base first."""
    bases = reversed(cls.__mro__)
    return tuple(dict.fromkeys(r for base in bases for r in getattr(base, "_own_rules", ())))


def _guarded(hook: Callable[..., Any]) -> Callable[..., Any]:
    if getattr(hook, "_is_guarded", False):
        return hook

    @functools.wraps(hook)
    def compile(self: Kernel, args: Arguments, cc: CcLike = None) -> CompiledArtifact:
        if _compile_cache.compiling(self):
            result: CompiledArtifact = hook(self, args, cc)
            return result
        return self._compiled(args, cc, hook)

    compile._is_guarded = True  # type: ignore[attr-defined]
    return compile
