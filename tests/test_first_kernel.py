"""One kernel for arguments is the first of all that can, and few others are asked for it."""

import copy
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from support.benchmarks import script
from support.kernels import CudaGemm
from support.sampling import some
from support.strategies import gemm_signatures

import kernel_api as ka
from kernel_api import _first_kernel, discovery, fusions
from kernel_api._catalogue import Catalogue, look_of
from kernel_api._first_kernel import first_kernel
from kernel_api._offer import Offer
from kernel_api.errors import PluginWarning
from kernel_api.providers.cutedsl import CuTeDSLProvider
from kernel_api.providers.cutedsl.gemm.fusing import FusedGemm
from kernel_api.providers.cutedsl.gemm.sm90 import Sm90Gemm
from kernel_api.providers.torch import TorchProvider
from kernel_api.status import Status

SUITES = (
    *("gemm_fp8", "gemm_other", "gemm_unaligned", "fusion_dense", "gemm_grouped"),
    *("gemm_grouped_fused", "sdpa_short", "sdpa_options", "sdpa_packed", "sdpa_backward"),
    *("norm", "norm_quantize", "elementwise", "indexed_rows"),
)


def product(M=300, N=512, K=768, device="meta"):
    A, B = (torch.empty(n, K, dtype=torch.bfloat16, device=device) for n in (M, N))
    return ka.GemmArguments(A, B.T, A.new_empty(M, N))


def listed(args, cc):
    return next(iter(ka.get_kernels(args, cc=cc)), None)


@pytest.fixture
def asked(monkeypatch):
    """The questions that have to be put to all."""
    discovery._surveys.clear()
    found, ask = [], ka.get_kernels

    def get_kernels(args, **how):
        found.append(args)
        return ask(args, **how)

    monkeypatch.setattr(discovery, "get_kernels", get_kernels)
    return found


def test_it_is_the_first_of_all_for_any_product(asked):
    @settings(max_examples=150, suppress_health_check=list(HealthCheck))
    @given(gemm_signatures())
    def check(args):
        for cc in (None,) if args.device.type == "cpu" else (None, "sm_90a", 80):
            discovery._surveys.clear()
            assert first_kernel(args, cc) == listed(args, cc)

    check()


@pytest.mark.parametrize("suite", SUITES)
def test_it_is_the_first_of_all_for_all_that_is_timed(suite, asked):
    problems = some(script(suite).SUITE.problems, 6)
    for problem in problems:
        for cc in ("sm_90a", 80):
            args = problem.arguments("meta")
            assert first_kernel(args, cc) == listed(args, cc)
    assert len(asked) <= len(problems)  # where nothing of ours can, as of 8 bits on sm_80


@pytest.mark.parametrize("N", [2, 8, 24, 96])
def test_rows_that_narrow_vectors_move_faster_are_moved_so(N, asked):
    x, index = (torch.empty(64, n, device="meta") for n in (N, 1))
    args = ka.GatherRowsArguments(x.bfloat16(), x.bfloat16(), index.int())
    discovery._surveys.clear()
    assert first_kernel(args, 90) == listed(args, 90) and not asked


def of_less_alignment(variants):
    for variant in variants:
        yield from ((variant.kernel, laxer.kernel) for laxer in variant.laxer)
        yield from of_less_alignment(variant.laxer)


def pairs(args, cc):
    """A kernel, and the same design for less alignment."""
    _, target = discovery.question(args, cc)
    for family in CuTeDSLProvider.families():
        fits = isinstance(args, family.arguments) and family.class_status(args, target)
        if fits and family.faster_if_aligned:
            catalogue = discovery.catalogue_of(family)
            fitting = catalogue.fitting(args, target, look_of(args))
            yield from of_less_alignment(catalogue.leading(args, target, fitting))


def test_families_that_say_so_are_not_expected_to_be_faster_for_less_alignment():
    seen = 0
    for suite in SUITES:
        for problem in some(script(suite).SUITE.problems, 6):
            args = problem.arguments("meta")
            for strict, lax in (*pairs(args, 90), *pairs(args, 80)):
                assert lax.metadata.design == strict.metadata.design
                assert lax.predict(args) >= strict.predict(args), (strict, lax)
                seen += 1
    assert seen > 1000


