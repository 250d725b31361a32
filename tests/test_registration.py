"""Registering providers and kernel classes: kernel_api.provider."""

import pytest
from support.data import gemm_arguments
from support.kernels import CpuGemm, CudaGemm, LoopGemm

import kernel_api as ka
from kernel_api.errors import ArgumentError, RegistrationError


def refusal(register, *given):
    with pytest.raises(RegistrationError) as caught:
        register(*given)
    assert isinstance(caught.value, TypeError)
    return str(caught.value)


def names(provider):
    return [k.metadata.kernel_name for k in ka.get_kernels(providers=[provider])]


# What a kernel class must have -----------------------------------------------------------


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


@pytest.mark.parametrize("value", [object, int, "Kernel", None, print], ids=str)
def test_what_is_no_kernel_class_is_refused(registry, value):
    text = refusal(registry.provider().register, value)
    assert "it must be a class derived from kernel_api.Kernel" in text


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


# Registering, again, and withdrawing -----------------------------------------------------


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
    provider = registry.register(LoopGemm)
    provider.available = classmethod(
        lambda cls: ka.Status.fail("the compiler is not installed", rule="compiler")
    )
    args = gemm_arguments(4, 4, 4)
    assert ka.get_kernels(args, providers=[provider]) == []
    (rejection,) = ka.explain(args, providers=[provider]).rejected
    assert rejection.reason == "the compiler is not installed"
