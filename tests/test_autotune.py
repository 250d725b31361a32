"""The tuner, on kernels of the CPU: what it measures, keeps and survives."""

import contextlib
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import hostile_kernels as hostile
from support.kernels import CpuGemm
from support.tuning import measured

import kernel_api as ka
from kernel_api import _disk_cache
from kernel_api.errors import ArgumentError, CacheWarning, DeviceError, FilterError, NoKernelError
from kernel_api.graph import _autotune as graph_autotune
from kernel_api.providers.reference.norm import ReferenceRmsNorm, ReferenceRmsNormBackward
from kernel_api.tuning import (
    Environment,
    Policy,
    Problem,
    Status,
    Store,
    _autotune,
    _lookup,
    _spread,
    _worker,
)

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


def test_inputs_that_a_kernel_changed_before_it_raised_are_made_anew_for_the_next(registry):
    result = tune(arguments(), registry.register(hostile.SpoilingGemm, hostile.FastGemm))
    assert by_class(result)["SpoilingGemm"].message == "ValueError: too late"
    assert by_class(result)["FastGemm"].status is Status.PASSED


def test_inputs_that_a_kernel_changed_while_it_was_timed_are_made_anew_for_all(registry):
    result = tune(arguments(), registry.register(hostile.FastGemm, hostile.SpoilingLaterGemm))
    assert by_class(result)["SpoilingLaterGemm"].message == "the kernel changed its input A"
    assert by_class(result)["FastGemm"].status is Status.PASSED


def test_what_was_measured_is_not_measured_again(registry):
    provider = registry.register(hostile.SlowGemm, hostile.RaisingGemm)
    first = tune(arguments(), provider)
    assert first.measured == 2 and set(hostile.runs()) == {"SlowGemm", "RaisingGemm"}
    count = len(hostile.runs())
    again = tune(arguments(), provider)
    assert again.measured == 0 and again.rows == first.rows and len(hostile.runs()) == count
    assert tune(arguments(M=47), provider).measured == 2
    assert tune(arguments(), provider, policy=Policy("eager", "warm", rounds=7)).measured == 2


def test_what_others_measured_while_it_waited_is_not_measured_again(registry, monkeypatch):
    provider, others = registry.register(hostile.SlowGemm, hostile.FastGemm), []

    @contextlib.contextmanager
    def alone_on(device, halt):
        if not others:
            others.append(None)
            others.append(tune(arguments(), provider))
        yield

    monkeypatch.setattr(_autotune, "alone_on", alone_on)
    result = tune(arguments(), provider)
    assert others[1].measured == 2 and others[1].rows == result.rows
    assert result.measured == 0


def test_what_ran_out_of_memory_is_the_only_failure_that_is_tried_again(registry):
    failing = (hostile.WrongGemm, hostile.RaisingGemm, hostile.UncompilableGemm, hostile.HungryGemm)
    provider = registry.register(hostile.FastGemm, *failing)
    assert tune(arguments(), provider).measured == 5
    count = len(hostile.runs())
    again = tune(arguments(), provider)
    assert again.measured == 1 and set(hostile.runs()[count:]) == {"HungryGemm"}
    assert by_class(again)["HungryGemm"].status is Status.OOM


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", Status.OOM),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", Status.OOM),
        ("CUDA_ERROR_OUT_OF_MEMORY: unable to allocate enough memory", Status.OOM),
        ("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED", Status.RUNTIME_ERROR),
    ],
)
def test_errors_that_tell_of_memory_are_known_by_their_words(text, status):
    assert _worker._status_of(RuntimeError(text)) is status


def test_what_ran_out_of_time_is_tried_again_if_it_is_given_more(registry):
    provider = registry.register(hostile.FastGemm)

    def failed(timeout_s):
        with pytest.raises(NoKernelError) as caught:
            tune(arguments(), provider, timeout_s=timeout_s)
        (row,) = caught.value.rows
        assert row.status is Status.TIMEOUT
        return row

    first = failed(1e-6)
    assert first.timeout_s == 1e-6
    assert failed(1e-6) == failed(5e-7) == first
    longer = failed(2e-6)
    assert longer.timeout_s == 2e-6 and "more than 2e-06 s" in longer.message
    result = tune(arguments(), provider, timeout_s=60)
    assert result.measured == 1 and type(result.kernel) is hostile.FastGemm
    assert tune(arguments(), provider, timeout_s=1e-6).measured == 0