def test_few_are_asked(monkeypatch, asked):
    judged, judge = [], ka.Kernel.status_behind_operands

    def status(kernel, *given):
        judged.append(kernel)
        return judge(kernel, *given)

    monkeypatch.setattr(ka.Kernel, "status_behind_operands", status)
    monkeypatch.setattr(TorchProvider, "families", None)
    kernel = first_kernel(product(), "sm_90a")
    assert len(judged) < 20 and not asked
    monkeypatch.undo()
    assert kernel == listed(product(), "sm_90a")


def test_families_for_other_types_are_asked_nothing(monkeypatch, asked):
    families, status = [], FusedGemm.class_status.__func__

    def class_status(family, *given, **how):
        families.append(family.family)
        return status(family, *given, **how)

    monkeypatch.setattr(FusedGemm, "class_status", classmethod(class_status))
    assert first_kernel(product(M=301), "sm_90a") is not None and not asked
    assert sorted(families) == ["sm80.gemm", "sm90.gemm", "sm90.gemm_repacked"]


def test_a_rule_that_is_over_no_operands_is_asked_once_for_all(monkeypatch, asked):
    catalogue = Catalogue(Sm90Gemm)
    rule = Sm90Gemm.operand_rules[0][1]
    assert not rule.needs_operands
    answers = [False, True]

    def predicate(args):
        return answers.pop()

    monkeypatch.setattr(
        catalogue,
        "_of_all",
        [(one, predicate if one is rule else ask) for one, ask in catalogue._of_all],
    )
    for leading in (True, False):
        args = product(M=302 + leading)
        fitting = catalogue.fitting(args, None, look_of(args))
        assert len(fitting) > 1
        assert bool(catalogue.leading(args, None, fitting)) is leading
    assert not answers


def attention(D, D_v=None, S=300):
    q, v = (torch.empty(1, 4, S, n, dtype=torch.bfloat16, device="meta") for n in (D, D_v or D))
    return ka.SdpaArguments(q, q, v, torch.empty_like(v))


def expected_of(monkeypatch, args):
    """The kernels whose time is looked up as the first one is looked for."""
    found, seconds = [], _first_kernel._seconds
    with monkeypatch.context() as patch:
        patch.setattr(
            _first_kernel, "_seconds", lambda k, args: (found.append(k), seconds(k, args))[1]
        )
        discovery._surveys.clear()
        assert first_kernel(args, 90) is not None
    return found


def test_kernels_for_other_heads_take_no_time(monkeypatch, asked):
    for D, D_v, room in ((64, 64, 64), (128, 128, 128), (40, 24, 64), (200, 8, 256)):
        args = attention(D, D_v)
        kernels = expected_of(monkeypatch, args)
        assert {kernel.metadata.design.head_dim[0] for kernel in kernels} == {room}
        assert first_kernel(args, 90) == listed(attention(D, D_v), 90)
    assert not asked


def test_designs_for_other_rows_or_other_epilogues_take_no_time(monkeypatch, asked):
    def norm(N):
        x = torch.empty(300, N, device="meta")
        return ka.RmsNormArguments(x, x, x[0])

    def pairs_of(A, B):
        return fusions.gemm_swiglu(A, B, out=A.new_empty(300, 512))

    for N in (512, 4096, 512):
        designs = {kernel.metadata.design for kernel in expected_of(monkeypatch, norm(N))}
        assert all(not one.elements or N <= one.room < 2 * N for one in designs)
        assert first_kernel(norm(N), 90) == listed(norm(N), 90)
    plain, B = product(), torch.empty(1024, 768, dtype=torch.bfloat16, device="meta").T
    paired = pairs_of(plain.A.tensor, B)
    assert len(expected_of(monkeypatch, paired)) < len(expected_of(monkeypatch, plain)) / 2
    assert first_kernel(paired, 90) == listed(pairs_of(plain.A.tensor, B), 90)
    assert not asked


