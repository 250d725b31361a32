"""A query finds exactly the kernels of the enumeration that support the arguments."""

import itertools
import random
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from support.data import arguments_for, gemm_arguments
from support.kernels import CpuGemm, CudaGemm, LoopGemm
from support.registry import restored_registry
from support.sampling import EVERY, some
from support.strategies import gemm_signatures

import kernel_api as ka
from kernel_api.space import Miss, rule

#: Kernels of each family asked one by one in each of the 500 examples, beside those offered.
ASKED = 10


class EvenSizes(CudaGemm):
    """A rule that reads the arguments."""

    @rule("M and N are even")
    def _(args):
        return (args.M % 2 == 0 and args.N % 2 == 0) or Miss(f"they are {args.M} and {args.N}")

    def predict(self, args):
        return 1.0 / self.metadata.design.tile_shape[0]


class FlatLoop(LoopGemm):
    """A check that reads the rank."""

    def _supports(self, args):
        return ka.Status.success() if args.A.rank == 2 else ka.Status.fail("rank 2 only")


@pytest.fixture(scope="module")
def enumeration():
    """All that is registered, and families of every kind beside it."""
    with restored_registry() as registry:
        registry.register(CudaGemm, EvenSizes, CpuGemm, LoopGemm, FlatLoop)
        yield ka.get_kernels()


def by_class(kernels):
    found = defaultdict(list)
    for kernel in kernels:
        found[type(kernel)].append(kernel)
    return list(found.values())


def test_query_equals_enumeration_filtered_by_supports(enumeration):
    chosen, families, registered = random.Random(0), by_class(enumeration), set(enumeration)
    supported = 0

    @settings(max_examples=250, suppress_health_check=list(HealthCheck))
    @given(gemm_signatures())
    def check(args):
        nonlocal supported
        offered = ka.get_kernels(args)
        assert len(offered) == len(set(offered))
        asked = set(offered)
        for kernels in families:
            asked.update(chosen.sample(kernels, min(ASKED, len(kernels))))
        assert set(offered) == {kernel for kernel in asked if kernel.supports(args)}
        assert registered.issuperset(offered)
        supported += bool(offered)

    check()
    assert supported > 125


SIZES_ASKED = {"aligned": (256, 256, 256), "odd": (255, 257, 129)}
TYPES = ("bf16-bf16-bf16", "f16-f16-f32", "f32-f32-f32", "i8-i8-i32")
COMMON = itertools.product(SIZES_ASKED, TYPES, ("ttt", "tnt", "nnn"))


@pytest.mark.parametrize(("sizes", "types", "layouts"), some(COMMON, 4))
def test_query_equals_the_whole_enumeration_for_common_signatures(
    enumeration, sizes, types, layouts
):
    wanted = {"types": types.split("-"), "layouts": layouts}
    args = gemm_arguments(*SIZES_ASKED[sizes], **wanted, device="meta")
    assert set(ka.get_kernels(args)) == {k for k in enumeration if k.supports(args)}


#: M, N and batch of what every kernel is offered.
SIZES = [(M, N, batch) for M, N in ((64, 256), (16, 64)) for batch in (1, None)]


def takes_some(kernel, made, device="meta"):
    """Of arguments as it asks for them. They are made when all before them are refused, and kept:
    most kernels take the first."""
    for i, (M, N, batch) in enumerate(SIZES):
        if i == len(made):
            made.append(arguments_for(kernel, M, N, 8192, batch, device=device))
        if kernel.supports(made[i]):
            return True
    return False


def is_offered_on_the_cpu(kernel):
    """What cannot on a GPU, as some layouts of torch's."""
    return "cpu" in kernel.devices and takes_some(kernel, [], "cpu")


def test_every_registered_kernel_is_offered_for_some_arguments(enumeration):
    """No kernel that can never match: 15 % of a registry elsewhere could not."""
    made = defaultdict(list)  # what fits one mostly fits those that ask the same of operands
    never = []
    for kernel in random.Random(0).sample(enumeration, len(enumeration) // (1 if EVERY else 4)):
        asked = type(kernel), kernel.metadata.operands
        if not (
            takes_some(kernel, made[asked])
            or takes_some(kernel, [])
            or is_offered_on_the_cpu(kernel)
        ):
            never.append(kernel)
    assert never == []
