"""The tuner, on kernels of the CPU: what it measures, keeps and survives."""

import pytest
import torch
from support import hostile_kernels as hostile

import kernel_api as ka
from kernel_api.errors import ArgumentError, FilterError, NoKernelError
from kernel_api.tuning import Policy, Status, Store

QUICK = Policy(launches="eager", l2="warm", rounds=8)


@pytest.fixture(autouse=True)
def log(cache_directory, monkeypatch):
    monkeypatch.setenv(hostile.LOG, str(cache_directory.parent / "runs"))


def arguments(M=48, N=40, K=56):
    return ka.GemmArguments(torch.randn(M, K), torch.randn(K, N), torch.zeros(M, N))


def tune(args, provider, **options):
    options.setdefault("policy", QUICK)
    return ka.autotune(args, providers=[provider], **options)


def by_class(result):
    return {
        row.kernel.metadata["kernel_class"]["class"].partition(":")[2]: row for row in result.rows
    }


def test_the_fastest_right_kernel_is_found_whatever_the_others_do(registry):
    right = (hostile.SlowGemm, hostile.FastGemm, hostile.SlowerGemm)
    provider = registry.register(*hostile.FATES, *right)
    args = arguments()
    before = [tensor.clone() for tensor in args.tensors]
    result = tune(args, provider, timeout_s=2.0)
    assert type(result.kernel) is hostile.FastGemm
    found = by_class(result)
    assert len(found) == len(hostile.FATES) + 3
    for kernel_class, (status, words) in hostile.FATES.items():
        row = found[kernel_class.__name__]
        assert (row.status.value, row.times_us) == (status, ()), row
        assert words in row.message
    for kernel_class in right:
        row = found[kernel_class.__name__]
        assert row.passed and row.rounds >= QUICK.rounds and row.error_ratio <= 1
    assert found["SlowGemm"].median_us > 2000 > found["FastGemm"].median_us
    assert all(torch.equal(one, tensor) for one, tensor in zip(before, args.tensors, strict=True))
    assert [row.passed for row in result.rows] == [True] * 3 + [False] * len(hostile.FATES)


def test_what_was_measured_is_not_measured_again(registry):
    provider = registry.register(hostile.SlowGemm, hostile.RaisingGemm)
    first = tune(arguments(), provider)
    assert first.measured == 2 and set(hostile.runs()) == {"SlowGemm", "RaisingGemm"}
    count = len(hostile.runs())
    again = tune(arguments(), provider)
    assert again.measured == 0 and again.rows == first.rows and len(hostile.runs()) == count
    assert tune(arguments(M=47), provider).measured == 2
    assert tune(arguments(), provider, policy=Policy("eager", "warm", rounds=7)).measured == 2


def test_a_kernel_that_is_added_is_the_only_one_that_is_measured(registry):
    provider = registry.register(hostile.SlowGemm, hostile.SlowerGemm)
    tune(arguments(), provider)
    count = len(hostile.runs())
    provider.register(hostile.FastGemm)
    result = tune(arguments(), provider)
    assert result.measured == 1 and type(result.kernel) is hostile.FastGemm
    assert set(hostile.runs()[count:]) == {"FastGemm"} and len(result.rows) == 3


def test_what_was_tuned_is_looked_up_by_problem_and_by_the_nearest_size(registry):
    provider = registry.register(hostile.SlowGemm, hostile.FastGemm)
    args = arguments()
    assert ka.tuned(args) is None
    tune(args, provider, policy=None)
    assert type(ka.tuned(arguments())) is hostile.FastGemm
    assert type(ka.tuned(arguments(M=90))) is hostile.FastGemm
    assert ka.tuned(arguments(M=97)) is None  # more than twice


def test_the_nearest_problem_is_looked_for_only_if_the_very_one_is_unknown(registry, monkeypatch):
    tune(arguments(), registry.register(hostile.FastGemm), policy=None)
    monkeypatch.setattr(Store, "nearest", None)
    assert type(ka.tuned(arguments())) is hostile.FastGemm


