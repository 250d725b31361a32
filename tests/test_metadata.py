"""What a kernel is, as data: kernel_api.metadata."""

import dataclasses
import json
import pickle
from collections import Counter

import ml_dtypes
import numpy as np
import pytest
import torch
from support.kernels import COLUMN_MAJOR, ROW_MAJOR, CpuGemm, CudaGemm, LoopGemm, sample_of

import kernel_api as ka
from kernel_api.dtypes import dtype
from kernel_api.errors import ArgumentError
from kernel_api.metadata import (
    BLASDesignMetadata,
    GemmOperandsMetadata,
    KernelMetadata,
    TensorAttributes,
)


def attributes(kind="bf16", stride=ROW_MAJOR, divisibility=1):
    return TensorAttributes(kind, stride, divisibility)


def metadata(**changed):
    given = {
        "kernel_name": "sample",
        "kernel_class": LoopGemm,
        "operands": GemmOperandsMetadata(attributes(), attributes(), attributes(), "f32"),
        "design": BLASDesignMetadata((128, 64, 32), (2, 1, 1)),
        "targets": ("sm_80",),
    }
    return KernelMetadata(**{**given, **changed})


# Every registered kernel -----------------------------------------------------------------


@pytest.fixture(scope="module")
def registered():
    return ka.get_kernels()


@pytest.fixture(scope="module")
def sampled(registered):
    return sample_of(registered)


def test_some_kernels_are_registered(registered):
    assert {"torch", "reference"} <= {k.metadata.provider for k in registered}


def test_registered_kernels_come_back_from_json(sampled):
    for kernel in sampled:
        again = KernelMetadata.from_json(kernel.metadata.to_json())
        assert again == kernel.metadata
        assert hash(again) == hash(kernel.metadata)


def test_registered_kernels_are_rebuilt_from_their_metadata(sampled):
    for kernel in sampled:
        rebuilt = KernelMetadata.from_json(kernel.metadata.to_json()).rebuild()
        assert type(rebuilt) is type(kernel)
        assert rebuilt == kernel
        assert hash(rebuilt) == hash(kernel)


def test_names_are_unique_over_the_whole_registry(registered):
    counted = Counter(k.metadata.kernel_name for k in registered)
    assert [name for name, count in counted.items() if count > 1] == []


def test_different_kernels_have_different_metadata(registered):
    assert len({k.metadata for k in registered}) == len(registered)


def test_every_registered_kernel_names_its_targets_and_min_cc(registered):
    for kernel in registered:
        lowest = min(t.cc for t in kernel.metadata.parsed_targets)
        assert kernel.metadata.min_cc == lowest


def test_the_json_says_which_provider_a_kernel_is_from(sampled):
    for kernel in sampled:
        assert json.loads(kernel.metadata.to_json())["provider"] == kernel.metadata.provider


# Frozen and hashable ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(KernelMetadata)])
def test_no_field_can_be_assigned(name):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(metadata(), name, None)


def test_equal_fields_make_equal_and_equally_hashed_metadata():
    assert metadata() == metadata()
    assert hash(metadata()) == hash(metadata())
    assert metadata() in {metadata()}


