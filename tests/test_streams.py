"""Streams in every form, and captures that compilation would break; without a GPU."""

import contextlib
import math
from fractions import Fraction

import pytest
import torch
from support.data import gemm_arguments
from support.kernels import cuda_kernel
from torch._subclasses.fake_tensor import FakeTensorMode

import kernel_api as ka
import kernel_api.graph as cudnn
from kernel_api import devices
from kernel_api.errors import ArgumentError, CaptureError, DeviceError
from kernel_api.providers.streams import on_stream
from kernel_api.utils import stream_handle, to_cuda_stream

HANDLE = 0x7F00


class FakeStream(torch.Stream):
    """What torch.cuda.Stream is to torch.Stream where torch has CUDA."""

    def __new__(cls, **given):
        made = super().__new__(cls, device="cpu")
        made.given = given
        return made


class Protocol:
    def __cuda_stream__(self):
        return (0, HANDLE)


@pytest.fixture
def entered(monkeypatch):
    """The streams that were made torch's current one."""
    entered = []

    @contextlib.contextmanager
    def stream(one):
        entered.append(one)
        yield

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return entered


def handles():
    from cuda.bindings import driver

    return {"int": HANDLE, "CUstream": driver.CUstream(HANDLE), "protocol": Protocol()}


@pytest.mark.parametrize("form", ["int", "CUstream", "protocol"])
@pytest.mark.parametrize("index", [None, 0, 3])
def test_a_handle_is_one_of_the_operands_device(form, index, entered):
    with on_stream(handles()[form], index):
        assert entered == [(HANDLE, index)]


def test_without_a_stream_the_current_one_stays(entered):
    with on_stream(None, 0):
        assert entered == []


def test_a_stream_of_another_device_is_refused(entered):
    with pytest.raises(DeviceError, match="is one of cpu, the operands are on cuda:1"):
        on_stream(torch.Stream(device="cpu"), 1)
    assert entered == []


def test_torchs_streams_are_taken_as_they_are_and_generic_ones_as_cudas(entered):
    own, generic = FakeStream(), torch.Stream(device="cpu")
    for one in (own, generic):
        with on_stream(one):
            pass
    assert entered[0] is own
    assert entered[1].given["stream_id"] == generic.stream_id


class Malformed:
    def __init__(self, given):
        self.given = given

    def __cuda_stream__(self):
        return self.given


@pytest.mark.parametrize(
    "stream",
    [
        *("default", "0", b"5", True, 1.0, math.inf, 1.5j, Fraction(5, 2), [], object()),
        *(torch.tensor(5.5), Malformed(None), Malformed((0,)), Malformed((0, "x")), Malformed),
    ],
    ids=lambda stream: type(stream).__name__,
)
def test_what_is_no_stream_is_refused_by_name(stream, entered):
    for take in (on_stream, stream_handle, to_cuda_stream):
        with pytest.raises(TypeError, match=rf"stream is a {type(stream).__name__}; expected"):
            take(stream)
    assert entered == []


@pytest.mark.parametrize("stream", [-1, 2**70, Malformed((0, -5))], ids=type)
def test_what_is_no_address_is_refused(stream, entered):
    for take in (on_stream, stream_handle, to_cuda_stream):
        with pytest.raises(
            ArgumentError, match=r"stream is the handle -?\d+; expected the address"
        ):
            take(stream)
    assert entered == []


# On the CPU -------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", ["reference", "torch"])
@pytest.mark.parametrize("stream", [0, HANDLE, Protocol(), torch.Stream(device="cpu")], ids=type)
def test_operands_on_the_cpu_have_no_stream(provider, stream):
    args = gemm_arguments(4, 4, 4)
    args.out.tensor.fill_(7)
    (kernel,) = ka.get_kernels(args, providers=[provider])
    launch = kernel.prepare(args)
    for call in (
        lambda: kernel.run(args, None, stream, assume_supported_args=True),
        lambda: kernel.run(args, kernel.compile(args), stream, assume_supported_args=True),
        lambda: launch(*args.tensors, stream=stream),
    ):
        with pytest.raises(DeviceError) as caught:
            call()
        assert str(caught.value) == (
            f"stream is {stream!r}; the operands are on cpu, which has no streams; leave stream out"
        )
    assert (args.out.tensor == 7).all()


def test_graphs_on_the_cpu_have_no_stream():
    handle = cudnn.create_handle("cpu")
    kind = cudnn.data_type.FLOAT
    graph = cudnn.pygraph("", kind, kind, kind, handle=handle)
    a, b = graph.tensor((4, 4), name="a"), graph.tensor((4, 4), name="b")
    graph.matmul(a, b).set_output(True).set_name("y")
    graph.build([cudnn.heur_mode.A])
    pack = {name: torch.ones(4, 4) for name in "aby"}
    cudnn.set_stream(handle, HANDLE)
    with pytest.raises(DeviceError, match=r"stream is .*; the operands are on cpu"):
        graph.execute(pack, handle=handle)
    cudnn.set_stream(handle, None)
    graph.execute(pack, handle=handle)
    assert (pack["y"] == 4).all()


# Captures ---------------------------------------------------------------------------------


@pytest.fixture
def capturing(monkeypatch, entered):
    """Sets which streams are captured: "current", or a handle."""
    captured = set()

    def is_capturing():
        return (entered[-1][0] if entered else "current") in captured

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", is_capturing)
    return captured


def test_the_current_stream_and_the_one_of_the_launch_are_asked(capturing, entered):
    assert not devices.capturing(0)
    capturing.add(HANDLE)
    assert not devices.capturing(0)
    assert devices.capturing(0, HANDLE)
    entered.clear()
    assert not devices.capturing(0, HANDLE + 1)
    entered.clear()
    capturing.add("current")
    assert devices.capturing(0, HANDLE + 1)
    assert entered == []  # nothing is asked of another stream while one is captured


@pytest.mark.parametrize("captured", ["current", HANDLE])
def test_what_is_not_compiled_is_refused_while_a_graph_is_captured(captured, capturing):
    kernel = cuda_kernel()
    with FakeTensorMode():
        kind = {"device": "cuda", "dtype": torch.bfloat16}
        compiled = ka.GemmArguments(*(torch.empty(64, 64, **kind) for _ in "ABC"))
        batched = ka.GemmArguments(*(torch.empty(2, 64, 64, **kind) for _ in "ABC"))
        artifact = kernel.compile(compiled, cc=90)
        kernel._compile_target = lambda *_: artifact.target  # as on a device
        capturing.add(captured)
        assert kernel._artifact_to_run(compiled, HANDLE) is artifact
        with pytest.raises(CaptureError, match=r"call compile\(args\) before the capture"):
            kernel._artifact_to_run(batched, HANDLE)
        capturing.clear()
        kernel.compile(batched, cc=90)
        capturing.add(captured)
        assert kernel._artifact_to_run(batched, HANDLE).signature == batched.signature
