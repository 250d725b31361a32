"""Problems on a GPU that is not the current one: calls, layers with gradients, threads, tuning."""

import threading

import pytest
import torch

import kernel_api as ka
from kernel_api import masks
from kernel_api.errors import ArgumentError, DeviceError
from kernel_api.tuning import Policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="there is one GPU"
    ),
]

BF16 = torch.bfloat16


def drawn(*shape, seed=0, element=BF16, gradient=False):
    """The same numbers on every device."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return lambda device: made.to(device, element).requires_grad_(gradient)


def on(device, *makers):
    return [make(device) for make in makers]


def a_product(device):
    return ka.ops.gemm(*on(device, drawn(200, 72), drawn(72, 136, seed=1)), alpha=0.3)


def a_product_with_a_workspace(device):
    return ka.ops.gemm(*on(device, drawn(64, 16384), drawn(16384, 64, seed=1)))


def a_product_of_copies(device):
    return ka.ops.gemm(*on(device, drawn(201, 333), drawn(333, 77, seed=1)))


def a_maximum(device):
    return ka.ops.gemm_amax(*on(device, drawn(200, 72), drawn(72, 136, seed=1)))


def a_fusion(device):
    return ka.ops.gemm_swiglu(*on(device, drawn(200, 72), drawn(72, 256, seed=1)))


def groups(device):
    A, B = on(device, drawn(300, 64), drawn(4, 64, 128, seed=1))
    ends = torch.tensor([10, 10, 200, 300], dtype=torch.int32, device=device)
    return ka.ops.grouped_gemm(A, B, ends)


def a_list_of_experts(device):
    A = drawn(300, 64)(device)
    B = [drawn(64, 128, seed=1 + expert)(device) for expert in range(4)]
    ends = torch.tensor([10, 10, 200, 300], dtype=torch.int32, device=device)
    return ka.ops.grouped_gemm(A, B, ends)


def a_norm(device):
    return ka.ops.rmsnorm(*on(device, drawn(200, 512)), weight=drawn(512, seed=1)(device))


def rows(device):
    index = torch.tensor([[3, 5], [199, 0], [-1, 7]], dtype=torch.int32, device=device)
    return ka.ops.gather_rows(drawn(200, 512)(device), index)


def attention(device):
    operands = on(device, *(drawn(2, 4, 200, 64, seed=i) for i in range(3)))
    return ka.ops.sdpa(*operands, mask=masks.Causal())


def decoding(device):
    operands = on(device, drawn(2, 8, 1, 128), *(drawn(2, 1, 4096, 128, seed=i) for i in (1, 2)))
    return ka.ops.sdpa(*operands)


def gradients_of_attention(device):
    leaves = on(device, *(drawn(2, 4, 200, 64, seed=i, gradient=True) for i in range(3)))
    out = ka.ops.sdpa(*leaves, mask=masks.Causal())
    return (out, *torch.autograd.grad(out, leaves, torch.ones_like(out)))


def gradients_of_a_layer(device):
    x, weight = on(device, drawn(64, 128, gradient=True), drawn(256, 128, seed=1, gradient=True))
    out = ka.nn.linear_swiglu(x, weight)
    return (out, *torch.autograd.grad(out, (x, weight), torch.ones_like(out)))


def gradients_of_experts(device):
    leaves = on(device, drawn(96, 128, gradient=True), drawn(8, 128, 256, seed=1, gradient=True),
                drawn(8, 128, 128, seed=2, gradient=True))  # fmt: skip
    weight, index = drawn(96, 8, seed=3, element=torch.float32)(device).softmax(-1).topk(2)
    out = ka.nn.moe(leaves[0], index, weight, *leaves[1:])
    return (out, *torch.autograd.grad(out, leaves, torch.ones_like(out)))


def compiled(device):
    torch._dynamo.reset()
    return torch.compile(a_fusion, fullgraph=False)(device)


CALLS = (
    a_product, a_product_with_a_workspace, a_product_of_copies, a_maximum, a_fusion, groups,
    a_list_of_experts, a_norm, rows, attention, decoding, gradients_of_attention,
    gradients_of_a_layer, gradients_of_experts, compiled,
)  # fmt: skip


def tensors(found):
    return [found] if isinstance(found, torch.Tensor) else [one for one in found if one is not None]


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_call_gives_the_same_on_both(call, current):
    with torch.cuda.device(current):
        for _ in range(2):
            first, second = (tensors(call(device)) for device in ("cuda:0", "cuda:1"))
            assert torch.cuda.current_device() == current
            for one, other in zip(first, second, strict=True):
                assert (str(one.device), str(other.device)) == ("cuda:0", "cuda:1")
                assert torch.isfinite(one).all()
                assert torch.equal(one.cpu(), other.cpu())


def test_threads_use_a_gpu_each():
    expected = {call: [one.cpu() for one in tensors(call("cuda:0"))] for call in CALLS[:-1]}
    wrong = []

    def work(index):
        torch.cuda.set_device(index)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                for call, wanted in expected.items():
                    found = [one.cpu() for one in tensors(call(f"cuda:{index}"))]
                    if not all(map(torch.equal, found, wanted)):
                        wrong.append((index, call.__name__))

    threads = [threading.Thread(target=work, args=(index % 2,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def a_long_sum(device):
    A, B = on(device, drawn(64, 16384), drawn(16384, 64, seed=1))
    return ka.GemmArguments(A, B, torch.full((64, 64), float("nan"), dtype=BF16, device=device))


def test_a_graph_of_the_other_gpu():
    args = a_long_sum("cuda:1")
    expected = a_product_with_a_workspace("cuda:1")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(1), torch.cuda.graph(graph, stream=torch.cuda.Stream(1)):
        ka.ops.gemm(args.A.tensor, args.B.tensor, out=args.out.tensor)
    args.out.tensor.zero_()
    graph.replay()
    torch.cuda.synchronize(1)
    assert torch.equal(args.out.tensor, expected)


def test_a_prepared_launch_goes_to_its_gpu():
    for device in ("cuda:1", "cuda:0"):
        args = a_long_sum(device)
        kernel = ka.get_kernels(args, providers=["cutedsl"])[0]
        kernel.prepare(args)(*args.tensors)
        torch.cuda.synchronize(device)
        assert torch.equal(args.out.tensor, a_product_with_a_workspace(device))


def test_operands_on_two_gpus_are_refused():
    A, B = drawn(64, 64)("cuda:0"), drawn(64, 64)("cuda:1")
    with pytest.raises(ArgumentError, match=r"cuda:0.*cuda:1|cuda:1.*cuda:0"):
        ka.ops.gemm(A, B)
    with pytest.raises((ArgumentError, DeviceError), match=r"cuda:"):
        ka.ops.sdpa(*(drawn(1, 2, 64, 64)(f"cuda:{i}") for i in (0, 1, 1)))


def test_problems_are_tuned_on_both(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNEL_API_CACHE_DIR", str(tmp_path))
    problems = [
        ka.GemmArguments(*on("meta", drawn(m, 128), drawn(128, 256), drawn(m, 256)))
        for m in (64, 192, 320, 448)
    ]
    found = ka.autotune(problems, max_candidates=4, policy=Policy(rounds=8))
    assert [type(one).__name__ for one in found] == ["TuningResult"] * 4
    (second,) = [ka.GemmArguments(*on("cuda:1", drawn(64, 128), drawn(128, 256), drawn(64, 256)))]
    assert ka.autotune(second, max_candidates=4, policy=Policy(rounds=8)).measured == 0