def test_what_is_not_tried_again_for_want_of_time_keeps_its_row(registry):
    failing = (hostile.HungryGemm, hostile.WorkspaceGemm)
    provider = registry.register(hostile.FastGemm, *failing)
    first = tune(arguments(), provider)
    count = len(hostile.runs())
    again = tune(arguments(), provider, budget_s=1e-6)
    assert again.measured == 0 and again.rows == first.rows and len(hostile.runs()) == count
    assert type(again.kernel) is hostile.FastGemm


def test_where_none_passes_one_is_begun_whatever_time_is_left(registry):
    provider = registry.register(hostile.FastGemm, hostile.HungryGemm, hostile.WorkspaceGemm)

    def rows(**options):
        without = lambda metadata: metadata.kernel_class is not hostile.FastGemm  # noqa: E731
        with pytest.raises(NoKernelError) as caught:
            tune(arguments(), provider, metadata_filter=without, **options)
        return {row.kernel.name: row for row in caught.value.rows}

    first, again = rows(), rows(budget_s=1e-6)
    assert first.keys() == again.keys() and {row.status for row in again.values()} == {Status.OOM}
    assert sum(first[name] != row for name, row in again.items()) == 1


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


class ModelledGemm(hostile.FastGemm):
    """With a performance model."""

    def predict(self, args):
        return 1e-3


class PraisedOnGpus(CpuGemm):
    """A kernel of GPUs whose model promises much."""

    devices = ("cuda",)

    def predict(self, args):
        return 1e-9


def test_what_is_not_for_a_device_is_not_taken_for_it(registry):
    tune(arguments(), registry.register(ModelledGemm), policy=None)
    registry.register(PraisedOnGpus)
    args = arguments(M=64)
    meta = ka.GemmArguments(*(torch.empty_like(one, device="meta") for one in args.tensors))
    assert type(ka.get_kernels(meta)[0]) is PraisedOnGpus
    assert type(ka.tuned(args)) is ModelledGemm
    assert type(ka.tuned(meta, "cpu")) is ModelledGemm


def test_the_nearest_problem_is_looked_for_only_if_the_very_one_is_unknown(registry, monkeypatch):
    tune(arguments(), registry.register(hostile.FastGemm), policy=None)
    monkeypatch.setattr(Store, "near", None)
    assert type(ka.tuned(arguments())) is hostile.FastGemm


def test_plans_of_graphs_measure_what_was_measured_of_other_sizes_alone(registry, monkeypatch):
    tune(arguments(), registry.register(hostile.SlowGemm, hostile.FastGemm), policy=None)
    now = SimpleNamespace(kernel="measured now")
    monkeypatch.setattr("kernel_api.tuning.autotune", lambda args: now)

    def kernel_for(M):
        step = SimpleNamespace(build=lambda take: arguments(M=M), with_kernel=lambda kernel: kernel)
        return graph_autotune._tuned(step, torch.device("cpu"))

    assert type(kernel_for(48)) is hostile.FastGemm
    assert kernel_for(90) == "measured now"


def test_one_call_forms_take_what_was_tuned(registry, monkeypatch):
    A, B = torch.randn(48, 56), torch.randn(56, 40)
    out = ka.ops.gemm(A, B)
    provider = registry.register(hostile.FastGemm, hostile.SlowGemm)
    tune(ka.GemmArguments(A, B, out), provider, policy=None)
    count = len(hostile.runs())
    torch.testing.assert_close(ka.ops.gemm(A, B), A @ B)
    torch.testing.assert_close(ka.ops.gemm(A, B), A @ B)
    assert hostile.runs()[count:] == ["FastGemm"] * 2


def test_what_another_process_measured_is_seen_by_whoever_tunes(registry, monkeypatch):
    provider = registry.register(hostile.FastGemm, hostile.SlowGemm)
    args = arguments()
    A, B, out = args.tensors
    assert ka.tuned(args) is None
    ka.ops.gemm(A, B, out=out)
    with monkeypatch.context() as patch:  # as there: nothing is noticed here
        patch.setattr(_lookup, "changed", lambda: None)
        tune(args, provider, policy=None)
    assert ka.tuned(args) is None
    assert tune(args, provider, policy=None).measured == 0
    assert type(ka.tuned(args)) is hostile.FastGemm
    count = len(hostile.runs())
    ka.ops.gemm(A, B, out=out)
    assert hostile.runs()[count:] == ["FastGemm"]


class AnotherRmsNorm(ReferenceRmsNorm):
    """So that every norm has two kernels."""


