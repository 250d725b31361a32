"""What a kernel does with streams, graphs, artifacts and operands on a GPU."""

import threading

import pytest
import torch
from support.data import arguments_for, gemm_arguments, gemm_tensors

import kernel_api as ka
from kernel_api import _compile_cache
from kernel_api.errors import (
    ArgumentError,
    CaptureError,
    ForeignArtifactError,
    SignatureError,
    TargetError,
    UnsupportedError,
)
from kernel_api.providers.reference.gemm import product
from kernel_api.verification import poison

pytestmark = pytest.mark.gpu

BF16 = ("bf16", "bf16", "bf16")


def offered(**how):
    """The CuTe DSL kernels for an ordinary bf16 problem, best first."""
    args = problem(**how)
    return ka.get_kernels(args, providers=["cutedsl"])


def problem(M=256, N=128, K=192, L=None, **how):
    return gemm_arguments(
        M, N, K, L, **{"types": BF16, "device": "cuda", "values": "integers", **how}
    )


def is_right(args):
    torch.cuda.synchronize()
    A, B, out = args.tensors
    return torch.equal(out, product(A, B).to(out.dtype))


@pytest.fixture
def kernel():
    return offered()[0]


def uncompiled(metadata):
    """The kernel, for which nothing is compiled in this process."""
    _compile_cache.clear()
    return metadata.rebuild()


# Who is offered --------------------------------------------------------------------------


def test_a_cuda_tensor_gets_cutedsl_first_then_torch_then_reference():
    kernels = ka.get_kernels(problem())
    providers = list(dict.fromkeys(k.metadata.provider for k in kernels))
    assert providers == ["cutedsl", "torch", "reference"]


def test_only_kernels_that_this_gpu_runs_are_offered():
    from kernel_api.devices import device_target

    device = device_target(torch.cuda.current_device())
    for kernel in ka.get_kernels(problem()):
        assert any(t.runs_on(device) for t in kernel.metadata.parsed_targets)


@pytest.mark.parametrize("provider", ["torch", "reference"])
@pytest.mark.parametrize("types", [BF16, ("f16", "f16", "f32"), ("f32",) * 3, ("f64",) * 3])
def test_torch_and_reference_pass_verification(provider, types):
    args = gemm_arguments(129, 65, 1000, types=types, device="cuda")
    (kernel,) = ka.get_kernels(args, providers=[provider])
    assert ka.verify(kernel, args)


def test_reference_is_exact_for_integers():
    args = gemm_arguments(65, 63, 129, types=("i8", "i8", "i32"), device="cuda")
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    assert ka.verify(kernel, args)


def test_tf32_is_used_only_where_it_is_allowed():
    full = gemm_arguments(128, 128, 128, device="cuda", fp32_precision="ieee")
    allowed = gemm_arguments(128, 128, 128, device="cuda", fp32_precision="tf32")
    for kernel in ka.get_kernels(full, providers=["cutedsl"]):
        assert kernel.metadata.operands.multiplication_type is None
    for kernel in ka.get_kernels(allowed)[:3]:
        assert ka.verify(kernel, allowed)


# Refusals --------------------------------------------------------------------------------


def test_cpu_tensors_are_refused_naming_both_devices(kernel):
    args = problem(device="cpu")
    with pytest.raises(UnsupportedError, match="the operands are on cpu; the kernel runs on cuda"):
        kernel.run(args)


def test_operands_on_cpu_and_gpu_are_refused():
    A, B, out = gemm_tensors(64, 64, 64, types=BF16, device="cuda")
    with pytest.raises(ArgumentError, match="B is on cpu but A is on cuda"):
        ka.GemmArguments(A, B.cpu(), out)


def test_a_misaligned_pointer_is_refused_by_aligned_kernels_and_taken_by_others():
    misaligned = problem(offsets=(1, 0, 0))
    aligned = [k for k in offered() if k.metadata.operands.A.divisibility > 1]
    assert aligned
    for kernel in aligned:
        status = kernel.supports(misaligned)
        assert status.operand == "A"
        assert "address is 2 bytes off" in status.error
    with pytest.raises(UnsupportedError, match="address is 2 bytes off"):
        aligned[0].run(misaligned)
    for kernel in ka.get_kernels(misaligned)[:2]:
        assert ka.verify(kernel, misaligned)


def test_an_artifact_of_another_kernel_is_refused():
    one, other = offered()[:2]
    args = problem()
    with pytest.raises(ForeignArtifactError, match=other.metadata.kernel_name):
        one.run(args, other.compile(args))


def test_an_artifact_of_another_signature_is_refused(kernel):
    artifact = kernel.compile(problem(L=2))
    with pytest.raises(SignatureError):
        kernel.run(problem(), artifact)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 8,
    reason="machine code for sm_80 runs on this GPU",
)
def test_an_artifact_for_another_architecture_is_refused():
    portable = [k for k in offered() if "sm_80" in k.metadata.targets]
    args = problem()
    artifact = portable[0].compile(args, cc=80)
    with pytest.raises(TargetError, match="compiled for sm_80"):
        portable[0].run(args, artifact)
    portable[0].run(args)
    assert is_right(args)


def test_refusals_leave_the_gpu_usable_and_out_unwritten(kernel):
    args = problem()
    args.out.tensor.fill_(7)
    with pytest.raises(SignatureError):
        kernel.run(args, kernel.compile(problem(L=2)))
    torch.cuda.synchronize()
    assert (args.out.tensor == 7).all()