def test_one_call_forms_take_what_was_tuned(registry, monkeypatch):
    A, B = torch.randn(48, 56), torch.randn(56, 40)
    out = ka.ops.gemm(A, B)
    provider = registry.register(hostile.FastGemm, hostile.SlowGemm)
    tune(ka.GemmArguments(A, B, out), provider, policy=None)
    count = len(hostile.runs())
    torch.testing.assert_close(ka.ops.gemm(A, B), A @ B)
    torch.testing.assert_close(ka.ops.gemm(A, B), A @ B)
    assert hostile.runs()[count:] == ["FastGemm"] * 2


def test_without_a_cache_it_tunes_all_the_same(registry, monkeypatch, cache_directory):
    monkeypatch.setenv("KERNEL_API_DISABLE_CACHE", "1")
    provider = registry.register(hostile.FastGemm)
    assert tune(arguments(), provider).measured == 1
    assert tune(arguments(), provider).measured == 1
    assert not cache_directory.exists()


def test_none_that_passes_is_an_error_with_every_status(registry):
    provider = registry.register(hostile.WrongGemm, hostile.RaisingGemm)
    with pytest.raises(NoKernelError) as caught:
        tune(arguments(), provider)
    text = str(caught.value)
    assert text.startswith("none of 2 candidates passed\n")
    assert ": WRONG: " in text and ": RUNTIME_ERROR: ValueError: the grid has no blocks" in text


def test_several_problems_have_each_its_result_or_error(registry):
    provider = registry.register(hostile.FastGemm)
    wrong = ka.GemmArguments(*(torch.zeros(8, 8, dtype=torch.int8),) * 2, torch.zeros(8, 8).int())
    first, second, third = tune([arguments(), wrong, arguments(M=5)], provider)
    assert (first.measured, third.measured) == (1, 1) and first.problem != third.problem
    assert isinstance(second, NoKernelError)
    assert tune([], provider) == []


def test_meta_tensors_will_do(registry):
    provider = registry.register(hostile.FastGemm)
    meta = ka.GemmArguments(*(tensor.to("meta") for tensor in arguments().tensors))
    result = tune(meta, provider)
    assert result.measured == 1 and result.environment.gpu == "cpu"
    assert tune(arguments(), provider).measured == 0  # the same problem


def test_the_filter_the_number_and_the_time_choose_candidates(registry):
    provider = registry.register(hostile.SlowGemm, hostile.SlowerGemm, hostile.FastGemm)
    args = arguments()
    result = tune(args, provider, max_candidates=2)
    assert set(by_class(result)) == {"SlowGemm", "SlowerGemm"}
    only = lambda metadata: metadata.kernel_class is hostile.FastGemm  # noqa: E731
    assert set(by_class(tune(args, provider, metadata_filter=only))) == {"FastGemm"}
    result = tune(arguments(M=3), provider, budget_s=1e-6)
    assert set(by_class(result)) == {"SlowGemm"}
    with pytest.raises(NoKernelError, match="metadata_filter refused"):
        tune(args, provider, metadata_filter=lambda metadata: False)
    with pytest.raises(FilterError):
        tune(args, provider, metadata_filter=lambda metadata: metadata.nothing)


def test_the_first_of_every_provider_competes(registry):
    one, other = registry.register(hostile.SlowGemm, hostile.SlowerGemm), registry.provider()
    other.register(hostile.FastGemm)
    result = ka.autotune(arguments(), providers=[one, other], policy=QUICK, max_candidates=1)
    assert set(by_class(result)) == {"SlowGemm", "FastGemm"}


@pytest.mark.parametrize("name", ["budget_s", "timeout_s", "max_candidates"])
def test_limits_are_checked(name):
    with pytest.raises(ArgumentError, match=f"{name} is 0; expected more than 0"):
        ka.autotune(arguments(), **{name: 0})


def test_more_candidates_than_finalists_are_timed_in_heats(registry):
    result = tune(arguments(), registry.register(hostile.DawdlingGemm))
    rounds = {row.kernel.rebuild().metadata.design.tile_shape[0]: row.rounds for row in result.rows}
    assert result.kernel.metadata.design.tile_shape[0] == 0
    finalists = {extra for extra, count in rounds.items() if count >= QUICK.rounds}
    assert finalists == {0, 1, 2, 3, 4, 9}  # the first of the order always comes to the final
    assert len(result.rows) == 10 and result.rows[0].median_us < result.rows[-1].median_us


def test_status_is_public():
    assert {one.value for one in Status} >= {status for status, _ in hostile.FATES.values()}