class AnotherRmsNormBackward(ReferenceRmsNormBackward):
    """The same of its gradient."""


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rmsnorm", ()),
        ("layernorm", ()),
        ("rmsnorm_backward", ("rstd",)),
        ("layernorm_backward", ("mean", "rstd")),
        ("rmsnorm_rht_amax", ("weight", "amax")),
    ],
)
def test_one_call_forms_of_norms_take_what_was_tuned(name, options, registry, monkeypatch):
    registry.register(AnotherRmsNorm, AnotherRmsNormBackward)
    x = torch.randn(4, 32)
    matrices = (x, torch.randn(4, 32)) if "backward" in name else (x,)
    extents = {"weight": 32, "amax": 2}
    given = {one: torch.ones(extents.get(one, 4)) for one in options}
    given["dx" if "backward" in name else "out"] = torch.empty_like(x)
    args = getattr(ka.fusions, name)(*matrices, **given)
    first, *_, last = ka.get_kernels(args)
    ran = []
    monkeypatch.setattr(ka.Kernel, "run", lambda kernel, *given, **how: ran.append(kernel))
    getattr(ka.ops, name)(*matrices, **given)
    here = Environment.of("cpu", Policy.usual("cpu"))
    Store.open(here).record(measured(last, Problem.of(args), 1.0, environment=here))
    _lookup.changed()
    getattr(ka.ops, name)(*matrices, **given)
    assert ran == [first, last]


def test_what_was_tuned_is_of_the_providers_that_are_asked(registry, monkeypatch):
    provider = registry.register(hostile.FastGemm)
    tune(arguments(), provider, policy=None)
    assert type(ka.tuned(arguments())) is hostile.FastGemm
    monkeypatch.setenv("KERNEL_API_PROVIDERS", "torch")
    assert ka.tuned(arguments()) is None
    monkeypatch.setenv("KERNEL_API_PROVIDERS", f"torch,{provider.name}")
    assert type(ka.tuned(arguments())) is hostile.FastGemm


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


def test_problems_that_lie_nowhere_go_to_gpus_that_are_alike(registry, monkeypatch):
    """Of which there are none here: the third device is said to be another one."""
    real_of, taken = Environment.of, []

    def environment_of(device, policy):
        found = real_of("cpu", policy)
        return replace(found, gpu="another") if device == "cpu:2" else found

    def attempted(task, builder, advance):
        taken.append(task.device)
        time.sleep(0.1)

    monkeypatch.setattr(Environment, "of", environment_of)
    monkeypatch.setattr(_spread, "devices_here", lambda: ["cpu", "cpu:1", "cpu:2"])
    monkeypatch.setattr(_spread, "attempted", attempted)
    provider = registry.register(hostile.FastGemm)
    sizes = [[one.to("meta") for one in arguments(M=M).tensors] for M in range(6)]
    tune([ka.GemmArguments(*tensors) for tensors in sizes], provider)
    assert {*taken} == {"cpu", "cpu:1"}


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


def slow_only(metadata):
    return metadata.kernel_class is hostile.SlowGemm


@pytest.mark.parametrize("options", [{}, {"budget_s": 1e-6}, {"max_candidates": 1}])
def test_the_default_is_measured_though_the_filter_leaves_it_out(registry, options):
    classes = (hostile.FastGemm, hostile.SlowerGemm, hostile.SlowGemm)
    provider, args = registry.register(*classes), arguments()
    result = tune(args, provider, policy=None, metadata_filter=slow_only, **options)
    assert type(result.kernel) is hostile.SlowGemm and set(by_class(result)) == {"SlowGemm"}
    assert (
        result.measured == 1
        and result.default.kernel.rebuild() == ka.get_kernels(args, providers=[provider])[0]
    )
    assert type(ka.tuned(args)) is hostile.FastGemm
    again = tune(args, provider, policy=None, metadata_filter=slow_only, **options)
    assert again.measured == 0 and again.default == result.default
    assert tune(args, provider, policy=None, max_candidates=1).default is None


@pytest.mark.parametrize("chosen", ["reference", ["reference"]])
def test_the_default_is_measured_though_the_providers_leave_it_out(chosen):
    args = arguments()
    result = ka.autotune(args, providers=chosen)
    assert {row.kernel.rebuild().provider_name() for row in result.rows} == {"reference"}
    assert result.default.kernel.rebuild() == ka.get_kernels(args)[0]
    assert ka.tuned(args).provider_name() == ka.tuned(arguments(N=44)).provider_name() == "torch"


