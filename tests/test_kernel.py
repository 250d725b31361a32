"""supports, compile, run and prepare of a kernel: kernel_api.kernel."""

import threading

import pytest
import torch
from support.data import arguments_for, gemm_arguments, gemm_tensors
from support.kernels import CpuGemm, CudaGemm, LoopGemm, exact_product

import kernel_api as ka
from kernel_api.errors import (
    ArgumentError,
    ArtifactError,
    DeviceError,
    ForeignArtifactError,
    SignatureError,
    TargetError,
    UnsupportedError,
    WorkspaceError,
)
from kernel_api.space import Operands
from kernel_api.targets import target

BF16 = ("bf16", "bf16", "f32")


def kernels_of(kernel_class):
    return [
        kernel
        for operands in kernel_class.operand_variants()
        for kernel in kernel_class.kernels_for(operands)
    ]


def cpu_kernel(kernel_class=CpuGemm):
    """A kernel of a class made for this call, so that no other test has compiled it."""
    fresh = type(kernel_class)(kernel_class.__name__, (kernel_class,), {})
    (kernel,) = kernels_of(fresh)
    return kernel


def cuda_kernel(kernel_class=CudaGemm):
    fresh = type(kernel_class)(kernel_class.__name__, (kernel_class,), {})
    return kernels_of(fresh)[0]


# supports --------------------------------------------------------------------------------


def test_supports_is_truthy_or_names_operand_expected_and_actual():
    kernel = cuda_kernel()
    assert kernel.supports(arguments_for(kernel, 64, 64, 64, device="meta"))
    status = kernel.supports(gemm_arguments(64, 64, 64, device="meta", types=("f16",) * 3))
    assert not status
    assert status.error == "A is float16; expected bfloat16"
    assert (status.operand, status.expected, status.actual) == ("A", "bfloat16", "float16")


@pytest.mark.parametrize("args", [None, 3, "args", torch.empty(2, 2)], ids=type)
def test_supports_says_no_to_what_is_no_arguments_object(args):
    status = cpu_kernel().supports(args)
    assert not status
    assert f"got {type(args).__name__}" in status.error


def test_supports_says_no_to_arguments_of_another_operation():
    class OtherArguments(ka.arguments.Arguments):
        kind = "other"

    class Other(CpuGemm):
        arguments = OtherArguments
        operand_variants = CpuGemm.operand_variants

    other = Other(cpu_kernel().metadata)
    status = other.supports(gemm_arguments(4, 4, 4))
    assert status.error == "the kernel computes OtherArguments, these are GemmArguments"


def test_supports_says_no_to_scales_that_the_kernel_would_ignore():
    A, B, out = gemm_tensors(4, 4, 4)
    scaled = ka.ScaledOperand(A, torch.tensor(2.0), ka.ScaleMode.PER_TENSOR)
    status = cpu_kernel().supports(ka.GemmArguments(scaled, B, out))
    assert status.rule == "scales"
    assert status.operand == "A"


def test_the_classes_own_check_comes_after_the_others():
    class Rank3(CpuGemm):
        def _supports(self, args):
            if args.A.rank != 3:
                return ka.Status.fail("All operands must be rank 3.")
            return ka.Status.success()

    kernel = cpu_kernel(Rank3)
    assert kernel.supports(gemm_arguments(4, 4, 4, 2))
    assert kernel.supports(gemm_arguments(4, 4, 4)).error == "All operands must be rank 3."


def test_supports_that_returns_no_status_is_a_type_error_naming_the_class():
    class Careless(CpuGemm):
        def _supports(self, args):
            return True

    with pytest.raises(TypeError, match=r"Careless\._supports returned True; expected a Status"):
        cpu_kernel(Careless).supports(gemm_arguments(4, 4, 4))


# run -------------------------------------------------------------------------------------


def test_run_computes_into_out():
    args = gemm_arguments(5, 6, 7)
    assert cpu_kernel().run(args) is None
    assert torch.equal(args.out.tensor, exact_product(args).float())


