"""Where something is measured: what times depend on beside the kernel and the problem."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernel_api import _fingerprint, devices
from kernel_api._cached_property import cached_property
from kernel_api.errors import ArgumentError, DeviceError
from kernel_api.tuning._canonical import as_object, as_texts, canonical, digest, taken
from kernel_api.tuning._policy import Policy

#: The name of every CPU.
CPU = "cpu"


@dataclass(frozen=True)
class Environment:
    """What times depend on beside the kernel and the problem.

    Attributes:
        gpu: The GPU's name; ``"cpu"`` for the CPU, which has none of the next three.
        compute_capability: As ``"9.0"``.
        multiprocessors: Those among which kernels share their work.
        driver: The driver's major version, such as 580; None where it cannot be found.
        packages: Versions by distribution, and the DSL's code generator.
        policy: How it is measured.
    """

    gpu: str
    compute_capability: str | None
    multiprocessors: int | None
    driver: int | None
    packages: Mapping[str, str]
    policy: Policy

    @classmethod
    def of(cls, device: Any, policy: Policy) -> Environment:
        """The environment of a device of this process: a torch device, or its name.

        Neither loads torch nor asks a driver for the CPU.

        Raises:
            ArgumentError: neither the CPU nor a CUDA device.
            DeviceError: a CUDA device where there is none.
        """
        kind, _, index = str(device).partition(":")
        if kind == "cpu":
            return cls(CPU, None, None, None, packages(), policy)
        if kind != "cuda" or not (index.isdecimal() or not index):
            raise ArgumentError(
                f"device is {str(device)!r}; nothing can be measured there, pass 'cpu', 'cuda' or "
                f"'cuda:0'"
            )
        if not devices.cuda_available():
            raise DeviceError(f"device is {str(device)!r} but torch sees no GPU; pass 'cpu'")
        import torch

        number = int(index) if index else torch.cuda.current_device()
        if number >= torch.cuda.device_count():
            raise DeviceError(
                f"device is {str(device)!r} but there are {torch.cuda.device_count()} GPUs; "
                f"pass a smaller number"
            )
        target = devices.device_target(number)
        return cls(
            devices.gpu_name(number),
            f"{target.major}.{target.minor}",
            devices.sm_count(number),
            devices.driver_major(),
            packages(),
            policy,
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "gpu": self.gpu,
            "compute_capability": self.compute_capability,
            "multiprocessors": self.multiprocessors,
            "driver": self.driver,
            "packages": dict(self.packages),
            "policy": self.policy.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Environment:
        """Inverse of ``to_dict``; raises ArgumentError for what is no environment."""
        fields = as_object(data, "environment")
        nothing = type(None)
        return cls(
            taken(fields, "gpu", str),
            taken(fields, "compute_capability", str, nothing),
            taken(fields, "multiprocessors", int, nothing),
            taken(fields, "driver", int, nothing),
            as_texts(taken(fields, "packages", dict), "packages"),
            Policy.from_dict(as_object(taken(fields, "policy", dict), "policy")),
        )

    def to_json(self) -> str:
        """The canonical text, the same for equal environments."""
        return canonical(self.to_dict())

    @cached_property
    def digest(self) -> str:
        """A short hash of the canonical text; the name of a folder of the store."""
        return digest(self.to_json())

    @cached_property
    def gpu_and_policy_digest(self) -> str:
        """As ``digest``, for whatever driver and packages: what a kernel is made of says its own
        fingerprint, and no package beside has a part in how long it takes on a GPU."""
        known = self.to_dict()
        return digest(canonical({n: known[n] for n in known if n not in ("driver", "packages")}))

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        driver = "" if self.driver is None else f", driver {self.driver}"
        return f"{self.gpu}{driver}, {self.policy.launches}, {self.policy.l2} L2 ({self.digest})"


@functools.lru_cache(maxsize=1)
def packages() -> Mapping[str, str]:
    """Versions of what compiles, runs and competes."""
    found = _fingerprint.versions_of((*_fingerprint.DISTRIBUTIONS, "torch"))
    return {**found, **_fingerprint.code_generator()}
