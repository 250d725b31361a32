"""Which kernels, in which order: ka.get_kernels."""

from statistics import median
from time import perf_counter

import numpy as np
import pytest
import torch
from support.data import gemm_arguments
from support.kernels import CpuGemm, CudaGemm, LoopGemm
from torch._subclasses.fake_tensor import FakeTensorMode

import kernel_api as ka
from kernel_api import discovery
from kernel_api.errors import ArgumentError, FilterError, PluginWarning
from kernel_api.providers.reference import ReferenceProvider
from kernel_api.providers.torch import TorchProvider
from kernel_api.targets import Target

CPU_ARGS = gemm_arguments(8, 8, 8)
META_ARGS = gemm_arguments(64, 64, 64, types=("bf16", "bf16", "f32"), device="meta")


def classes(kernels):
    return list(dict.fromkeys(type(k).__name__ for k in kernels))


def providers_of(kernels):
    return list(dict.fromkeys(k.metadata.provider for k in kernels))


# Who answers -----------------------------------------------------------------------------


def test_a_cpu_tensor_gets_torch_then_reference():
    assert providers_of(ka.get_kernels(CPU_ARGS)) == ["torch", "reference"]


def test_a_meta_tensor_gets_kernels_of_every_device(registry):
    registry.register(CudaGemm, CpuGemm)
    found = classes(ka.get_kernels(META_ARGS))
    assert {"CudaGemm", "CpuGemm", "TorchGemm", "ReferenceGemm"} <= set(found)


def test_a_cpu_tensor_gets_no_cuda_kernel(registry):
    registry.register(CudaGemm)
    args = gemm_arguments(64, 64, 64, types=("bf16", "bf16", "f32"))
    assert "CudaGemm" not in classes(ka.get_kernels(args))