def test_a_cpu_tensor_to_a_cuda_kernel_is_refused_naming_both_devices():
    kernel = cuda_kernel()
    args = gemm_arguments(64, 64, 64, types=BF16)
    with pytest.raises(UnsupportedError) as caught:
        kernel.run(args)
    assert "the operands are on cpu; the kernel runs on cuda" in str(caught.value)
    assert kernel.metadata.kernel_name in str(caught.value)
    assert caught.value.status.rule == "device"
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("make", [cpu_kernel, cuda_kernel])
def test_meta_tensors_are_compiled_for_but_not_run_on(make):
    kernel = make()
    args = arguments_for(kernel, 64, 64, 64, device="meta")
    assert kernel.supports(args)
    with pytest.raises(DeviceError, match="A is a meta or fake tensor"):
        kernel.run(args)
    with pytest.raises(DeviceError, match="A is a meta or fake tensor"):
        kernel.prepare(args)


def test_fake_tensors_are_not_run_on():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        args = gemm_arguments(4, 4, 4, device="meta")
        fake = ka.GemmArguments(torch.empty(4, 4), torch.empty(4, 4), torch.empty(4, 4))
    for one in (args, fake):
        with pytest.raises(DeviceError, match="A is a meta or fake tensor"):
            cpu_kernel().run(one)


def test_unsupported_arguments_are_refused_before_anything_is_written():
    A, B, out = gemm_tensors(4, 4, 4, types=("int16",) * 3)
    out.fill_(7)

    class FloatOnly(CpuGemm):
        operands = (Operands(A="f32", B="f32", out="f32", accumulator="f32", majors="strided"),)

    with pytest.raises(UnsupportedError, match="A is int16; expected float32"):
        cpu_kernel(FloatOnly).run(ka.GemmArguments(A, B, out))
    assert (out == 7).all()


@pytest.mark.parametrize("args", [None, 3, "args"])
def test_run_refuses_what_is_no_arguments_object(args):
    with pytest.raises((UnsupportedError, ArgumentError), match=f"got {type(args).__name__}"):
        cpu_kernel().run(args)


def test_checks_are_made_once_for_each_arguments_object():
    class Counting(CpuGemm):
        asked = 0

        def _supports(self, args):
            seen.append(args)
            return ka.Status.success()

    seen = []
    kernel = cpu_kernel(Counting)
    args = gemm_arguments(4, 4, 4)
    kernel.run(args)
    asked = len(seen)
    kernel.run(args)
    kernel.run(args)
    assert len(seen) == asked


def test_assume_supported_args_skips_supports():
    class Refusing(CpuGemm):
        def _supports(self, args):
            return ka.Status.fail("never")

    kernel = cpu_kernel(Refusing)
    args = gemm_arguments(4, 4, 4)
    with pytest.raises(UnsupportedError, match="never"):
        kernel.run(args)
    artifact = ka.CompiledArtifact(None, kernel, args.signature)
    kernel.run(args, artifact, assume_supported_args=True)
    assert torch.equal(args.out.tensor, exact_product(args).float())


def test_a_kernel_without_run_says_so():
    class Unfinished(CpuGemm):
        _run = ka.Kernel._run

    with pytest.raises(TypeError, match="Unfinished does not implement _run"):
        cpu_kernel(Unfinished).run(gemm_arguments(4, 4, 4))


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
    if torch.cuda.is_available():
        monkeypatch.setattr("kernel_api.devices.cuda_available", lambda: False)
    kernel = cuda_kernel()
    args = arguments_for(kernel, 64, 64, 64, device="meta")
    with pytest.raises(DeviceError, match="pass cc= or set KERNEL_API_ARCH"):
        kernel.compile(args)
    monkeypatch.setenv("KERNEL_API_ARCH", "sm_86")
    assert kernel.compile(args).target == target("sm_86")


def test_compile_changes_nothing_of_the_kernel():
    kernel = cuda_kernel()
    before = dict(vars(kernel))
    kernel.compile(arguments_for(kernel, 64, 64, 64, device="meta"), cc=90)
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
    with pytest.raises(SignatureError):
        kernel.run(args, kernel.compile(gemm_arguments(4, 4, 4, 2)))
    assert (args.out.tensor == 7).all()


# Workspace -------------------------------------------------------------------------------


class Scratch(CpuGemm):
    given = None

    def get_workspace_size(self, args):
        return 64

    def _run(self, args, artifact, stream, workspace=None):
        type(self).given = workspace.clone()
        workspace.fill_(255)
        super()._run(args, artifact, stream, workspace)


