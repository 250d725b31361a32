"""Registering providers and kernel classes: kernel_api.provider."""

import re
from dataclasses import InitVar, dataclass, field

import pytest
from support.data import gemm_arguments
from support.kernels import CpuGemm, CudaGemm, LoopGemm

import kernel_api as ka
from kernel_api.errors import ArgumentError, PluginWarning, RegistrationError
from kernel_api.metadata import DesignMetadata, NormOperandsMetadata
from kernel_api.provider import providers
from kernel_api.space import Operands, Space, rule


def refusal(register, *given):
    with pytest.raises(RegistrationError) as caught:
        register(*given)
    assert isinstance(caught.value, TypeError)
    return str(caught.value)


def names(provider):
    return [k.metadata.kernel_name for k in ka.get_kernels(providers=[provider])]


# What a kernel class must have -----------------------------------------------------------


def test_classes_register_where_the_library_is_no_folder(registry, monkeypatch):
    """As in an archive."""

    def no_folder(*given):
        raise NotADirectoryError("kernel_api.zip/kernel_api")

    monkeypatch.setattr("kernel_api._sources._own_modules", no_folder)
    assert registry.register(LoopGemm).families() == [LoopGemm]


def test_ours_lack_nothing_though_they_are_not_asked_when_they_register(monkeypatch):
    ours = [(one, family) for one in providers() for family in one.families()]
    assert len(ours) >= 80
    assert not [fault for one, family in ours for fault in one.missing_from(family)]
    monkeypatch.setattr(ka.Provider, "missing_from", None)
    for one, family in ours:
        assert one.register(family) is family


def test_a_class_without_its_methods_is_refused_naming_all_of_them(registry):
    class Empty(ka.Kernel):
        pass

    text = refusal(registry.provider().register, Empty)
    assert "Empty cannot be registered" in text
    assert "it needs generate_kernels, or a declared space and operands" in text
    assert "it needs _run" in text


def test_a_space_without_operands_is_refused(registry):
    class Unfinished(CpuGemm):
        operands = ()

    text = refusal(registry.provider().register, Unfinished)
    assert "it declares a space but no operands" in text


ROW = {"A": "f16", "B": "f16", "out": "f16", "accumulator": "f32"}
DECLARATIONS = {
    "a comma that lacks": (
        {"operands": Operands(**ROW)},
        "expected a tuple of Operands with a comma behind it: (Operands(...),)",
    ),
    "operands that are something else": ({"operands": (ROW,)}, "expected Operands(...)"),
    "an operand that lacks": (
        {"operands": (Operands(A="f16", out="f16", accumulator="f32"),)},
        "Operands(A=..., out=...) lacks B; GemmArguments has A, B, out: give each its types",
    ),
    "an operand too many": (
        {"operands": (Operands(**ROW, C="f64"),)},
        "has C; GemmArguments has A, B, out: leave C out",
    ),
    "majors of another mode": (
        {"operands": (Operands(**ROW, majors="A:n B:k"),)},
        "majors is 'A:n B:k'; the mode of stride 1 of A is one of m and k",
    ),
    "metadata of another operation": (
        {"operands_metadata": NormOperandsMetadata},
        "operands_metadata is NormOperandsMetadata, which has no A; expected one with A, B, out",
    ),
    "metadata that is none": (
        {"operands_metadata": dict},
        "expected a class derived from OperandsMetadata",
    ),
    "arguments that are none": (
        {"arguments": "gemm"},
        "arguments is 'gemm'; expected a class derived from Arguments",
    ),
    "arguments without modes": (
        {"arguments": type("Odd", (ka.arguments.Arguments,), {})},
        "Odd has no modes; expected the letters of each operand's modes",
    ),
    "a space that is none": ({"space": Space}, "expected a Space, as in Space(stages=(3, 4))"),
    "an axis of numbers": (
        {"space": Space(tile_shape=(32, 32, 1))},
        "BLASDesignMetadata(tile_shape=32): TypeError(\"'int' object is not iterable\"); expected "
        "an axis of a space to be a tuple of values, as in tile_shape=((32, 32, 1),)",
    ),
    "a value among others": (
        {"space": Space(tile_shape=((32, 32, 1), 64), cluster_shape=((1, 1, 1), (2, 1, 1)))},
        "BLASDesignMetadata(tile_shape=64, cluster_shape=(1, 1, 1)): TypeError",
    ),
    "a value twice": (
        {"space": Space(tile_shape=((32, 32, 1), (32, 32, 1)))},
        "the axis tile_shape of space has (32, 32, 1) twice; expected it once",
    ),
    "a point twice": (
        {"space": Space(*({"tile_shape": (32, 32, 1)},) * 2)},
        "space has {'tile_shape': (32, 32, 1)} twice; expected it once",
    ),
    "a type twice": (
        {"operands": (Operands(A="f32 | f32", B="f32", out="f32", accumulator="f32"),)},
        "operands has A=float32, B=float32, out=float32 twice; expected it once",
    ),
    "a row within another one": (
        {
            "operands": (
                Operands(A="f32", B="like A", out="f32", accumulator="f32"),
                Operands(A="f16 | f32", B="f32", out="f32", accumulator="f32"),
            )
        },
        "operands has A=float32, B=float32, out=float32 twice; expected it once",
    ),
    "an alignment twice": (
        {"operands": (Operands(**ROW, alignments=({"A": 16}, {}, {"A": 16})),)},
        "operands has alignments ({'A': 16}, {}, {'A': 16}); expected each of them once",
    ),
    "a field that there is not": (
        {"space": Space(tile_shape=((32, 32, 1),), frobnicate=(1, 2))},
        "space has frobnicate; BLASDesignMetadata has tile_shape, cluster_shape: leave it out",
    ),
    "a field that lacks": (
        {"space": Space()},
        "space has no tile_shape, which BLASDesignMetadata needs: give it values",
    ),
    "a design that is none": (
        {"space": Space(stages=(3, 4)), "design": dict},
        "dict(stages=3) is {'stages': 3}; expected a design, derived from DesignMetadata",
    ),
}


