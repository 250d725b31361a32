"""What registration refuses because it would be a wrong "yes", a wrong "no" or a late error: rules
that nobody asks, designs that nothing tells apart, methods that cannot be called."""

import functools
import re
import sys
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from support.data import gemm_arguments
from support.kernels import CpuGemm, CudaGemm, LoopGemm

import kernel_api as ka
from kernel_api import provider as provider_module
from kernel_api.errors import ArgumentError, PluginWarning, RegistrationError
from kernel_api.metadata import (
    DesignMetadata,
    GemmOperandsMetadata,
    KernelMetadata,
    OperandsMetadata,
    TensorAttributes,
)
from kernel_api.space import Operands, Space, rule

ROW = {"A": "f32", "B": "f32", "out": "f32", "accumulator": "f32", "majors": "strided"}


@rule("there are a thousand")
def few(args):
    return args.K % 1000 == 0


def refusal(registry, kernel_class):
    found = registry.provider()
    with pytest.raises(RegistrationError) as caught:
        found.register(kernel_class)
    assert found.families() == []
    return str(caught.value)


def reason(registry, kernel_class):
    found = registry.register(kernel_class)
    (rejection,) = ka.explain(gemm_arguments(4, 4, 4), providers=[found]).rejected
    return rejection.reason


# Rules count, or are refused ---------------------------------------------------------------


def test_a_rule_below_staticmethod_counts(registry):
    class Few(CpuGemm):
        fits = staticmethod(few)

    assert Few.rules[-1] is few
    assert reason(registry, Few) == "there are a thousand"


def test_rules_of_a_base_that_is_no_kernel_are_refused():
    class Mixin:
        fits = few

    with pytest.raises(RegistrationError, match=r"Mixin, a base of Few, has the rule .* derive"):

        class Few(Mixin, CpuGemm):
            pass


def test_rules_of_a_base_that_is_a_kernel_count(registry):
    class Mixin(ka.Kernel):
        fits = few

    class Few(Mixin, CpuGemm):
        pass

    assert reason(registry, Few) == "there are a thousand"


def test_a_list_of_rules_is_refused():
    with pytest.raises(RegistrationError, match="rules stand in it by themselves"):

        class Few(CpuGemm):
            rules = (few,)


@pytest.mark.parametrize(("name", "value"), [("late", few), ("rules", (few,))])
def test_rules_are_not_added_later(name, value):
    class Few(CpuGemm):
        pass

    with pytest.raises(RegistrationError, match="counts where it stands in the body of a class"):
        setattr(Few, name, value)
    assert Few.rules == CpuGemm.rules


def test_a_compile_of_a_base_that_is_no_kernel_is_checked_and_cached(registry):
    class Compiles:
        def compile(self, args, cc=None):
            compiled.append(args)
            return ka.CompiledArtifact(None, self)

    class Mixed(Compiles, CpuGemm):
        operands = (Operands(**ROW),)

    compiled = []
    args = gemm_arguments(4, 4, 4)
    (kernel,) = ka.get_kernels(args, providers=[registry.register(Mixed)])
    for _ in range(3):
        kernel.run(args)
    assert len(compiled) == 1
    kernel.run(args, kernel.compile(args))
    with pytest.raises(ka.errors.UnsupportedError):
        kernel.compile(gemm_arguments(4, 4, 4, types=("float64",) * 3))


# Designs -----------------------------------------------------------------------------------


def test_designs_that_no_field_tells_apart_are_refused(registry):
    class Tile(DesignMetadata):  # without the decorator
        def __init__(self, rows):
            object.__setattr__(self, "rows", rows)

    class Tiled(CpuGemm):
        design, space = Tile, Space(rows=(8, 4))

    text = refusal(registry, Tiled)
    assert "Tile(rows=8) and Tile(rows=4) are one design, by no fields" in text
    assert "a frozen dataclass with fields" in text


def test_one_design_in_two_spellings_is_refused(registry):
    tile = {"tile_shape": (32, 32, 1)}

    class Tiled(CudaGemm):
        space = Space(tile, {**tile, "cluster_shape": (1, 1, 1)})

    assert "are one design, by tile_shape, cluster_shape" in refusal(registry, Tiled)


@dataclass(frozen=True)
class Design(DesignMetadata):
    value: object = 0
    kept: int = field(init=False, default=3)

    def label(self):
        return "7" if self.value == 7 else 7 if self.value == "seven" else str(self.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (([1, 2],), "cannot be compared: unhashable type: 'list'"),
        ((np.int64(1),), "cannot be written as JSON; expected numbers, text, and tuples"),
        ((frozenset((1,)),), "cannot be written as JSON"),
        ((torch.float16,), "cannot be written as JSON"),
        (("seven",), "label() of Design(value='seven') is 7; expected text"),
        ((7, "7"), "are both called 7; expected a label for each"),
        (np.array([1, 2]), "cannot be written as JSON"),
    ],
    ids=str,
)
def test_designs_that_cannot_be_compared_named_or_written_are_refused(registry, values, words):
    class Designed(CpuGemm):
        design, space = Design, Space(value=values)

    assert words in refusal(registry, Designed)