def test_a_workspace_is_allocated_and_zeroed_each_time():
    kernel = cpu_kernel(Scratch)
    args = gemm_arguments(4, 4, 4)
    for _ in range(3):
        type(kernel).given = None
        kernel.run(args)
        assert type(kernel).given.dtype is torch.uint8
        assert type(kernel).given.shape == (64,)
        assert not type(kernel).given.any()


@pytest.mark.parametrize("size", [64, 100])
def test_a_workspace_that_is_large_enough_is_used_as_it_is(size):
    kernel = cpu_kernel(Scratch)
    workspace = torch.full((size,), 3, dtype=torch.uint8)
    kernel.run(gemm_arguments(4, 4, 4), workspace=workspace)
    assert (type(kernel).given == 3).all()
    assert (workspace == 255).all()


@pytest.mark.parametrize("size", [0, 1, 63])
def test_a_workspace_that_is_too_small_is_refused_with_both_sizes(size):
    kernel = cpu_kernel(Scratch)
    args = gemm_arguments(4, 4, 4)
    args.out.tensor.fill_(7)
    workspace = torch.empty(size, dtype=torch.uint8)
    with pytest.raises(WorkspaceError, match=f"has {size} bytes; 64 are needed"):
        kernel.run(args, workspace=workspace)
    assert (args.out.tensor == 7).all()


def test_a_workspace_of_another_type_or_device_is_refused():
    kernel = cpu_kernel(Scratch)
    args = gemm_arguments(4, 4, 4)
    with pytest.raises(WorkspaceError, match=r"float32 on cpu; expected torch\.uint8 on cpu"):
        kernel.run(args, workspace=torch.empty(64))
    with pytest.raises(WorkspaceError, match=r"uint8 on meta; expected torch\.uint8 on cpu"):
        kernel.run(args, workspace=torch.empty(64, dtype=torch.uint8, device="meta"))


@pytest.mark.parametrize("workspace", [64, b"0" * 64, [0] * 64], ids=type)
def test_a_workspace_that_is_no_tensor_is_refused(workspace):
    with pytest.raises(WorkspaceError):
        cpu_kernel(Scratch).run(gemm_arguments(4, 4, 4), workspace=workspace)


# prepare ---------------------------------------------------------------------------------


def test_a_prepared_launch_takes_new_tensors_of_the_signature():
    kernel = cpu_kernel()
    launch = kernel.prepare(gemm_arguments(4, 4, 4))
    for seed, extent in enumerate((4, 5, 6)):
        args = gemm_arguments(extent, extent, extent, seed=seed)
        launch(*args.tensors)
        assert torch.equal(args.out.tensor, exact_product(args).float())


@pytest.mark.parametrize(
    "options",
    [{"accumulator_type": "float64"}, {"fp32_precision": "tf32"}, {"fp32_precision": "ieee"}],
    ids=str,
)
def test_a_prepared_launch_keeps_the_options_it_was_prepared_with(options):
    kernel = cpu_kernel()
    args = gemm_arguments(4, 4, 4, **options)
    kernel.prepare(args)(*args.tensors)
    assert torch.equal(args.out.tensor, exact_product(args).float())


def test_a_prepared_launch_refuses_tensors_of_another_signature():
    launch = cpu_kernel().prepare(gemm_arguments(4, 4, 4))
    with pytest.raises(SignatureError):
        launch(*gemm_tensors(4, 4, 4, types=("f64",) * 3))


def test_prepare_refuses_what_run_would_refuse():
    with pytest.raises(UnsupportedError, match="the kernel runs on cuda"):
        cuda_kernel().prepare(gemm_arguments(64, 64, 64, types=BF16))


# Identity --------------------------------------------------------------------------------


def test_kernels_of_equal_metadata_are_equal():
    kernel = cuda_kernel()
    assert kernel.metadata.rebuild() == kernel
    assert hash(kernel.metadata.rebuild()) == hash(kernel)
    assert kernel != kernels_of(type(kernel))[1]
    assert kernel != kernel.metadata


def test_repr_is_the_name():
    kernel = LoopGemm(LoopGemm.metadata_of_tile(16))
    assert repr(kernel) == "<LoopGemm_tile16>"