@pytest.mark.parametrize(("body", "message"), DECLARATIONS.values(), ids=DECLARATIONS)
def test_a_declaration_that_does_not_go_together_is_refused_and_nothing_is_registered(
    registry, body, message
):
    wrong = type(ka.Kernel)("Wrong", (CudaGemm,), body)
    provider = registry.provider()
    text = refusal(provider.register, wrong)
    assert text.startswith("Wrong cannot be registered: ")
    assert message in text
    assert provider.families() == []


def test_a_design_may_take_what_is_no_field(registry):
    @dataclass(frozen=True)
    class Design(DesignMetadata):
        rows: int = field(init=False)
        tile: InitVar[tuple[int, int]]

        def __post_init__(self, tile):
            object.__setattr__(self, "rows", tile[0])

    class Tiled(CudaGemm):
        design = Design
        space = Space(tile=((16, 8), (32, 8)))
        operands = (Operands(**ROW, majors="strided"),)

    provider = registry.register(Tiled)
    assert provider.families() == [Tiled]


def test_registering_makes_few_designs(registry):
    made = []

    @dataclass(frozen=True)
    class Design(DesignMetadata):
        a: int
        b: int
        c: int

        def __post_init__(self):
            made.append(self)

    class Many(CudaGemm):
        design = Design
        space = Space(a=range(100), b=range(100), c=range(100))
        operands = (Operands(**ROW),)

    registry.register(Many)
    assert 0 < len(made) <= 300


@pytest.mark.parametrize("value", [object, int, "Kernel", None, print], ids=str)
def test_what_is_no_kernel_class_is_refused(registry, value):
    text = refusal(registry.provider().register, value)
    assert "it must be a class derived from kernel_api.Kernel" in text


def test_the_base_of_providers_takes_no_kernels():
    assert "register with a class derived from it" in refusal(ka.Provider.register, CpuGemm)


def test_an_instance_is_refused(registry):
    kernel = LoopGemm(LoopGemm.metadata_of_tile(16))
    assert "it must be a class" in refusal(registry.provider().register, kernel)


def test_a_refused_class_leaves_the_registry_as_it_was(registry):
    class Empty(ka.Kernel):
        pass

    provider = registry.provider()
    refusal(provider.register, Empty)
    assert provider.families() == []
    assert Empty.provider_name() == ""


def test_cutedsl_refuses_a_kernel_that_does_not_derive_from_its_base(registry):
    text = refusal(ka.providers.cutedsl.CuTeDSLProvider.register, CpuGemm)
    assert "must derive from kernel_api.providers.cutedsl.kernel.CuteDslKernel" in text


