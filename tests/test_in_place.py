"""An operand of an epilogue that is out itself, as in a sum of gradients over several passes."""

import pytest
import torch
from support.fusions import close

import kernel_api as ka
from kernel_api.errors import ArgumentError

M, N, K = 33, 24, 16


def drawn(*shape, seed=0, element=torch.float32):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(element)


A, B, BEFORE = drawn(M, K), drawn(K, N), drawn(M, N)


def test_sums_are_added_up_where_they_lie():
    total, expected = BEFORE.clone(), BEFORE.double()
    for turn in range(4):
        given = drawn(M, K, seed=turn)
        assert ka.ops.gemm(given, B, C=total, out=total) is total
        expected = expected + given.double() @ B.double()
        close(total, expected.float(), 1e-5)
    ka.ops.gemm_residual(A, B, C=total, out=total, alpha=0.5, beta=-2.0)
    close(total, (0.5 * (A @ B) - 2 * expected).float(), 1e-5)


def test_rows_may_lie_apart_and_matrices_may_be_many():
    buffer = drawn(3, M, N + 8)
    total, before = buffer[:, :, :N], buffer.clone()
    a = drawn(3, M, K)
    for _ in range(2):
        buffer.copy_(before)
        ka.ops.gemm(a, B.expand(3, K, N), C=total, out=total)
        close(total, before[:, :, :N] + a @ B, 1e-5)
    assert torch.equal(buffer[:, :, N:], before[:, :, N:])


def test_a_gradient_may_be_written_over_what_it_is_made_of():
    pre = BEFORE.clone()
    expected = ka.ops.gemm_dactivation(A, B, preactivation=BEFORE)
    assert torch.equal(ka.ops.gemm_dactivation(A, B, preactivation=pre, out=pre), expected)


def test_verification_begins_with_numbers_in_both():
    total = BEFORE.clone()
    args = ka.fusions.gemm(A, B, C=total, out=total, alpha=0.75, beta=-1.5)
    assert args.in_place == ("C",)
    kernel = ka.get_kernels(args, providers=["reference"])[0]
    assert ka.verify(kernel, args)
    apart = ka.fusions.gemm(A, B, C=BEFORE, out=torch.empty(M, N))
    assert apart.in_place == ()
    assert ka.fusions.gemm(*(t.to("meta") for t in (A, B)), **both("meta")).in_place == ()


def both(device):
    total = torch.empty(M, N, device=device)
    return {"C": total, "out": total}


def test_a_kernel_that_forgets_what_was_there_is_wrong(monkeypatch):
    args = ka.fusions.gemm(A, B, **both("cpu"))
    kernel = ka.get_kernels(args, providers=["reference"])[0]
    monkeypatch.setattr(type(kernel), "_run", lambda self, args, *_: args.out.tensor.copy_(A @ B))
    assert not ka.verify(kernel, args)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_writes_where_it_is_told(backend):
    def twice(a, total):
        ka.ops.gemm(a, B, C=total, out=total)
        return 2 * ka.ops.gemm(a, B, C=total, out=total)

    torch._dynamo.reset()
    total = BEFORE.clone()
    found = torch.compile(twice, backend=backend, fullgraph=True)(A, total)
    close(total, BEFORE + 2 * (A @ B), 1e-5)
    close(found, 2 * total, 0)


SQUARE = drawn(N, N)
SCALE = torch.tensor(0.5)
PACKED = drawn(M + 7, N)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: ka.ops.gemm(A, B, C=PACKED[:M], out=PACKED[1 : M + 1]),
            "out shares memory with C",
        ),
        (lambda: ka.ops.gemm(SQUARE[:, :K], B, C=SQUARE.t(), out=SQUARE), "out shares memory with"),
        (lambda: ka.ops.gemm_bias_activation(A, B, bias=PACKED[0], out=PACKED[:M]), "with bias"),
        (
            lambda: ka.ops.gemm_bias_activation(A, B, preactivation=PACKED[:M], out=PACKED[:M]),
            "out shares memory with preactivation",
        ),
        (  # a row's sum needs all of it
            lambda: ka.ops.gemm_dactivation(
                A, B, preactivation=PACKED[:M], out=PACKED[:M], dprob=True
            ),
            "out shares memory with preactivation",
        ),
        (
            lambda: ka.ops.gemm(
                A, B, C=PACKED[:M], out=ka.ScaledOperand(PACKED[:M], SCALE, ka.ScaleMode.PER_TENSOR)
            ),
            "out shares memory with C",
        ),
    ],
)
def test_what_is_not_computed_in_its_place_alone_is_refused(call, words):
    for _ in range(2):  # the second looks like the first
        with pytest.raises(ArgumentError, match=words):
            call()


def test_memory_that_is_shared_in_part_is_refused_though_the_call_looks_the_same():
    for _ in range(2):
        ka.ops.gemm(A, B, C=PACKED[:M], out=PACKED[:M])
    with pytest.raises(ArgumentError, match="out shares memory with C"):
        ka.ops.gemm(A, B, C=PACKED[:M], out=PACKED[3 : M + 3])