def test_those_of_less_alignment_are_asked_where_those_of_more_cannot(monkeypatch, asked):
    judge = ka.Kernel.status_behind_operands

    def status(kernel, *given):
        aligned = kernel.metadata.operands.out.divisibility > 1
        return Status.fail("out is aligned", rule="test") if aligned else judge(kernel, *given)

    monkeypatch.setattr(ka.Kernel, "status_behind_operands", status)
    kernel = first_kernel(product(302), "sm_90a")
    assert isinstance(kernel, Sm90Gemm) and not asked
    assert kernel == listed(product(302), "sm_90a")


class Fastest(CudaGemm):
    def predict(self, args):
        return 0.0


def test_kernels_of_others_are_among_all(registry, asked):
    registry.register(Fastest)
    args = product()
    kernel = first_kernel(args, 90)
    assert type(kernel) is Fastest and asked == [args]


def test_families_that_a_provider_finds_anew_are_asked(registry, asked):
    found = []

    class Growing(ka.Provider):
        name, rank = "growing", -1

        @classmethod
        def families(cls):
            return list(found)

    class Mine(Fastest):
        _provider = Growing

    assert first_kernel(product(), 90) == listed(product(), 90)
    found.append(Mine)
    assert isinstance(first_kernel(product(301), 90), Mine)
    assert isinstance(listed(product(301), 90), Mine)


def test_one_of_ours_that_raises_is_warned_of(monkeypatch, asked):
    def predict(kernel, args):
        raise ValueError("no such size")

    monkeypatch.setattr(Sm90Gemm, "predict", predict)
    args = product(301)
    with pytest.warns(PluginWarning, match="no such size"):
        kernel = first_kernel(args, "sm_90a")
    assert asked == [args] and kernel == listed(args, "sm_90a")


def test_where_none_can_there_is_none(asked):
    A = torch.empty(8, 8, dtype=torch.complex64, device="meta")
    args = ka.GemmArguments(A, A.clone(), A.clone())
    assert (first_kernel(args, 90) is None) == (not ka.get_kernels(args, cc=90))


def test_what_is_no_arguments_object_is_refused():
    with pytest.raises(ka.errors.ArgumentError, match="expected an arguments object"):
        first_kernel(torch.empty(3))


def test_arguments_carry_it(monkeypatch, asked):
    args, other = product(), product(M=900)
    first = first_kernel(args, "sm_90a")
    monkeypatch.setattr(_first_kernel, "_asked_in_order", lambda *given: None)
    monkeypatch.setattr(discovery, "is_remembered", lambda key: False)
    assert first_kernel(args, "sm_90a") is first and not asked
    for more in ((args, 80), (other, "sm_90a")):
        assert first_kernel(*more) is not None
        assert asked.pop() is more[0]


def test_copies_of_arguments_carry_nothing(registry, asked):
    registry.provider()  # of no module
    args = ka.GemmArguments(*(torch.ones(8, 8) for _ in range(3)))
    assert first_kernel(args) is not None
    for copied in (pickle.loads(pickle.dumps(args)), copy.copy(args), copy.deepcopy(args)):
        assert not copied._accepted and copied.sizes == args.sizes
        assert first_kernel(copied) == first_kernel(args)


def test_what_arguments_carry_is_offered_again(asked):
    args = ka.GemmArguments(*(torch.ones(8, 8) for _ in range(3)))
    kernel = first_kernel(args)
    for offer in (None, Offer((), -1)):
        args._accepted[Offer] = offer
        assert first_kernel(args) is kernel and args._accepted[Offer].holds(kernel)


@pytest.mark.parametrize("rows", [512, 1024])
def test_sums_over_groups_are_estimated_by_what_is_told(rows, asked):
    """Of numbers of rows that are nearly the same, the first of which is less than a limit."""
    for less in (15, 8, 1, 0):
        T = 2 * rows - less
        A, B = (torch.empty(T, n, dtype=torch.bfloat16, device="meta") for n in (4096, 2048))
        out, offsets = A.new_empty(2, 4096, 2048), torch.empty(2, dtype=torch.int32, device="meta")
        args = ka.GroupedGemmArguments(A.T, B, out, offsets)
        discovery._surveys.clear()
        assert first_kernel(args, "sm_90a") == listed(args, "sm_90a")


def test_arguments_carry_that_they_were_offered_it(asked):
    args = product(device="cpu")
    kernel = first_kernel(args)
    assert args._accepted[Offer].holds(kernel) and not asked
    kernel.run(args)