def test_cutedsl_refuses_a_kernel_that_neither_compiles_nor_has_an_implementation(registry):
    cutedsl = ka.providers.cutedsl

    class Unfinished(cutedsl.CuteDslKernel):
        operands, space, design = CudaGemm.operands, CudaGemm.space, CudaGemm.design

    text = refusal(cutedsl.CuTeDSLProvider.register, Unfinished)
    assert "it needs compile, or implementation" in text


def test_cutedsl_refuses_a_kernel_that_compiles_itself_but_cannot_run(registry):
    cutedsl = ka.providers.cutedsl

    class Unfinished(cutedsl.CuteDslKernel):
        operands, space, design = CudaGemm.operands, CudaGemm.space, CudaGemm.design

        def compile(self, args, cc=None):
            return ka.CompiledArtifact(None, self)

    text = refusal(cutedsl.CuTeDSLProvider.register, Unfinished)
    assert "it needs _run, because it compiles itself" in text


class Nameless(LoopGemm):
    @classmethod
    def family_name(cls):
        raise RuntimeError("no name today")


class Numbered(LoopGemm):
    @classmethod
    def family_name(cls):
        return 3


@pytest.mark.parametrize(
    ("kernel_class", "words"),
    [
        (Nameless, "family_name raises RuntimeError('no name today'); expected a name"),
        (Numbered, "family_name gives 3; expected a name"),
    ],
)
def test_a_family_that_cannot_say_its_name_is_refused(registry, kernel_class, words):
    assert words in refusal(registry.provider().register, kernel_class)


def test_two_classes_of_a_provider_have_families_of_two_names(registry):
    class Mine(CudaGemm):
        family = "sm80.mine"

    class Other(CudaGemm):
        family = "sm80.mine"

    provider = registry.register(Mine)
    text = refusal(provider.register, Other)
    assert "Other cannot be registered: the family 'sm80.mine' is " in text
    assert "Mine; name another family, or unregister that class" in text
    assert provider.families() == [Mine]
    assert len(set(names(provider))) == len(names(provider))
    other = registry.register(Other)  # with another provider
    assert other.families() == [Other]
    provider.unregister(Mine)
    provider.register(Other)
    assert (provider.families(), other.families()) == ([Other], [])
    (found,) = {kernel.metadata.provider for kernel in ka.get_kernels(providers=[provider])}
    assert found == provider.name


def test_rules_of_a_class_that_is_made_without_a_body_count(registry):
    refuses = rule("no problem is small enough")(lambda args: False)
    made = type("Made", (CpuGemm,), {"_": refuses})
    assert made.rules == (*CpuGemm.rules, refuses)
    provider = registry.register(made)
    (rejection,) = ka.explain(gemm_arguments(4, 4, 4), providers=[provider]).rejected
    assert rejection.rule == "no problem is small enough"


# Registering, again, and withdrawing -----------------------------------------------------


def test_register_with_parentheses_is_told_to_be_written_without(registry):
    provider = registry.provider()
    text = refusal(provider.register)
    assert text.endswith(f"; write @{provider.__qualname__}.register without parentheses")


def test_register_is_a_decorator_and_the_class_is_then_offered(registry):
    provider = registry.provider()

    @provider.register
    class Mine(LoopGemm):
        pass

    assert isinstance(Mine, type)
    assert Mine.provider_name() == provider.name
    assert provider.families() == [Mine]
    assert [type(k) for k in ka.get_kernels(providers=[provider])] == [Mine, Mine]


def test_the_same_class_registered_twice_is_offered_once(registry):
    provider = registry.register(LoopGemm)
    once = names(provider)
    provider.register(LoopGemm)
    assert names(provider) == once
    assert provider.families() == [LoopGemm]
    args = gemm_arguments(4, 4, 4)
    assert len(ka.get_kernels(args, providers=[provider])) == len(once)


def test_a_class_defined_again_replaces_the_old_one(registry):
    provider = registry.provider()

    def define(*tiles_of_class):
        @provider.register
        class Again(LoopGemm):
            tiles = tiles_of_class

        return Again

    old, new = define(16), define(32, 64)
    assert old is not new
    assert provider.families() == [new]
    assert {type(k) for k in ka.get_kernels(providers=[provider])} == {new}
    assert len(names(provider)) == 2


def test_a_withdrawn_class_is_offered_no_more(registry):
    provider = registry.register(LoopGemm, CpuGemm)
    args = gemm_arguments(4, 4, 4)
    assert len(ka.get_kernels(args, providers=[provider])) == 3
    provider.unregister(LoopGemm)
    assert provider.families() == [CpuGemm]
    assert len(ka.get_kernels(args, providers=[provider])) == 1