# Operands --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["A", "B"])
def test_a_batch_broadcast_by_expand_is_right(name):
    A, B, out = gemm_tensors(128, 64, 64, 3, types=BF16, device="cuda", values="integers")
    tensors = {"A": A, "B": B}
    tensors[name] = tensors[name][:1].expand(tensors[name].shape)
    args = ka.GemmArguments(tensors["A"], tensors["B"], out)
    kernels = ka.get_kernels(args, providers=["cutedsl"])
    assert kernels
    for kernel in kernels[:3]:
        poison(out)
        kernel.run(args)
        assert is_right(args)


def test_columns_of_a_packed_projection_are_taken_as_they_lie():
    packed = torch.zeros(256, 3 * 128, device="cuda", dtype=torch.bfloat16)
    A, B, _ = gemm_tensors(256, 128, 64, types=BF16, device="cuda", values="integers")
    args = ka.GemmArguments(A, B, packed[:, 128:256])
    ka.get_kernels(args, providers=["cutedsl"])[0].run(args)
    assert is_right(args)
    assert not packed[:, :128].any()
    assert not packed[:, 256:].any()


def test_inputs_that_require_gradients_are_taken(kernel):
    args = problem()
    args.A.tensor.requires_grad_(True)
    kernel.run(args)
    assert not args.out.tensor.requires_grad


# Streams ---------------------------------------------------------------------------------


def stream_forms():
    from cuda.bindings import driver

    stream = torch.cuda.Stream()

    class Protocol:
        def __cuda_stream__(self):
            return (0, stream.cuda_stream)

    return stream, {
        "torch stream": stream,
        "int": stream.cuda_stream,
        "CUstream": driver.CUstream(stream.cuda_stream),
        "protocol": Protocol(),
    }


@pytest.mark.parametrize("form", ["torch stream", "int", "CUstream", "protocol"])
@pytest.mark.parametrize("provider", ["cutedsl", "torch"])
def test_a_stream_is_taken_in_every_form_and_the_launch_is_on_it(form, provider):
    args = problem()
    kernel = ka.get_kernels(args, providers=[provider])[0]
    kernel.run(args)
    torch.cuda.synchronize()
    stream, forms = stream_forms()
    poison(args.out.tensor)
    torch.cuda.synchronize()
    launched = torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)  # about 0.2 s: what comes behind it on the stream waits
    kernel.run(args, stream=forms[form])
    launched.record(stream)
    assert not launched.query()
    stream.synchronize()
    assert is_right(args)


def test_without_a_stream_the_launch_is_on_torchs_current_one(kernel):
    args = problem()
    kernel.run(args)
    torch.cuda.synchronize()
    poison(args.out.tensor)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)
        kernel.run(args)
        copied = args.out.tensor.clone()
    stream.synchronize()
    assert torch.equal(copied, args.out.tensor)
    assert is_right(args)


def test_what_is_no_stream_is_refused(kernel):
    with pytest.raises(TypeError, match="stream is a"):
        kernel.run(problem(), stream="default")


# Prepared launches -----------------------------------------------------------------------


def test_a_prepared_launch_takes_new_tensors_sizes_and_streams(kernel):
    launch = kernel.prepare(problem())
    stream = torch.cuda.Stream()
    for seed, (M, N, K) in enumerate(((256, 128, 192), (512, 64, 64), (8, 1024, 128))):
        for where in (None, stream):
            args = problem(M, N, K, seed=seed)
            torch.cuda.synchronize()
            launch(*args.tensors, stream=where)
            assert is_right(args)


def test_ops_gemm_runs_the_best_kernel():
    A, B, _ = gemm_tensors(256, 128, 192, types=BF16, device="cuda", values="integers")
    out = ka.ops.gemm(A, B)
    assert is_right(ka.GemmArguments(A, B, out))


# CUDA graphs -----------------------------------------------------------------------------


def test_a_compiled_kernel_is_captured_and_its_replay_is_right(kernel):
    args = problem()
    kernel.run(args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.run(args)
    for seed in range(3):
        fresh = problem(seed=seed)
        args.A.tensor.copy_(fresh.A.tensor)
        args.B.tensor.copy_(fresh.B.tensor)
        poison(args.out.tensor)
        graph.replay()
        assert is_right(args)


def test_a_prepared_launch_is_captured(kernel):
    args = problem()
    launch = kernel.prepare(args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(*args.tensors)
    poison(args.out.tensor)
    graph.replay()
    assert is_right(args)


def test_a_kernel_that_is_not_compiled_is_refused_in_a_capture_and_nothing_breaks(kernel):
    fresh = uncompiled(offered()[1].metadata)
    args = problem()
    other = problem(seed=1)
    kernel.run(other)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(CaptureError, match="call compile"):
            fresh.run(args)
        kernel.run(other)
    poison(other.out.tensor)
    graph.replay()
    assert is_right(other)
    fresh.run(args)
    assert is_right(args)


# Threads ---------------------------------------------------------------------------------


def test_threads_may_compile_and_run_different_kernels_at_the_same_time():
    kernels = [uncompiled(k.metadata) for k in offered()[:4]]
    wrong = []

    def work(kernel):
        args = problem()
        kernel.run(args)
        torch.cuda.current_stream().synchronize()
        if not is_right(args):
            wrong.append(kernel)

    threads = [threading.Thread(target=work, args=(kernel,)) for kernel in kernels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# Machine code ----------------------------------------------------------------------------


def test_artifacts_are_compiled_for_this_gpu_and_tell_their_resources(kernel):
    args = arguments_for(kernel, 256, 128, 64, device="cuda")
    artifact = kernel.compile(args)
    major, minor = torch.cuda.get_device_capability()
    assert artifact.target.cc == 10 * major + minor
    assert artifact.resources.spill_bytes == 0
    assert artifact.resources.threads > 0
    assert artifact.resources.registers > 0