def test_the_default_is_of_those_that_are_named_where_all_others_are_left_out(monkeypatch):
    monkeypatch.setenv("KERNEL_API_PROVIDERS", "cutedsl")
    result = ka.autotune(arguments(), providers=["torch"], policy=QUICK)
    assert result.default is None and result.kernel.provider_name() == "torch"


def test_none_that_the_filter_keeps_passes_though_the_default_does(registry):
    provider = registry.register(hostile.FastGemm, hostile.WrongGemm)
    with pytest.raises(NoKernelError, match="none of 1 candidates passed") as caught:
        tune(arguments(), provider, metadata_filter=lambda m: m.kernel_class is hostile.WrongGemm)
    assert [row.status for row in caught.value.rows] == [Status.WRONG]


def test_candidates_are_begun_in_the_order_that_is_asked_for(registry):
    classes = (hostile.SlowGemm, hostile.SlowerGemm, hostile.FastGemm)
    provider, asked = registry.register(*classes), []

    def backwards(kernels, args):
        asked.append(args)
        return kernels[::-1]

    args = arguments()
    result = tune(args, provider, order=backwards, max_candidates=1)
    assert set(by_class(result)) == {"FastGemm", "SlowGemm"}  # SlowGemm is chosen without tuning
    assert hostile.runs()[0] == "FastGemm" and asked == [args]


@pytest.mark.parametrize("order", [lambda kernels, args: kernels[1:], lambda kernels, args: []])
def test_an_order_has_all_that_it_got(registry, order):
    provider = registry.register(hostile.FastGemm, hostile.SlowGemm)
    with pytest.raises(ArgumentError, match=r"order gave . kernels .* the 2 which it got"):
        tune(arguments(), provider, order=order)


def test_the_first_of_every_provider_competes(registry):
    one, other = registry.register(hostile.SlowGemm, hostile.SlowerGemm), registry.provider()
    other.register(hostile.FastGemm)
    result = ka.autotune(arguments(), providers=[one, other], policy=QUICK, max_candidates=1)
    assert set(by_class(result)) == {"SlowGemm", "FastGemm"}


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Policy(l2="warm"), "launches = 'graph', but the CPU has no graphs of launches"),
        (Policy("eager"), "l2 = 'cold', but on the CPU no cache is emptied"),
    ],
)
def test_what_the_cpu_does_not_have_is_not_said_of_its_times(monkeypatch, policy, words):
    with pytest.raises(ArgumentError, match=words):
        ka.autotune(arguments(), policy=policy)
    monkeypatch.setattr(_spread, "devices_here", lambda: ["cpu"])
    on_meta = ka.GemmArguments(*(one.to("meta") for one in arguments().tensors))
    (found,) = ka.autotune([on_meta], policy=policy)
    assert isinstance(found, ArgumentError) and words in str(found)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_architecture_is_not_asked_of_the_cpu(monkeypatch, device):
    monkeypatch.setattr(_spread, "devices_here", lambda: ["cpu"])
    A = torch.empty(64, 64, dtype=torch.bfloat16, device=device)
    args = ka.GemmArguments(A, torch.empty_like(A), torch.empty_like(A))
    with pytest.raises(DeviceError, match="cc is 90 but the problem is measured on the CPU"):
        ka.autotune(args, cc=90)
    (found,) = ka.autotune([args], cc="sm_90a")
    assert isinstance(found, DeviceError) and "cc is 'sm_90a'" in str(found)


