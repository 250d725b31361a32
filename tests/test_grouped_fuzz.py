"""Random products of groups: what is accepted is right, what is not is refused by name, and every
answer about a kernel is the same as what the kernel does."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from support.grouped_fuzz import DEFECTS, OF_EACH_FORM, problems
from support.sampling import EVERY

import kernel_api as ka
from kernel_api.arguments.experts import ExpertPointers
from kernel_api.errors import ArgumentError, UnsupportedError
from kernel_api.verification import compare, conduct, prepare

EXAMPLES = 90
#: Kernels that are compiled, of all that were offered.
COMPILED = 4 if EVERY else 2
ARCHITECTURES = ("80", "sm_90a")

repeatedly = settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), deadline=None)


def with_one_of_each_form(test):
    for one in OF_EACH_FORM:
        test = example(one)(test)
    return test


def arguments_of(problem, device="cpu"):
    """None where the problem has a defect, which is refused by name."""
    if problem.defect is None:
        return problem.arguments(device)
    with pytest.raises(ArgumentError) as caught:
        problem.arguments(device)
    assert DEFECTS[problem.defect][1] in str(caught.value)
    return None


def run(kernel, args):
    """What the kernel does to anything but its outputs; those may be at addresses alone."""
    if isinstance(args.out, ExpertPointers):
        kernel.run(args)
        return None
    return conduct(args, lambda: kernel.run(args))


def written(problem, args, name):
    operand = args.outputs[name]
    if name != "out" or not args.out.discrete:
        return operand.tensor[args.rows_written().get(name, ...)]
    if isinstance(operand, ExpertPointers):
        return problem.kept[-1]
    return torch.stack([part.tensor for part in operand.memory])


def judged(problem, args, before):
    """Every output by the error-ratio rule, against the loop."""
    wide = torch.int64 if problem.types[0] == "int8" and not problem.scales else torch.float64
    narrow = torch.float64 if wide is torch.int64 or "float64" in problem.types else torch.float32
    exact, base = (problem.expected(args, before, kind) for kind in (wide, narrow))
    assert set(exact) == set(args.outputs)
    for name, ref in exact.items():
        found = written(problem, args, name)
        assert found.shape == ref.shape, name
        same = base[name].to(found.dtype)
        integers = wide is torch.int64
        unit = 2.0**-50 if narrow is torch.float64 else 2.0**-22
        largest = ref.abs().max() if ref.numel() else 0.0
        allowed = None if integers else torch.full_like(ref, unit * max(1.0, float(largest)))
        verdict = compare(found, ref, same, allowance=allowed)
        assert verdict, f"{name}: {verdict}"


@repeatedly
@given(problems())
@with_one_of_each_form
def test_the_reference_computes_what_it_says_that_it_supports(problem):
    args = arguments_of(problem)
    if args is None:
        return
    offered = ka.get_kernels(args, providers=["reference", "torch"])
    for kernel in offered:
        assert kernel.supports(args)
        args = problem.arguments()
        if not isinstance(args.out, ExpertPointers):
            prepare(args)  # what is added to begins with the same numbers every time
        before = written(problem, args, "out").clone()
        assert run(kernel, args) is None
        judged(problem, args, before)
    (reference,) = (
        one for one in ka.get_kernels(providers=["reference"]) if one.arguments is type(args)
    )
    assert (reference in offered) == bool(reference.supports(args))
    if reference not in offered:
        with pytest.raises(UnsupportedError, match="complex"):
            reference.run(args)


def test_what_kernels_of_the_gpu_are_offered_is_what_they_support_and_compiles():
    chosen, kept = random.Random(0), {}
    families = {}
    for kernel in ka.get_kernels(providers=["cutedsl"]):
        if kernel.arguments is ka.GroupedGemmArguments:
            families.setdefault(kernel.family_name(), []).append(kernel)

    @repeatedly
    @given(problems(often=True))
    @with_one_of_each_form
    def check(problem):
        args = arguments_of(problem, "meta")
        if args is None:
            return
        for cc in ARCHITECTURES:
            offered = ka.get_kernels(args, cc=cc, providers=["cutedsl"])
            told = ka.explain(args, cc=cc, providers=["cutedsl"])
            by_family = {one.family: set(one.kernels) for one in told.accepted}
            assert set().union(*by_family.values()) == set(offered)
            assert all(one.reason and one.rule for one in told.rejected)
            assert not set(by_family) & {one.family for one in told.rejected}
            for kernel in chosen.sample(offered, min(5, len(offered))):
                assert kernel.supports(args)
            for one in told.accepted:
                kept.setdefault((cc, one.family), (chosen.choice(one.kernels), args))
            if args.epilogue is not None:
                continue
            for name, kernels in families.items():
                for kernel in chosen.sample(kernels, 5):
                    supported = bool(kernel.supports(args)) and runs_on(kernel, cc)
                    assert supported == (kernel in by_family.get(name, ()))

    check()
    assert {name for _, name in kept} == set(families)
    for (cc, _), (kernel, args) in chosen.sample(sorted(kept.items(), key=str), COMPILED):
        assert not kernel.compile(args, cc=cc).resources.spill_bytes


def runs_on(kernel, cc):
    return kernel.metadata.targets == ("sm_80",) or cc == "sm_90a"