def test_fake_cuda_tensors_get_kernels_without_a_gpu(registry):
    from torch._subclasses.fake_tensor import FakeTensorMode

    registry.register(CudaGemm)
    with FakeTensorMode():
        A, B, out = (torch.empty(64, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        args = ka.GemmArguments(A, B, out)
    assert "CudaGemm" in classes(ka.get_kernels(args))
    assert "CpuGemm" not in classes(ka.get_kernels(args))


@pytest.mark.parametrize("kind", ["int16", "bool", "complex64", "float8_e4m3fnuz"])
def test_an_odd_type_is_answered_and_not_an_error(kind):
    types = (torch.float8_e4m3fnuz,) * 3 if kind == "float8_e4m3fnuz" else (kind,) * 3
    kernels = ka.get_kernels(gemm_arguments(4, 4, 4, types=types, device="meta"))
    assert providers_of(kernels) in (["reference"], [])


def test_everything_is_listed_without_arguments(registry):
    registry.register(CudaGemm, LoopGemm)
    everything = ka.get_kernels()
    assert {"CudaGemm", "LoopGemm", "TorchGemm", "ReferenceGemm"} <= set(classes(everything))
    assert len(everything) == len(set(everything))


# Order -----------------------------------------------------------------------------------


class Slow(LoopGemm):
    def predict(self, args):
        return 1.0 / self.metadata.design.tile_shape[0]


class Fast(LoopGemm):
    tiles = (32, 64, 24)

    def predict(self, args):
        return 1.0 / self.metadata.design.tile_shape[0]


class Unmodelled(LoopGemm):
    tiles = (64, 16, 32)


def test_kernels_with_a_model_come_first_by_predicted_time_across_families(registry):
    provider = registry.register(Unmodelled, Slow, Fast)
    kernels = ka.get_kernels(CPU_ARGS, providers=[provider])
    assert [k.metadata.kernel_name for k in kernels] == [
        "Fast_tile64",
        "Slow_tile32",
        "Fast_tile32",
        "Fast_tile24",
        "Slow_tile16",
        "Unmodelled_tile64",
        "Unmodelled_tile16",
        "Unmodelled_tile32",
    ]


def test_torch_and_reference_come_last_in_this_order(registry):
    registry.register(Unmodelled, Slow)
    kernels = ka.get_kernels(CPU_ARGS)
    assert classes(kernels) == ["Slow", "Unmodelled", "TorchGemm", "ReferenceGemm"]


def test_a_prediction_of_zero_is_the_best_and_not_missing(registry):
    class Instant(LoopGemm):
        def predict(self, args):
            return 0.0

    registry.register(Slow, Instant)
    assert classes(ka.get_kernels(CPU_ARGS))[0] == "Instant"


def test_predictions_are_numbers_of_any_kind_and_others_are_left_out_alone(registry):
    class OfNumpy(LoopGemm):
        def predict(self, args):
            return np.float32(0.0)

    class Strange(LoopGemm):
        def predict(self, args):
            return "soon"

    registry.register(Slow, OfNumpy, Strange)
    with pytest.warns(PluginWarning, match="is listed without a prediction: TypeError"):
        found = classes(ka.get_kernels(CPU_ARGS))
    assert found[0] == "OfNumpy" and "Strange" in found


def test_a_provider_of_higher_rank_comes_later_even_if_it_predicts_less(registry):
    late = registry.provider(rank=150)
    late.register(Fast)
    registry.register(Unmodelled)
    found = classes(ka.get_kernels(CPU_ARGS))
    assert found == ["Unmodelled", "TorchGemm", "Fast", "ReferenceGemm"]


def test_the_prediction_may_depend_on_the_arguments(registry):
    class Crossing(LoopGemm):
        def predict(self, args):
            tile = self.metadata.design.tile_shape[0]
            return abs(args.M - tile)

    provider = registry.register(Crossing)

    def best(M):
        return ka.get_kernels(gemm_arguments(M, 8, 8), providers=[provider])[0].metadata

    assert best(16).design.tile_shape[0] == 16
    assert best(32).design.tile_shape[0] == 32


# Which providers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chosen",
    [["reference"], ("reference",), "reference", [ReferenceProvider], ReferenceProvider],
    ids=["list", "tuple", "bare name", "list of a class", "bare class"],
)
def test_providers_are_chosen_by_name_or_class(chosen):
    assert providers_of(ka.get_kernels(CPU_ARGS, providers=chosen)) == ["reference"]


def test_the_chosen_providers_may_come_from_an_iterator():
    kernels = ka.get_kernels(CPU_ARGS, providers=iter(["reference"]))
    assert providers_of(kernels) == ["reference"]


def test_the_order_in_which_providers_are_chosen_does_not_matter():
    kernels = ka.get_kernels(CPU_ARGS, providers=[ReferenceProvider, "torch"])
    assert providers_of(kernels) == ["torch", "reference"]


def test_a_provider_chosen_twice_answers_once():
    twice = ka.get_kernels(CPU_ARGS, providers=["torch", TorchProvider])
    assert twice == ka.get_kernels(CPU_ARGS, providers=["torch"])
    assert len(ka.get_kernels(providers=["torch", "torch"])) == len(
        ka.get_kernels(providers=["torch"])
    )


def test_no_provider_has_no_kernels():
    assert ka.get_kernels(CPU_ARGS, providers=[]) == []


@pytest.mark.parametrize(
    "unknown", ["cublas", "", int, None, 3, ["torch"], ka.Provider, {}], ids=str
)
def test_an_unknown_provider_is_refused_with_the_known_ones(unknown):
    with pytest.raises(ArgumentError, match=r"no provider is called .*cutedsl, reference, torch"):
        ka.get_kernels(CPU_ARGS, providers=[unknown])


@pytest.mark.parametrize("unknown", [3, ka.providers], ids=["number", "module"])
@pytest.mark.parametrize("ask", [ka.get_kernels, ka.explain])
def test_what_names_no_providers_is_refused(ask, unknown):
    with pytest.raises(ArgumentError, match=r"providers is .*; expected names or classes"):
        ask(CPU_ARGS, providers=unknown)


@pytest.mark.parametrize("unknown", [int, ka.Provider], ids=str)
def test_a_class_that_is_no_provider_is_refused_with_the_known_ones(unknown):
    with pytest.raises(ArgumentError, match=r"no provider is called .*cutedsl, reference, torch"):
        ka.get_kernels(CPU_ARGS, providers=unknown)


def test_the_environment_narrows_the_providers(monkeypatch):
    monkeypatch.setenv("KERNEL_API_PROVIDERS", "reference")
    assert providers_of(ka.get_kernels(CPU_ARGS)) == ["reference"]
    assert providers_of(ka.get_kernels()) == ["reference"]
    monkeypatch.setenv("KERNEL_API_PROVIDERS", " torch , reference ")
    assert providers_of(ka.get_kernels(CPU_ARGS)) == ["torch", "reference"]
    monkeypatch.setenv("KERNEL_API_PROVIDERS", "")
    assert providers_of(ka.get_kernels(CPU_ARGS)) == ["torch", "reference"]


def test_providers_named_in_the_call_are_stronger_than_the_environment(monkeypatch):
    monkeypatch.setenv("KERNEL_API_PROVIDERS", "reference")
    assert providers_of(ka.get_kernels(CPU_ARGS, providers=["torch"])) == ["torch"]


def test_an_unknown_provider_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("KERNEL_API_PROVIDERS", "cublas")
    with pytest.raises(ArgumentError, match="no provider is called 'cublas'"):
        ka.get_kernels(CPU_ARGS)


# Architectures ---------------------------------------------------------------------------


class Hopper(CudaGemm):
    targets = ("sm_90a",)


class BlackwellFamily(CudaGemm):
    targets = ("sm_100f",)


HOPPER = Target(9, 0)


@pytest.fixture
def architectures(registry):
    return [registry.register(CudaGemm, Hopper, BlackwellFamily)]


@pytest.mark.parametrize(
    ("cc", "found"),
    [
        (None, ["CudaGemm", "Hopper", "BlackwellFamily"]),
        (75, []),
        (80, ["CudaGemm"]),
        (86, ["CudaGemm"]),
        (90, ["CudaGemm", "Hopper"]),
        ("90", ["CudaGemm", "Hopper"]),
        ("9.0", ["CudaGemm", "Hopper"]),
        ("90a", ["CudaGemm", "Hopper"]),
        ("sm_90a", ["CudaGemm", "Hopper"]),
        (100, ["CudaGemm", "BlackwellFamily"]),
        ("10.3", ["CudaGemm", "BlackwellFamily"]),
        (120, ["CudaGemm"]),
    ],
)
def test_a_device_gets_the_kernels_that_it_can_run(architectures, cc, found):
    assert classes(ka.get_kernels(META_ARGS, cc=cc, providers=architectures)) == found
    assert classes(ka.get_kernels(cc=cc, providers=architectures)) == found


def test_a_device_of_10_0_is_not_offered_a_hopper_kernel(architectures):
    kernels = ka.get_kernels(META_ARGS, cc="10.0")
    assert kernels
    assert all("sm_90a" not in k.metadata.targets for k in kernels)


def test_the_environment_says_what_to_compile_for_where_there_is_no_gpu(architectures, monkeypatch):
    monkeypatch.setenv("KERNEL_API_ARCH", "sm_90a")
    found = ka.get_kernels(META_ARGS, providers=architectures)
    assert classes(found) == ["CudaGemm", "Hopper"]


def test_a_numbered_device_is_asked_once_what_it_is(architectures, monkeypatch):
    asked = []
    monkeypatch.setattr(discovery, "_devices_with_target", set())
    monkeypatch.setattr(discovery, "target_of", lambda device: asked.append(device) or HOPPER)
    monkeypatch.setattr(discovery, "query_target", lambda device, cc: HOPPER if cc is None else cc)
    with FakeTensorMode():
        tensors = [torch.empty(64, 64, dtype=torch.bfloat16, device="cuda:0") for _ in range(3)]
    args = ka.GemmArguments(*tensors)
    for _ in range(3):
        assert classes(ka.get_kernels(args, providers=architectures)) == ["CudaGemm", "Hopper"]
    assert asked == [torch.device("cuda", 0)]
    other = ka.get_kernels(args, cc=Target(10, 0), providers=architectures)
    assert classes(other) == ["CudaGemm", "BlackwellFamily"]


@pytest.mark.parametrize("cc", ["hopper", 9, "9", 3.5, True, "", 0])
def test_what_names_no_architecture_is_refused(cc):
    with pytest.raises(ArgumentError, match="names no GPU architecture"):
        ka.get_kernels(META_ARGS, cc=cc)
    with pytest.raises(ArgumentError, match="names no GPU architecture"):
        ka.get_kernels(cc=cc)


# Filters ---------------------------------------------------------------------------------


def test_a_filter_keeps_the_kernels_for_which_it_is_true(registry):
    registry.register(LoopGemm)
    kernels = ka.get_kernels(
        CPU_ARGS, metadata_filter=lambda m: getattr(m.design, "tile_shape", (0,))[0] == 32
    )
    assert [k.metadata.kernel_name for k in kernels] == ["LoopGemm_tile32"]


def test_a_filter_may_be_given_by_position():
    assert ka.get_kernels(CPU_ARGS, lambda metadata: False) == []


def test_a_filter_that_raises_is_named_with_the_kernel_and_its_cause():
    with pytest.raises(FilterError, match="metadata_filter raised on torch_mm") as caught:
        ka.get_kernels(CPU_ARGS, metadata_filter=lambda m: m.no_such_field)
    assert isinstance(caught.value.__cause__, AttributeError)


def test_a_kernel_whose_design_has_no_such_axis_is_not_kept():
    wide = lambda m: m.design.tile_shape[1] == 128  # noqa: E731
    args = gemm_arguments(64, 64, 64, types=("bf16", "bf16", "bf16"), device="meta")
    found = ka.get_kernels(args, wide, cc=90)
    assert found == ka.get_kernels(args, wide, cc=90, providers=["cutedsl"]) != []
    assert ka.get_kernels(CPU_ARGS, wide) == []  # torch and reference have no tiles
    families = {one.family: one.reason for one in ka.explain(args, wide, cc=90).rejected}
    assert families["torch.mm"] == "metadata_filter refused the one design"


@pytest.mark.parametrize("cc", [None, 90])
def test_an_axis_that_no_design_has_is_an_error_with_those_that_there_are(cc):
    with pytest.raises(FilterError, match=r"there is no axis tile_shap, there are .*tile_shape"):
        ka.get_kernels(META_ARGS, lambda m: m.design.tile_shap[1] == 256, cc=cc)
    with pytest.raises(FilterError, match="there is no axis tile_shap, "):  # torch's is not asked
        ka.get_kernels(META_ARGS, lambda m: m.provider != "torch" and m.design.tile_shap, cc=cc)


@pytest.mark.parametrize(
    "asks", [lambda m: m.operands.stages, lambda m: m.design.tile_shape.width, lambda m: m.stages]
)
def test_what_is_missing_elsewhere_than_in_the_design_is_an_error(asks):
    with pytest.raises(FilterError, match="AttributeError"):
        ka.get_kernels(META_ARGS, asks, cc=90, providers=["cutedsl"])


@pytest.mark.parametrize("given", [None, "yes", 1, 0, [], torch.tensor(True)], ids=repr)
def test_a_filter_that_returns_no_bool_is_an_error_that_names_the_kernel(given):
    with pytest.raises(FilterError) as caught:
        ka.get_kernels(CPU_ARGS, metadata_filter=lambda m: given)
    text = f"metadata_filter returned {given!r} for torch_mm"
    assert str(caught.value).startswith(text)
    assert str(caught.value).endswith("; expected True or False")


def test_a_filter_may_return_a_bool_of_numpy():
    numpy = pytest.importorskip("numpy")
    assert ka.get_kernels(CPU_ARGS, lambda m: numpy.bool_(True)) == ka.get_kernels(CPU_ARGS)
    assert ka.get_kernels(CPU_ARGS, lambda m: numpy.bool_(False)) == []


def test_a_filter_that_raised_leaves_the_next_query_whole():
    with pytest.raises(FilterError):
        ka.get_kernels(CPU_ARGS, metadata_filter=lambda m: 1 / 0)
    assert providers_of(ka.get_kernels(CPU_ARGS)) == ["torch", "reference"]


@pytest.mark.parametrize("args", [3, "args", (1, 2), torch.empty(2, 2), {}], ids=type)
def test_what_is_no_arguments_object_is_refused_by_its_type(args):
    with pytest.raises(ArgumentError, match=f"GemmArguments, got {type(args).__name__}"):
        ka.get_kernels(args)
    with pytest.raises(ArgumentError, match=f"GemmArguments, got {type(args).__name__}"):
        ka.explain(args)


# Remembered ------------------------------------------------------------------------------


@pytest.fixture
def counted(registry):
    class Counted(LoopGemm):
        generated = judged = predicted = 0

        @classmethod
        def generate_kernels(cls, metadata_filter, epilogue_args=None, cc=None):
            calls.generated += 1
            return super().generate_kernels(metadata_filter, epilogue_args, cc)

        def _supports(self, args):
            calls.judged += 1
            return ka.Status.success()

        def predict(self, args):
            calls.predicted += 1

    class calls:  # noqa: N801
        generated = judged = predicted = 0

    registry.register(Counted)
    ka.get_kernels(CPU_ARGS)
    assert (calls.generated, calls.judged, calls.predicted) == (1, 2, 2)
    return calls


def test_a_second_query_asks_no_kernel_again(counted):
    assert ka.get_kernels(CPU_ARGS) == ka.get_kernels(CPU_ARGS)
    ka.get_kernels(gemm_arguments(8, 8, 8))  # new tensors of the same signature and alignment
    assert counted.generated == 1
    assert counted.judged <= 4  # new tensors may lie at another alignment


def test_explain_reads_what_the_query_remembered(counted):
    ka.explain(CPU_ARGS)
    assert (counted.generated, counted.judged) == (1, 2)


def test_other_sizes_are_judged_anew_without_generating_again(counted):
    ka.get_kernels(gemm_arguments(9, 9, 9))
    assert counted.generated == 1
    assert counted.judged == 4


def test_registering_a_class_makes_queries_forget(registry, counted):
    before = ka.get_kernels(CPU_ARGS)
    registry.register(CpuGemm)
    assert classes(ka.get_kernels(CPU_ARGS)) == ["Counted", "CpuGemm", "TorchGemm", "ReferenceGemm"]
    assert len(ka.get_kernels(CPU_ARGS)) == len(before) + 1
    assert counted.generated == 2


def test_withdrawing_a_class_makes_queries_forget(registry):
    provider = registry.register(CpuGemm)
    assert "CpuGemm" in classes(ka.get_kernels(CPU_ARGS))
    provider.unregister(CpuGemm)
    assert "CpuGemm" not in classes(ka.get_kernels(CPU_ARGS))


def test_a_method_assigned_to_a_registered_class_makes_queries_forget(registry):
    class Changing(LoopGemm):
        pass

    registry.register(Changing)
    assert "Changing" in classes(ka.get_kernels(CPU_ARGS))
    Changing._supports = lambda self, args: ka.Status.fail("not today")
    assert "Changing" not in classes(ka.get_kernels(CPU_ARGS))


def test_changing_the_returned_list_does_not_change_the_next_answer():
    ka.get_kernels(CPU_ARGS).clear()
    assert ka.get_kernels(CPU_ARGS)


# Time: the strict numbers are held on the GPU host by the benchmark of host costs ---------


def test_a_repeated_query_takes_half_a_millisecond_at_most():
    ka.get_kernels(META_ARGS)
    times = []
    for _ in range(200):
        start = perf_counter()
        ka.get_kernels(META_ARGS)
        times.append(perf_counter() - start)
    assert median(times) <= 500e-6


def test_the_first_query_of_a_signature_takes_fifty_milliseconds_at_most():
    ka.get_kernels(META_ARGS)
    times = []
    for extent in range(1000, 1020):
        args = gemm_arguments(extent, 64, 64, types=("bf16", "bf16", "bf16"), device="meta")
        start = perf_counter()
        ka.get_kernels(args)
        times.append(perf_counter() - start)
    assert median(times) <= 50e-3


@pytest.mark.parametrize(
    ("name", "value"), [("KERNEL_API_PROVIDERS", "torhc"), ("KERNEL_API_ARCH", "sm_9x")]
)
def test_a_setting_that_is_wrong_is_named(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    args = gemm_arguments(8, 8, 8, types=("float32",) * 3, device="meta")
    with pytest.raises(ArgumentError, match=f"{name}.*{value}"):
        ka.get_kernels(args)


def test_a_provider_whose_architectures_make_no_sense_is_a_warning(registry):
    registry.register(CudaGemm).architectures = 90
    with pytest.warns(PluginWarning, match="CudaGemm"):
        assert ka.get_kernels(cc=90)


def test_an_epilogue_that_joins_many_problems_forgets_some():
    epilogue = ka.EpilogueArguments(lambda accum: 2 * accum)
    for rows in range(1, 200):
        args = ka.GemmArguments(
            torch.empty(rows, 4, device="meta"),
            torch.empty(4, 4, device="meta"),
            torch.empty(rows, 4, device="meta"),
            epilogue=epilogue,
        )
        assert (
            args.epilogue.graph.identity
            == epilogue._joined[next(reversed(epilogue._joined))].graph.identity
        )
    assert len(epilogue._joined) <= 64


def test_a_provider_that_cannot_say_its_families_is_a_warning(registry):
    provider = registry.register(CpuGemm)

    def families():
        raise RuntimeError("no families today")

    provider.families = families
    args = gemm_arguments(8, 8, 8, types=("float32",) * 3)
    with pytest.warns(PluginWarning, match=f"provider '{provider.name}' raised and is left out"):
        assert ka.get_kernels(args)
    assert str(ka.explain(args))


def test_faults_that_are_told_are_forgotten_in_time(monkeypatch):
    monkeypatch.setattr(discovery, "_FAULTS_KEPT", 4)
    for size in range(20):
        with pytest.warns(PluginWarning, match=f"size is {size}"):
            discovery._told(CpuGemm, "kernel class", ValueError(f"size is {size}"), "raised")
    assert len(discovery._faults_told) <= 4
