"""What is asked of the tuner beside the problems, and the candidates that come of it."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kernel_api._filters import MetadataFilter, filtered
from kernel_api._numbers import whole_number
from kernel_api.arguments import Arguments
from kernel_api.discovery import ProviderChoice, explain, get_kernels
from kernel_api.errors import ArgumentError, DeviceError, NoKernelError
from kernel_api.kernel import Kernel
from kernel_api.provider import providers
from kernel_api.targets import CcLike, target
from kernel_api.tuning._policy import Policy, why_not_on_cpu

#: Puts candidates in the order in which they are begun; all of them.
Order = Callable[[Sequence[Kernel], Arguments], Sequence[Kernel]]

#: The oracle competes only where it is asked for, or alone.
_ORACLE = "reference"


class Candidates(NamedTuple):
    """Kernels for one problem.

    Attributes:
        kernels: Those that compete, in their order.
        default: What is chosen without tuning; the filter or ``providers`` may leave it out.
    """

    kernels: Sequence[Kernel]
    default: Kernel

    @property
    def with_default(self) -> list[Kernel]:
        """All that are measured."""
        left_out = () if self.default in self.kernels else (self.default,)
        return [*self.kernels, *left_out]


@dataclass(frozen=True)
class Choice:
    """What is asked for beside the problems, see :func:`~kernel_api.tuning.autotune`.

    Raises ArgumentError for what is none.
    """

    metadata_filter: MetadataFilter | None = None
    cc: CcLike = None
    providers: ProviderChoice | None = None
    budget_s: float | None = None
    max_candidates: int | None = None
    timeout_s: float = 10.0
    policy: Policy | None = None
    order: Order | None = None

    def __post_init__(self) -> None:
        # What is asked of every problem is refused once, not in the place of each result.
        if self.cc is not None:
            target(self.cc)
        if self.providers is not None:
            if not isinstance(self.providers, (str, type)) and isinstance(self.providers, Iterable):
                object.__setattr__(self, "providers", list(self.providers))  # an iterator ends
            providers(self.providers)
        # Numbers of NumPy become Python's, which JSON has.
        if self.budget_s is not None:
            object.__setattr__(self, "budget_s", _seconds("budget_s", self.budget_s))
        object.__setattr__(self, "timeout_s", _seconds("timeout_s", self.timeout_s))
        if self.max_candidates is not None:
            object.__setattr__(self, "max_candidates", _count(self.max_candidates))
        if not isinstance(self.policy, (Policy, type(None))):
            raise ArgumentError(
                f"policy is {self.policy!r}; expected a Policy: pass one such as "
                f"Policy(launches='eager'), or leave it out"
            )
        if self.order is not None and not callable(self.order):
            raise ArgumentError(
                f"order is {self.order!r}; expected a function of kernels and arguments: pass one "
                f"such as kernel_api.tuning.heuristics.ranked, or leave it out"
            )

    def policy_on(self, device: str) -> Policy:
        """How it is measured there. Raises ArgumentError for what there is not on the CPU."""
        policy = self.policy or Policy.usual(device)
        if device == "cpu":
            for name, value in policy.to_dict().items():
                why = why_not_on_cpu(name, value)
                if why is not None:
                    raise ArgumentError(
                        f"policy has {name} = {value!r}, but {why}: pass one such as "
                        f"Policy(launches='eager', l2='warm'), or leave it out"
                    )
        return policy

    def candidates(self, args: Arguments, device: str) -> Candidates:
        """In the order of the performance model, or the one that is asked for.

        Raises NoKernelError; ArgumentError if ``order`` gives others than it got; DeviceError for
        an architecture where it is measured on the CPU.
        """
        kind = device.partition(":")[0]
        if self.cc is not None and kind == "cpu":
            raise DeviceError(
                f"cc is {self.cc!r} but the problem is measured on the CPU, which is of no "
                f"architecture; leave it out, or measure on a GPU"
            )
        able = self._able(args, kind, self.providers)
        kept = filtered(able, self.metadata_filter)
        if self.providers is None:
            kept = _ready(_without_oracle(kept))
        if not kept:
            raise NoKernelError(explain(args, self.metadata_filter, self.cc, self.providers))
        # KERNEL_API_PROVIDERS may leave out of "all" those that are named.
        of_all = self._able(args, kind, None) if self.providers is not None else able
        default = _without_oracle(of_all or able)[0]
        return Candidates(_first(self._ordered(kept, args), self.max_candidates, default), default)

    def _able(self, args: Arguments, kind: str, chosen: ProviderChoice | None) -> list[Kernel]:
        found = get_kernels(args, cc=self.cc, providers=chosen)
        return [kernel for kernel in found if kind in kernel.devices]

    def _ordered(self, kernels: list[Kernel], args: Arguments) -> list[Kernel]:
        if self.order is None:
            return kernels
        given = self.order(kernels, args)
        found = list(given) if isinstance(given, Iterable) else [given]
        strange = [one for one in found if not isinstance(one, Kernel)]
        if strange:
            raise ArgumentError(f"order gave a {type(strange[0]).__name__}; expected the kernels")
        if len(found) != len(kernels) or set(found) != set(kernels):
            raise ArgumentError(
                f"order gave {len(found)} kernels that are not the {len(kernels)} which it got; "
                f"expected the same ones: leave out candidates by metadata_filter"
            )
        return found


def _without_oracle(kernels: list[Kernel]) -> list[Kernel]:
    return [k for k in kernels if type(k).provider_name() != _ORACLE] or kernels


def _ready(kernels: list[Kernel]) -> list[Kernel]:
    """Without those that compile as they run: one takes longer than all others together."""
    return [kernel for kernel in kernels if not kernel.compiles_as_it_runs] or kernels


def _first(kernels: Sequence[Kernel], count: int | None, default: Kernel) -> list[Kernel]:
    """The first so many, the first of every provider, and the default if it is among them.

    Of kernels of one design, which ask different things of operands, the first comes before all
    second ones.
    """
    if count is None or len(kernels) <= count:
        return list(kernels)
    designs = {(type(kernel), kernel.metadata.design): kernel for kernel in reversed(kernels)}
    is_first = {id(kernel) for kernel in designs.values()}
    ordered = sorted(kernels, key=lambda kernel: id(kernel) not in is_first)
    wanted = {id(kernel) for kernel in (*ordered[:count], default)}
    providers = {type(kernel).provider_name(): kernel for kernel in reversed(kernels)}
    wanted |= {id(kernel) for kernel in providers.values()}
    return [kernel for kernel in kernels if id(kernel) in wanted]


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            if 0 < (found := float(value)) < math.inf:
                return found
    raise ArgumentError(f"{name} is {value!r}; expected more than 0, and finite: pass seconds")


def _count(value: Any) -> int:
    count = whole_number(value)
    if count is None or count < 1:
        raise ArgumentError(
            f"max_candidates is {value!r}; expected more than 0, a whole number: pass one, or None "
            f"for all"
        )
    return count