@dataclass(frozen=True)
class Scheduled(DesignMetadata):
    schedule: str = "serial"
    stages: int = 1

    def label(self):
        return "serial" if self.schedule == "serial" else f"pipe{12 // (self.stages - 1)}"


def test_what_rules_refuse_has_no_label(registry):
    """Rules of designs alone: what they refuse does not exist."""

    class Pipelined(CpuGemm):
        design = Scheduled
        space = Space(schedule=("serial", "pipe"), stages=(1, 2, 3))

        @rule("one stage is no pipeline")
        def _(design):
            return (design.schedule == "serial") == (design.stages == 1)

    found = ka.get_kernels(providers=[registry.register(Pipelined)])
    assert len(found) == 3

    class Unruled(CpuGemm):
        design, space = Scheduled, Space(schedule=("serial",), stages=(1, 2))

    assert "both called serial" in refusal(registry, Unruled)

    class Raises(CpuGemm):
        design, space = Scheduled, Space(schedule=("pipe",))

    assert "label() of Scheduled(schedule='pipe') raises ZeroDivisionError(" in refusal(
        registry, Raises
    )


def test_labels_differ_by_words(registry):
    class Dotted(CpuGemm):
        design, space = Design, Space(value=("a.b", "a_b"))

    assert "are both called a_b" in refusal(registry, Dotted)


def test_fields_that_a_design_makes_itself_are_made_again(registry):
    found = registry.register(type("Designed", (CpuGemm,), {"design": Design, "space": Space()}))
    (kernel,) = ka.get_kernels(providers=[found])
    assert KernelMetadata.from_json(kernel.metadata.to_json()) == kernel.metadata


def test_kernels_of_rows_that_overlap_are_offered_once(registry):
    row = {name: type_ for name, type_ in ROW.items() if name != "majors"}

    class Twice(CpuGemm):
        operands = (Operands(**row, majors="A:k B:n out:n"), Operands(**row))

    found = registry.register(Twice)
    for kernels in (
        ka.get_kernels(providers=[found]),
        ka.get_kernels(gemm_arguments(4, 4, 4), providers=[found]),
    ):
        assert len(kernels) == len(set(kernels))


# What a class says -------------------------------------------------------------------------


@dataclass(frozen=True)
class PlainOperands(OperandsMetadata):
    A: TensorAttributes
    B: TensorAttributes
    out: TensorAttributes
    accumulator_type: object