def test_withdrawing_what_is_not_registered_is_refused_by_name(registry):
    provider = registry.provider()
    with pytest.raises(ArgumentError, match=f"LoopGemm is not registered with {provider.name}"):
        provider.unregister(LoopGemm)


def test_families_keep_the_order_of_registration(registry):
    provider = registry.register(CudaGemm, LoopGemm, CpuGemm)
    assert provider.families() == [CudaGemm, LoopGemm, CpuGemm]


# Providers -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_provider_without_a_name_is_refused(registry, name):
    def define():
        type(ka.Provider)("Nameless", (ka.Provider,), {"name": name})

    assert "provider Nameless needs a name" in refusal(define)


def test_a_provider_that_takes_anothers_name_is_refused_naming_both(registry):
    def define():
        class Impostor(ka.Provider):
            name = "torch"

    text = refusal(define)
    assert "'torch' is taken by kernel_api.providers.torch:TorchProvider" in text
    assert "Impostor" in text


def test_a_refused_provider_does_not_replace_the_one_that_is_there(registry):
    def define():
        class Impostor(ka.Provider):
            name = "reference"

    refusal(define)
    assert ka.get_kernels(gemm_arguments(4, 4, 4), providers=["reference"])


def test_a_provider_defined_again_starts_empty(registry):
    def define():
        class Again(ka.Provider):
            name = "again"

        return Again

    define().register(LoopGemm)
    assert len(names("again")) == 2
    define()
    assert names("again") == []


def test_a_provider_may_say_that_its_compiler_is_missing(registry):
    class Lonely(LoopGemm):
        """Which no other test knows: a class keeps its last provider."""

    provider = registry.register(Lonely)
    provider.available = classmethod(
        lambda cls: ka.Status.fail("the compiler is not installed", rule="compiler")
    )
    args = gemm_arguments(4, 4, 4)
    assert ka.get_kernels(args, providers=[provider]) == []
    (rejection,) = ka.explain(args, providers=[provider]).rejected
    assert rejection.reason == "the compiler is not installed"


@pytest.mark.parametrize(
    ("available", "reason"),
    [
        (lambda cls: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda cls: False, r"available\(\) of the provider returned False; expected a Status"),
        (lambda cls: None, r"available\(\) of the provider returned None; expected a Status"),
    ],
)
def test_a_provider_that_cannot_say_whether_it_is_there_is_left_out(registry, available, reason):
    class Lonely(LoopGemm):
        """Which no other test knows: a class keeps its last provider."""

    provider = registry.register(Lonely)
    provider.available = classmethod(available)
    args = gemm_arguments(4, 4, 4)
    asked = [provider, "reference"]
    with pytest.warns(PluginWarning, match=f"provider '{provider.name}'.* is left out: .*{reason}"):
        found = ka.get_kernels(args, providers=asked)
    assert [kernel.metadata.kernel_name for kernel in found] == ["reference_gemm"]
    (rejection,) = ka.explain(args, providers=asked).rejected[:1]
    assert re.search(reason, rejection.reason)


@pytest.mark.parametrize("given", ["cupy", ("cupy", 3), None])
def test_what_a_provider_runs_is_a_tuple_of_names(given):
    words = f"has distributions {given!r}; expected a tuple of names, as in ('torch',)"
    with pytest.raises(RegistrationError, match=re.escape(words)):
        type("First", (ka.Provider,), {"name": "first", "distributions": given})


def test_a_provider_has_a_whole_number_as_rank():
    with pytest.raises(RegistrationError, match="has rank 'first'; expected a whole number"):
        type("First", (ka.Provider,), {"name": "first", "rank": "first"})


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("family", 3, "family is 3; expected a name"),
        ("devices", (), r"devices is \(\); expected a tuple of names"),
        ("devices", "cuda", "devices is 'cuda'; expected a tuple of names"),
        ("targets", "sm_80", "targets is 'sm_80'; expected a tuple of architectures"),
        ("targets", ("zz",), "targets has 'zz'"),
    ],
)
def test_what_every_class_has_is_looked_at_before_it_is_registered(
    registry, attribute, value, words
):
    provider = registry.provider()
    kernel = type("Strange", (ka.Kernel,), {attribute: value})
    with pytest.raises(RegistrationError, match=words):
        provider.register(kernel)