@pytest.mark.parametrize(
    "change",
    [
        {"kernel_name": "other"},
        {"kernel_class": CpuGemm},
        {"operands": GemmOperandsMetadata(attributes(), attributes(), attributes("f32"), "f32")},
        {"design": BLASDesignMetadata((128, 64, 64), (2, 1, 1))},
        {"design": None},
        {"min_cc": 75},
        {"epilogue": "relu"},
        {"targets": ("sm_90a",)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_is_part_of_the_identity(change):
    assert metadata(**change) != metadata()


@pytest.mark.parametrize(
    ("cluster", "label"),
    [((2, 1, 1), "tile128x64x32_cluster2x1"), ((1, 1, 4), "tile128x64x32_cluster1x1x4")],
)
def test_a_label_has_the_extent_along_k_of_clusters_that_have_one(cluster, label):
    assert BLASDesignMetadata((128, 64, 32), cluster).label() == label


def test_pickles_come_back_equal():
    assert pickle.loads(pickle.dumps(metadata())) == metadata()


# Fields ----------------------------------------------------------------------------------


def test_metadata_takes_its_arguments_by_position_as_in_the_document():
    operands = GemmOperandsMetadata(attributes(), attributes(), attributes(), "f32")
    given = KernelMetadata("sample", LoopGemm, operands, None, 80, None, ("sm_80",))
    assert given == metadata(design=None, min_cc=80)


def test_min_cc_is_the_lowest_target_unless_given():
    assert metadata(targets=("sm_90a", "sm_80")).min_cc == 80
    assert metadata(targets=("sm_90a",)).min_cc == 90
    assert metadata(targets=()).min_cc == 0
    assert metadata(targets=(), min_cc=90).min_cc == 90


@pytest.mark.parametrize(
    "spelling", [torch.bfloat16, ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), "bf16"], ids=str
)
def test_element_types_are_kept_canonical_in_whatever_spelling_they_are_given(spelling):
    assert attributes(spelling).dtype is dtype("bfloat16")
    assert attributes(spelling) == attributes("bfloat16")
    operands = GemmOperandsMetadata(attributes(), attributes(), attributes(), spelling)
    assert operands.accumulator_type is dtype("bfloat16")


def test_cutlass_spellings_are_kept_canonical():
    import cutlass

    assert attributes(cutlass.BFloat16) == attributes("bf16")
    assert hash(attributes(cutlass.BFloat16)) == hash(attributes("bf16"))


def test_a_stride_pattern_names_its_unit_mode():
    assert attributes(stride=ROW_MAJOR).unit_mode == -1
    assert attributes(stride=COLUMN_MAJOR).unit_mode == -2
    assert attributes(stride=(1, 0)).unit_mode == -2
    assert attributes(stride=None).unit_mode is None


@pytest.mark.parametrize("pattern", [(0, 0, 0), (0, 1, 1), (1, 0, 0), (2, 3)])
def test_a_stride_pattern_without_exactly_one_unit_mode_is_refused(pattern):
    with pytest.raises(ArgumentError, match="must mark one of the last two modes with 1"):
        attributes(stride=pattern)


def test_a_divisibility_below_one_is_refused():
    with pytest.raises(ArgumentError, match="divisibility is 0"):
        attributes(divisibility=0)
    with pytest.raises(ArgumentError, match="divisibility is 'x'; expected a number of elements"):
        attributes(divisibility="x")


def test_a_stride_pattern_that_is_none_is_refused():
    with pytest.raises(ArgumentError, match=r"stride is 3; expected a pattern such as \(0, 1\)"):
        attributes(stride=3)


def test_operands_are_listed_by_name():
    operands = metadata().operands
    assert tuple(operands.tensors) == ("A", "B", "out")
    assert operands.tensors == {"A": operands.A, "B": operands.B, "out": operands.out}


# JSON ------------------------------------------------------------------------------------


def test_a_kernel_of_a_local_class_comes_back_while_it_is_registered(registry):
    class Local(LoopGemm):
        pass

    provider = registry.register(Local)
    described = Local.metadata_of_tile(16)
    assert KernelMetadata.from_json(described.to_json()) == described
    provider.unregister(Local)
    with pytest.raises(ArgumentError):
        KernelMetadata.from_json(described.to_json())


def test_a_design_that_json_cannot_hold_is_refused_by_its_value(registry):
    @dataclasses.dataclass(frozen=True)
    class Odd(BLASDesignMetadata):
        extra: object = object()

    with pytest.raises(ArgumentError, match="cannot be written as JSON"):
        metadata(design=Odd((16, 16, 16))).to_json()


@pytest.mark.parametrize(
    "text", ["", "not JSON", "null", "[]", "3", '"kernel"', "{}", '{"kernel_name": "x"}', None, 3]
)
def test_foreign_json_is_refused(text):
    with pytest.raises(ArgumentError):
        KernelMetadata.from_json(text)


def changed_json(field, value):
    data = json.loads(metadata().to_json())
    data[field] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kernel_class", {"class": "os:system"}),
        ("kernel_class", {"class": "subprocess:Popen"}),
        ("kernel_class", {"class": "no.such.module:Kernel"}),
        ("kernel_class", {"class": "kernel_api.kernel:NoSuchKernel"}),
        ("kernel_class", {"class": "kernel_api.metadata:TensorAttributes"}),
        ("kernel_class", {}),
        ("kernel_class", None),
        ("kernel_class", "LoopGemm"),
        ("operands", {"type": "pathlib:Path", "fields": {}}),
        ("operands", {"type": "kernel_api.metadata:GemmOperandsMetadata", "fields": {}}),
        ("operands", None),
        ("design", {"type": "builtins:dict", "fields": {}}),
        ("targets", ["hopper"]),
        ("targets", 90),
        ("kernel_name", None),
        ("design", 3),
        ("min_cc", "hopper"),
        ("epilogue", 3),
    ],
    ids=str,
)
def test_json_that_describes_no_kernel_is_refused(field, value):
    with pytest.raises(ArgumentError):
        KernelMetadata.from_json(changed_json(field, value))


def test_json_without_one_of_the_fields_is_refused():
    complete = json.loads(metadata().to_json())
    for name in complete.keys() - {"provider"}:
        partial = {key: value for key, value in complete.items() if key != name}
        with pytest.raises(ArgumentError):
            KernelMetadata.from_dict(partial)


def test_a_rebuilt_kernel_supports_and_compiles_like_the_original(registry):
    from support.data import arguments_for

    provider = registry.register(CudaGemm)
    for kernel in ka.get_kernels(providers=[provider]):
        args = arguments_for(kernel, 64, 64, 64, device="meta")
        rebuilt = kernel.metadata.rebuild()
        assert rebuilt.supports(args)
        assert rebuilt.compile(args, cc=80) is kernel.compile(args, cc=80)