@pytest.mark.parametrize("name", ["budget_s", "timeout_s", "max_candidates"])
def test_limits_are_checked(name):
    with pytest.raises(ArgumentError, match=f"{name} is 0; expected more than 0"):
        ka.autotune(arguments(), **{name: 0})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"args": 5}, "args is 5; expected an arguments object such as GemmArguments"),
        ({"args": None}, "args is None; expected an arguments object"),
        ({"args": [1]}, "problem 0 is 1; expected an arguments object such as GemmArguments"),
        ({"args": [arguments(), "ab"]}, "problem 1 is 'ab'; expected an arguments object"),
        ({"policy": "eager"}, "policy is 'eager'; expected a Policy"),
        ({"budget_s": "1"}, "budget_s is '1'; expected more than 0"),
        ({"budget_s": float("nan")}, "budget_s is nan; expected more than 0"),
        ({"timeout_s": None}, "timeout_s is None; expected more than 0"),
        ({"timeout_s": float("inf")}, "timeout_s is inf; expected more than 0, and finite"),
        ({"budget_s": float("inf")}, "budget_s is inf; expected more than 0, and finite"),
        ({"budget_s": 1e-50j}, "budget_s is 1e-50j; expected more than 0"),
        ({"budget_s": True}, "budget_s is True; expected more than 0"),
        ({"timeout_s": 10**400}, "expected more than 0, and finite"),
        ({"timeout_s": np.float32("nan")}, "nan"),
        ({"max_candidates": np.float32(2)}, "expected more than 0, a whole number"),
        ({"max_candidates": np.int64(0)}, "expected more than 0, a whole number"),
        ({"max_candidates": 1.5}, "max_candidates is 1.5; expected more than 0, a whole number"),
        ({"max_candidates": True}, "max_candidates is True; expected more than 0, a whole number"),
        ({"cc": "foo"}, "'foo' names no GPU architecture"),
        ({"providers": "nope"}, "no provider is called 'nope'; there are"),
        ({"providers": 5}, "providers is 5; expected names or classes of providers"),
        ({"executor": 5}, "executor is 5; expected the interface of concurrent.futures.Executor"),
        ({"order": "heuristics"}, "order is 'heuristics'; expected a function"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_was_expected(given, words):
    with pytest.raises(ArgumentError, match=re.escape(words)):
        ka.autotune(**{"args": arguments(), **given})
    if "args" not in given:  # of several problems as well
        with pytest.raises(ArgumentError, match=re.escape(words)):
            ka.autotune([arguments()], **given)


def test_limits_may_be_numbers_of_numpy(registry):
    provider = registry.register(hostile.FastGemm, hostile.EndlessGemm)
    limits = {"budget_s": np.float16(100), "timeout_s": np.float32(0.5)}
    result = tune(arguments(), provider, max_candidates=np.int32(2), **limits)
    assert [row.status for row in result.rows] == [Status.PASSED, Status.TIMEOUT]
    assert tune(arguments(), provider, timeout_s=np.int64(9), max_candidates=1).measured == 0


def test_a_lookup_takes_a_device_or_its_name(registry):
    provider = registry.register(hostile.FastGemm)
    meta = ka.GemmArguments(*(tensor.to("meta") for tensor in arguments().tensors))
    tune(meta, provider, policy=None)
    assert ka.tuned(meta) is None
    for device in ("cpu", torch.device("cpu")):
        assert type(ka.tuned(meta, device)) is hostile.FastGemm
    for device in ("nowhere", 1.5, arguments()):
        with pytest.raises(ArgumentError, match="expected a torch device, or the name of one"):
            ka.tuned(meta, device)
    with pytest.raises(ArgumentError, match="expected an arguments object such as GemmArguments"):
        ka.tuned(5)


def test_more_candidates_than_finalists_are_timed_in_heats(registry):
    result = tune(arguments(), registry.register(hostile.DawdlingGemm))
    rounds = {row.kernel.rebuild().metadata.design.tile_shape[0]: row.rounds for row in result.rows}
    assert result.kernel.metadata.design.tile_shape[0] == 0
    finalists = {extra for extra, count in rounds.items() if count >= QUICK.rounds}
    assert finalists == {0, 1, 2, 3, 4, 9}  # the first of the order always comes to the final
    assert len(result.rows) == 10 and result.rows[0].median_us < result.rows[-1].median_us


def test_status_is_public():
    assert {one.value for one in Status} >= {status for status, _ in hostile.FATES.values()}


def test_a_problem_that_stands_twice_is_measured_once(registry):
    provider = registry.register(hostile.SlowGemm)
    results = tune([arguments(), arguments(M=47), arguments()], provider)
    assert len(hostile.runs()) and results[0] is results[2]
    assert [one.measured for one in results] == [1, 1, 1]
    assert [one.measured for one in tune([arguments()] * 2, provider)] == [0, 0]


def test_what_cannot_be_kept_is_a_warning(registry, monkeypatch):
    def full(self, row):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Store, "record", full)
    monkeypatch.setattr(_disk_cache, "_told", set())
    with pytest.warns(CacheWarning, match="what is measured is not kept: .*No space left"):
        assert tune(arguments(), registry.register(hostile.SlowGemm)).measured == 1


def test_a_long_message_is_cut(registry):
    class Talks(CpuGemm):
        def _run(self, args, artifact, stream, workspace=None):
            raise ValueError("x" * (5 << 20))

    result = tune(arguments(), registry.register(hostile.SlowGemm, Talks))
    assert max(len(row.message) for row in result.rows) <= 10_000


def test_time_may_be_given_without_end(registry):
    provider = registry.register(hostile.SlowGemm)
    assert tune(arguments(), provider, timeout_s=1e300).measured == 1
