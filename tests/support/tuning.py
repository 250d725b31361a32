"""Problems and measurements for the tests of kernel_api.tuning."""

import math

import torch

import kernel_api as ka
from kernel_api.tuning import Environment, KernelIdentity, Measurement, Policy, Problem, Status
from kernel_api.tuning._lookup import nearest_on

ENVIRONMENT = Environment.of("cpu", Policy())
OTHER = Environment.of("cpu", Policy(l2="warm"))


def tensor(*shape, dtype=torch.bfloat16, offset=0):
    """A meta tensor; an offset in elements misaligns it."""
    storage = torch.empty(math.prod(shape) + offset, dtype=dtype, device="meta")
    return storage[offset:].view(shape)


def arguments(M=256, N=512, K=128, L=None, *, dtype=torch.bfloat16, offset=0, **options):
    batch = () if L is None else (L,)
    return ka.GemmArguments(
        tensor(*batch, M, K, dtype=dtype, offset=offset),
        tensor(*batch, K, N, dtype=dtype),
        tensor(*batch, M, N, dtype=dtype),
        **options,
    )


def problem(*sizes, **options):
    return Problem.of(arguments(*sizes, **options))


def measured(kernel, what, *times, environment=ENVIRONMENT, **fields):
    """PASSED with times, else with the status and message that are given."""
    fields.setdefault("status", Status.PASSED)
    if fields["status"] is not Status.PASSED:
        fields.setdefault("message", "it is said why")
    return Measurement(
        KernelIdentity.of(kernel), what, environment.digest, times_us=times, **fields
    )


def nearest(store, to):
    """The problem whose rows a lookup goes by where it has none."""
    found = nearest_on(store, to)
    return None if found is None else found.rows[0].problem


def files(store):
    """All of a store, sorted."""
    return sorted(path for path in store.folder.rglob("*") if path.is_file())


def some_kernels():
    """Three, for any problem of these."""
    found = ka.get_kernels(arguments(), cc=90, providers=["cutedsl"])[:3]
    assert len(found) == 3
    return found
