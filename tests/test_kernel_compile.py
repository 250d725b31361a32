"""compile of a kernel, and the artifacts that it gives: kernel_api.kernel, artifact."""

import threading
import warnings

import pytest
import torch
from support.data import arguments_for, gemm_arguments
from support.kernels import (
    CpuGemm,
    CudaGemm,
    LoopGemm,
    cpu_kernel,
    cuda_kernel,
    exact_product,
    kernels_of,
)

import kernel_api as ka
from kernel_api.errors import (
    ArtifactError,
    DeviceError,
    ForeignArtifactError,
    SignatureError,
    TargetError,
    UnsupportedError,
)
from kernel_api.providers.cutedsl import compiler
from kernel_api.targets import target

BF16 = ("bf16", "bf16", "f32")


# compile ---------------------------------------------------------------------------------


class Counted(CudaGemm):
    compilations = 0

    def compile(self, args, cc=None):
        type(self).compilations += 1
        return ka.CompiledArtifact(object(), self)


def test_an_artifact_knows_its_kernel_signature_and_target():
    kernel = cuda_kernel()
    args = arguments_for(kernel, 64, 64, 64, device="meta")
    artifact = kernel.compile(args, cc=90)
    assert artifact.kernel is kernel
    assert artifact.signature == args.signature
    assert artifact.target == target("sm_90")
    assert kernel.metadata.kernel_name in repr(artifact)
    assert "sm_90" in repr(artifact)


@pytest.mark.filterwarnings("error")
def test_a_compilation_silences_advice_and_leaves_what_others_set_of_warnings(monkeypatch):
    def compiles(implementation, **options):
        warnings.warn("This static loop has 64 iterations", stacklevel=1)
        other = threading.Thread(target=warnings.simplefilter, args=("always", BytesWarning))
        other.start()
        other.join()

    compiler.load()
    monkeypatch.setattr("cutlass.cute.compile", compiles)
    before = list(warnings.filters)
    compiler.compile(lambda: None, [], target("sm_80"))
    assert warnings.filters == [("always", None, BytesWarning, None, 0), *before]


class Forgetful:
    def __call__(self, a, b, out): ...

    def with_operands(self, a, b, out, more, workspace, stream): ...


class _FakeTensor: ...


class _FakeStream: ...


@pytest.mark.parametrize(
    ("implementation", "takes"),
    [
        (Forgetful(), "Forgetful.__call__ takes (a, b, out)"),
        (
            Forgetful().with_operands,
            "Forgetful.with_operands takes (a, b, out, more, workspace, stream)",
        ),
    ],
    ids=["call", "with_operands"],
)
def test_an_implementation_that_forgets_an_argument_is_told_what_it_is_called_with(
    implementation, takes
):
    given = (_FakeTensor(), _FakeTensor(), _FakeTensor(), _FakeStream())
    with pytest.raises(ka.errors.CompileError) as caught:
        compiler.compile(implementation, given, target("sm_80"))
    called = "it is called with 4 arguments: tensor, tensor, tensor, stream"
    assert str(caught.value) == f"{takes}; {called}"


def test_compilation_is_not_repeated_for_other_sizes_of_a_signature():
    kernel = cuda_kernel(Counted)
    first = kernel.compile(arguments_for(kernel, 64, 64, 64, device="meta"), cc=90)
    again = kernel.compile(arguments_for(kernel, 128, 256, 64, device="meta"), cc="9.0")
    assert again is first
    assert type(kernel).compilations == 1


def test_compilation_is_repeated_for_another_signature_or_target():
    kernel = cuda_kernel(Counted)
    flat = arguments_for(kernel, 64, 64, 64, device="meta")
    batched = arguments_for(kernel, 64, 64, 64, 2, device="meta")
    artifacts = [kernel.compile(flat, cc=80), kernel.compile(flat, cc=90),
                 kernel.compile(batched, cc=90)]  # fmt: skip
    assert len(set(artifacts)) == 3
    assert type(kernel).compilations == 3