DECLARED = {
    "devices": ({"devices": ("gpu",)}, "devices has 'gpu'; expected types of device as torch has"),
    "a device": ({"devices": ("cuda:0",)}, "such as 'cuda' or 'cpu', without a number"),
    "no targets": ({"targets": None}, "targets is None; expected a tuple of architectures"),
    "arguments": ({"arguments": "gemm"}, "arguments is 'gemm'; expected a class derived from"),
    "a form": ({"ragged": "M"}, "with ragged 'M': TypeError("),
    "a product": (
        {
            "operands": (Operands(**ROW, multiplication="tf32"),),
            "operands_metadata": PlainOperands,
        },
        ", with multiplication 'tf32': TypeError(",
    ),
    "no workspace": (
        {"_run": lambda self, args, artifact, stream: None},
        "_run(self, args, artifact, stream) is called as _run(args, artifact, stream, workspace)",
    ),
    "no method": ({"_run": "run"}, "_run is 'run'; expected a method"),
    "a prediction of nothing": (
        {"predict": lambda self: 1.0},
        "predict(self) is called as predict(args)",
    ),
    "alone": (
        {"generate_kernels": classmethod(lambda cls, metadata_filter: [])},
        "generate_kernels(metadata_filter) is called as generate_kernels(metadata_filter, "
        "epilogue_args=..., cc=...)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "words"), DECLARED.values(), ids=DECLARED)
def test_what_could_never_work_is_refused_when_it_is_registered(registry, body, words):
    assert words in refusal(registry, type("Declared", (CpuGemm,), body))


class Predicts:
    def __call__(self, args):
        return 1.0


#: Which is called with the kernel in front from 3.14 on.
PARTIAL = functools.partial(lambda args, rate: rate, rate=3)
PARTIAL = staticmethod(PARTIAL) if sys.version_info >= (3, 14) else PARTIAL


@pytest.mark.filterwarnings("ignore:functools.partial will be a method descriptor:FutureWarning")
@pytest.mark.parametrize("predict", [PARTIAL, Predicts()])
def test_a_hook_may_be_any_callable(registry, predict):
    found = registry.register(type("Predicted", (CpuGemm,), {"predict": predict}))
    (kernel,) = ka.get_kernels(gemm_arguments(4, 4, 4), providers=[found])
    assert kernel.predict(None) in (1.0, 3)


def test_devices_are_those_that_torch_may_have(registry):
    registry.register(type("OfAnother", (CpuGemm,), {"devices": ("npu", "cpu")}))


def test_a_class_that_is_renamed_moves_to_another_provider(registry):
    Mine = type("Mine", (CpuGemm,), {})
    first = registry.register(Mine)
    Mine.__qualname__ = "Renamed"
    second = registry.register(Mine)
    assert (first.families(), second.families()) == ([], [Mine])


def test_names_of_families_differ_by_words(registry):
    found = registry.register(type("Mine", (CpuGemm,), {"family": "my.gemm"}))
    with pytest.raises(RegistrationError, match=r"the family 'my_gemm' is .*Mine; name another"):
        found.register(type("Other", (CpuGemm,), {"family": "my_gemm"}))


def test_families_that_a_function_makes_do_not_replace_each_other(registry):
    found = registry.provider()

    def family(tile):
        class Tiled(CpuGemm):
            family = f"tiled{tile}"

        return found.register(Tiled)

    first = family(16)
    with pytest.raises(RegistrationError, match="classes that a function makes need a __qualname_"):
        family(32)
    assert found.families() == [first]


def test_the_alignment_of_any_type_is_refused():
    words = r"its type any, .* expected types, as in A='f16 \| bf16'"
    with pytest.raises(RegistrationError, match=words):
        Operands(**{**ROW, "A": "any"}, alignments=({"A": 16},))


@pytest.mark.parametrize("given", [("sm_90",), 90, "90", (9,)])
def test_architectures_are_compute_capabilities(given):
    with pytest.raises(RegistrationError, match=re.escape(f"has architectures {given!r}")):
        type("Wrong", (ka.Provider,), {"name": "wrong", "architectures": given})


# Metadata ----------------------------------------------------------------------------------


def described(**changes):
    attributes = TensorAttributes("f32", (0, 1))
    operands = GemmOperandsMetadata(attributes, attributes, attributes, "f32")
    return KernelMetadata(
        **{"kernel_name": "a", "kernel_class": CpuGemm, "operands": operands} | changes
    )


@pytest.mark.parametrize("given", [9, -5, "hopper", True])
def test_the_lowest_compute_capability_is_one(given):
    with pytest.raises(ArgumentError, match=f"min_cc is {given!r}; expected a number such as 90"):
        described(min_cc=given)


def test_the_lowest_compute_capability_is_not_above_the_targets():
    with pytest.raises(ArgumentError, match="min_cc is 100 and targets are sm_80; expected 80"):
        described(min_cc=100, targets=("sm_80",))


@pytest.mark.parametrize("given", [90, None, "sm_90a"])
def test_targets_of_metadata_are_a_tuple(given):
    with pytest.raises(ArgumentError, match="expected a tuple of architectures"):
        described(targets=given)


def test_a_design_of_metadata_is_one():
    @dataclass(frozen=True)
    class Plain:
        rows: int = 3

    with pytest.raises(ArgumentError, match="expected design metadata"):
        described(design=Plain())


def test_operands_of_metadata_are_attributes():
    with pytest.raises(ArgumentError, match="A is 'f32'; expected TensorAttributes"):
        GemmOperandsMetadata("f32", "f32", "f32", "f32")


@pytest.mark.parametrize("given", ["bogus", 3])
def test_a_scale_of_metadata_is_a_mode(given):
    with pytest.raises(ArgumentError, match=f"scale is {given!r}; expected per_tensor"):
        TensorAttributes("f32", (0, 1), scale=given)


# Kernels and providers that answer wrongly -------------------------------------------------


def test_metadata_of_another_class_is_a_fault(registry):
    class First(LoopGemm):
        pass

    class Second(LoopGemm):
        @classmethod
        def generate_kernels(cls, metadata_filter, epilogue_args=None, cc=None):
            return [cls(k.metadata) for k in First.generate_kernels(metadata_filter)]

    with pytest.warns(PluginWarning, match="gave a Second whose metadata say that it is a First"):
        assert ka.get_kernels(providers=[registry.register(Second)]) == []


@pytest.mark.parametrize("seconds", [-1e-9, False])
def test_a_prediction_is_a_time(registry, seconds):
    class Predicts(CpuGemm):
        def predict(self, args):
            return seconds

    found = registry.register(Predicts)
    with pytest.warns(PluginWarning, match=f"predict returned {seconds!r}; expected seconds"):
        assert len(ka.get_kernels(gemm_arguments(4, 4, 4), providers=[found])) == 1


def test_a_provider_whose_families_are_no_classes_is_left_out(registry):
    class Names(ka.Provider):
        name = "names"

        @classmethod
        def families(cls):
            return ["Gemm"]

    args = gemm_arguments(4, 4, 4)
    with pytest.warns(PluginWarning, match=r"families\(\) gave 'Gemm'; expected kernel classes"):
        assert ka.get_kernels(args, providers=["names", "reference"])
    assert ka.get_kernels(providers=["names"]) == []


def test_what_a_failed_plug_in_takes_from_others_is_given_back(registry):
    Mine = type("Mine", (CpuGemm,), {})
    first, second = registry.register(Mine), registry.provider()

    def fails():
        second._families["moved"] = Mine
        Mine._provider = second
        raise ImportError("later")

    with pytest.warns(PluginWarning, match="later"):
        provider_module._load("a plug-in", fails)
    assert Mine.provider_name() == first.name