def test_equal_kernels_share_an_artifact():
    kernel = cuda_kernel(Counted)
    args = arguments_for(kernel, 64, 64, 64, device="meta")
    assert kernel.metadata.rebuild().compile(args, cc=90) is kernel.compile(args, cc=90)
    assert type(kernel).compilations == 1


def test_run_compiles_once():
    compiled = []

    class Compiling(CpuGemm):
        def compile(self, args, cc=None):
            compiled.append(args.signature)
            return ka.CompiledArtifact(None, self)

    kernel = cpu_kernel(Compiling)
    for extent in (4, 5, 6):
        args = gemm_arguments(extent, extent, extent)
        kernel.run(args)
        kernel.run(args)
        assert torch.equal(args.out.tensor, exact_product(args).float())
    assert len(compiled) == 1


def test_threads_that_compile_the_same_signature_compile_it_once():
    started = threading.Barrier(4)

    class Slow(CudaGemm):
        compilations = 0

        def compile(self, args, cc=None):
            type(self).compilations += 1
            threading.Event().wait(0.2)
            return ka.CompiledArtifact(object(), self)

    kernel = cuda_kernel(Slow)
    found = []

    def compile_it():
        args = arguments_for(kernel, 64, 64, 64, device="meta")
        started.wait()
        found.append(kernel.compile(args, cc=90))

    threads = [threading.Thread(target=compile_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 4
    assert len(set(found)) == 1
    assert type(kernel).compilations == 1


def test_a_compilation_that_failed_is_tried_again():
    class Flaky(CudaGemm):
        attempts = 0

        def compile(self, args, cc=None):
            type(self).attempts += 1
            if type(self).attempts == 1:
                raise ka.errors.CompileError("out of registers")
            return ka.CompiledArtifact(object(), self)

    kernel = cuda_kernel(Flaky)
    args = arguments_for(kernel, 64, 64, 64, device="meta")
    with pytest.raises(ka.errors.CompileError):
        kernel.compile(args, cc=90)
    assert kernel.compile(args, cc=90).target == target(90)


def test_an_error_of_a_kernels_code_is_a_compile_error_with_its_cause():
    class Misspelt(CudaGemm):
        def compile(self, args, cc=None):
            return no_such_name  # noqa: F821

    kernel = cuda_kernel(Misspelt)
    with pytest.raises(ka.errors.CompileError, match="does not compile: NameError") as caught:
        kernel.compile(arguments_for(kernel, 64, 64, 64, device="meta"), cc=90)
    assert kernel.metadata.kernel_name in str(caught.value)
    assert isinstance(caught.value.__cause__, NameError)


@pytest.mark.parametrize("error", [MemoryError(), ka.errors.DeviceError("no GPU")], ids=repr)
def test_errors_that_say_what_lacks_stay_as_they_are(error):
    class Failing(CudaGemm):
        def compile(self, args, cc=None):
            raise error

    kernel = cuda_kernel(Failing)
    with pytest.raises(type(error)) as caught:
        kernel.compile(arguments_for(kernel, 64, 64, 64, device="meta"), cc=90)
    assert caught.value is error


@pytest.mark.parametrize("result", [None, object(), "code", lambda: None])
def test_a_compile_that_returns_no_artifact_is_a_type_error_naming_both(result):
    class Careless(CudaGemm):
        def compile(self, args, cc=None):
            return result

    kernel = cuda_kernel(Careless)
    expected = f"Careless.compile returned {type(result).__name__}; expected a CompiledArtifact"
    with pytest.raises(TypeError, match=expected):
        kernel.compile(arguments_for(kernel, 64, 64, 64, device="meta"), cc=90)


def test_compile_refuses_arguments_that_the_kernel_does_not_support():
    kernel = cuda_kernel(Counted)
    args = gemm_arguments(64, 64, 64, device="meta", types=("f16",) * 3)
    with pytest.raises(UnsupportedError, match="A is float16; expected bfloat16"):
        kernel.compile(args, cc=90)
    assert type(kernel).compilations == 0


def test_compile_refuses_an_architecture_that_the_kernel_is_not_for():
    class Hopper(CudaGemm):
        targets = ("sm_90a",)

    kernel = cuda_kernel(Hopper)
    args = arguments_for(kernel, 64, 64, 64, device="meta")
    with pytest.raises(UnsupportedError, match="the kernel is for sm_90a, the device is sm_100"):
        kernel.compile(args, cc=100)
    assert str(kernel.compile(args, cc=90).target) == "sm_90a"
    assert kernel.compile(args, cc="sm_90a") is kernel.compile(args, cc=90)


def test_compile_without_gpu_and_architecture_says_what_to_pass(monkeypatch):
    kernel = cuda_kernel()
    args = arguments_for(kernel, 64, 64, 64, device="meta")
    with pytest.raises(DeviceError, match="pass cc= or set KERNEL_API_ARCH"):
        kernel.compile(args)
    monkeypatch.setenv("KERNEL_API_ARCH", "sm_86")
    assert kernel.compile(args).target == target("sm_86")


def test_compile_changes_nothing_of_the_kernel():
    kernel = cuda_kernel()
    args = arguments_for(kernel, 64, 64, 64, device="meta")
    assert kernel.supports(args)  # which remembers what is left to ask
    before = dict(vars(kernel))
    kernel.compile(args, cc=90)
    assert vars(kernel) == before


def test_a_compile_assigned_to_the_class_later_is_guarded_as_well():
    class Late(CudaGemm):
        compilations = 0

    def compile(self, args, cc=None):
        type(self).compilations += 1
        return ka.CompiledArtifact(object(), self)

    kernel = cuda_kernel(Late)
    type(kernel).compile = compile
    args = arguments_for(kernel, 64, 64, 64, device="meta")
    artifact = kernel.compile(args, cc=90)
    assert kernel.compile(args, cc=90) is artifact
    assert type(kernel).compilations == 1
    assert artifact.signature == args.signature
    wrong = gemm_arguments(64, 64, 64, device="meta", types=("f16",) * 3)
    with pytest.raises(UnsupportedError):
        kernel.compile(wrong, cc=90)


class Unguarded(ka.Kernel):
    """Compiles by the hook that the base class calls."""

    arguments, targets = CudaGemm.arguments, CudaGemm.targets
    operands, space, design = CudaGemm.operands, CudaGemm.space, CudaGemm.design
    _run = CudaGemm._run

    def _compile(self, args, cc=None):
        return ka.CompiledArtifact("made by _compile", self)


def test_the_hook_compile_is_enough():
    kernel = cuda_kernel(Unguarded)
    args = arguments_for(kernel, 64, 64, 64, device="meta")
    assert kernel.compile(args, cc=90).compiled_obj == "made by _compile"
    assert kernel.compile(args, cc=90) is kernel.compile(args, cc=90)


@pytest.mark.parametrize("base", [CudaGemm, Unguarded])
def test_a_compile_that_calls_that_of_its_base_returns(base):
    class Derived(base):
        def compile(self, args, cc=None):
            return super().compile(args, cc)

    kernel = kernels_of(Derived)[0]
    args = arguments_for(kernel, 64, 64, 64, device="meta")
    made = []
    thread = threading.Thread(target=lambda: made.append(kernel.compile(args, cc=90)), daemon=True)
    thread.start()
    thread.join(10)
    assert made, "compile waits for itself"
    assert made[0].kernel is kernel


# Artifacts -------------------------------------------------------------------------------


def test_an_artifact_of_the_same_signature_is_accepted():
    kernel = cpu_kernel()
    args = gemm_arguments(4, 5, 6)
    artifact = kernel.compile(gemm_arguments(7, 8, 9))
    kernel.run(args, artifact)
    assert torch.equal(args.out.tensor, exact_product(args).float())


@pytest.mark.parametrize("given", [3, False, "kernel.so", object(), []], ids=type)
def test_what_is_no_artifact_is_refused_by_name(given):
    kernel, args = cpu_kernel(), gemm_arguments(4, 4, 4)
    for call in (kernel.run, kernel.prepare):
        with pytest.raises(ArtifactError) as caught:
            call(args, given)
        assert str(caught.value) == (
            f"artifact is a {type(given).__name__}; expected one that compile(args) gave, or None"
        )


def test_an_artifact_of_another_kernel_is_refused_naming_both():
    one, other = cpu_kernel(), LoopGemm(LoopGemm.metadata_of_tile(16))
    args = gemm_arguments(4, 4, 4)
    with pytest.raises(ForeignArtifactError) as caught:
        one.run(args, other.compile(args))
    assert isinstance(caught.value, ArtifactError)
    assert "compiled by LoopGemm_tile16" in str(caught.value)
    assert f"not by {one.metadata.kernel_name}" in str(caught.value)


def test_an_artifact_of_another_design_of_the_class_is_refused():
    small, large = (LoopGemm(LoopGemm.metadata_of_tile(tile)) for tile in (16, 32))
    args = gemm_arguments(4, 4, 4)
    with pytest.raises(ForeignArtifactError, match="LoopGemm_tile16"):
        large.run(args, small.compile(args))


@pytest.mark.parametrize(
    "other",
    [{"types": ("f32", "f32", "f64")}, {"layouts": "tnt"}, {"L": 2}, {"types": ("f64",) * 3}],
    ids=str,
)
def test_an_artifact_of_another_signature_is_refused(other):
    kernel = cpu_kernel()
    artifact = kernel.compile(gemm_arguments(4, 4, 4, **other))
    with pytest.raises(SignatureError, match="compile for them"):
        kernel.run(gemm_arguments(4, 4, 4), artifact)


def test_an_artifact_for_another_architecture_is_refused_naming_both():
    kernel = cuda_kernel()
    args = arguments_for(kernel, 64, 64, 64, device="meta")
    artifact = kernel.compile(args, cc=80)
    with pytest.raises(TargetError, match="compiled for sm_80, the device is sm_90; compile with"):
        artifact.check(kernel, args, target(90))


@pytest.mark.parametrize(
    ("compiled", "device", "runs"),
    [
        ("sm_80", "sm_80", True),
        ("sm_80", "sm_86", True),
        ("sm_86", "sm_80", False),
        ("sm_80", "sm_90", False),
        ("sm_90", "sm_80", False),
        ("sm_90a", "sm_90", True),
        ("sm_90a", "sm_100", False),
        ("sm_100f", "sm_103", True),
        ("sm_100f", "sm_120", False),
    ],
)
def test_machine_code_runs_on_its_major_from_its_minor_on(compiled, device, runs):
    kernel = cuda_kernel()
    artifact = ka.CompiledArtifact(None, kernel, (), target(compiled))
    assert artifact.runs_on(target(device)) is runs


def test_refused_artifacts_write_nothing():
    kernel = cpu_kernel()
    args = gemm_arguments(4, 4, 4)
    args.out.tensor.fill_(7)
    with pytest.raises(SignatureError, match=r"for A \('float32', 3, -1, None\) where"):
        kernel.run(args, kernel.compile(gemm_arguments(4, 4, 4, 2)))
    assert (args.out.tensor == 7).all()


def test_what_two_signatures_differ_in_is_told_by_its_name():
    def biased(element):
        A, B, out = (torch.zeros(4, 4) for _ in range(3))
        return ka.fusions.gemm(A, B, out=out, bias=torch.zeros(4, dtype=element))

    args = biased(torch.float32)
    kernel = ka.get_kernels(args)[0]
    words = "the artifact was compiled for bias float32 where the arguments have float16; compile f"
    with pytest.raises(SignatureError, match=words):
        kernel.run(biased(torch.float16), kernel.compile(args))
