"""Arguments with an epilogue: their operands are checked, keyed, verified and rebuilt as others."""

import gc
import weakref

import pytest
import torch
from support.data import gemm_tensors
from support.epilogues import normal, reference_kernel

import kernel_api as ka
import kernel_api.epilogue as ep
from kernel_api.arguments import epilogue as module
from kernel_api.epilogue import frozen
from kernel_api.errors import ArgumentError, EpilogueError, SignatureError

M, N, K = 6, 64, 16


def fn(accum, bias, alpha):
    pre = alpha * accum + bias
    act = ep.gelu(pre)
    return act, pre, ep.amax(act, None)


def operands(**changes):
    given = {
        "bias": normal(N, dtype=torch.float32),
        "alpha": 0.5,
        "pre": torch.empty(M, N),
        "amax": torch.empty(()),
    }
    return {**given, **changes}


def arguments(tensors=None, batch=None, function=fn, **changes):
    A, B, out = tensors or gemm_tensors(M, N, K, batch)
    return ka.GemmArguments(
        A, B, out, epilogue=ka.EpilogueArguments(function, **operands(**changes))
    )


def test_operands_are_read_or_written_by_name():
    args = arguments()
    assert list(args.epilogue.inputs) == ["bias"]
    assert list(args.epilogue.outputs) == ["pre", "amax"]
    assert args.epilogue.scalars == {"alpha": 0.5}
    assert list(args.named_operands) == ["A", "B", "out", "bias", "pre", "amax"]
    assert list(args.outputs) == ["out", "pre", "amax"]
    assert args.outputs["pre"].shape == (M, N)
    assert args.operand_names == ("A", "B", "out")
    assert len(args.tensors) == 3


def test_an_epilogue_takes_its_operands_in_the_order_of_its_graph():
    def one(accum, a, b):
        return accum * b + a

    def other(accum, b, a):
        return accum * b + a

    given = {"a": torch.ones(N), "b": torch.ones(M, 1)}
    tensors = gemm_tensors(M, N, K)
    found = [
        ka.GemmArguments(*tensors, epilogue=ka.EpilogueArguments(f, **given)) for f in (one, other)
    ]
    assert found[0].signature == found[1].signature
    assert list(found[0].epilogue.inputs) == list(found[1].epilogue.inputs)


def test_sizes_are_those_of_the_product():
    def halves(accum):
        gate, up = ep.glu_pair(accum)
        return gate * up

    A, B, _ = gemm_tensors(M, N, K)
    args = ka.GemmArguments(A, B, torch.empty(M, N // 2), epilogue=ka.EpilogueArguments(halves))
    assert (args.M, args.N, args.K) == (M, N, K)
    assert args.out.shape == (M, N // 2)
    assert "6x64x16" in repr(args)
    assert str(args.epilogue.graph) in repr(args)


# Checks ----------------------------------------------------------------------------------


def test_operands_of_another_device_are_refused():
    with pytest.raises(ArgumentError, match=r"bias is on meta but A is on cpu"):
        arguments(bias=torch.empty(N, device="meta"))
    with pytest.raises(ArgumentError, match=r"pre is on meta but A is on cpu"):
        arguments(pre=torch.empty(M, N, device="meta"))


def test_outputs_share_no_memory():
    A, B, out = tensors = gemm_tensors(M, N, K)
    with pytest.raises(ArgumentError, match="out shares memory with pre"):
        arguments(tensors, pre=out)
    with pytest.raises(ArgumentError, match="out shares memory with bias"):
        arguments(tensors, bias=out[0])
    with pytest.raises(ArgumentError, match="pre shares memory with B"):
        arguments((A[:, :M], B[:M], out), pre=B[:M])
    pre = torch.empty(M, N)
    with pytest.raises(ArgumentError, match="pre shares memory with amax"):
        arguments(tensors, pre=pre, amax=pre[2, 3])


def test_an_output_must_be_writable():
    with pytest.raises(ArgumentError, match=r"pre has shape .* several of its elements are one"):
        arguments(pre=torch.empty(N).expand(M, N))


def test_inputs_may_share_memory():
    shared = torch.ones(N)

    def both(accum, a, b):
        return accum * a + b

    tensors = gemm_tensors(M, N, K)
    ka.GemmArguments(*tensors, epilogue=ka.EpilogueArguments(both, a=shared, b=shared))


@pytest.mark.parametrize("name", ["A", "B", "out", "stream"])
def test_names_of_the_arguments_are_taken(name):
    tensors = gemm_tensors(M, N, K)
    epilogue = ka.EpilogueArguments(lambda accum: (accum, accum), **{name: torch.empty(M, N)})
    with pytest.raises(EpilogueError, match=f"is called {name}, which is taken"):
        ka.GemmArguments(*tensors, epilogue=epilogue)


def test_shapes_of_the_product_are_still_checked():
    A, B, out = gemm_tensors(M, N, K)
    with pytest.raises(ArgumentError, match="A has K = 16 but B has K = 15"):
        arguments((A, B[1:], out))
    with pytest.raises(ArgumentError, match="batch of A is 2"):
        arguments((A.expand(2, M, K), B.expand(3, K, N), out.expand(3, M, N)))


# Key and signature -----------------------------------------------------------------------


def test_a_new_scalar_changes_neither_signature_nor_key():
    tensors, given = gemm_tensors(M, N, K), operands()
    one, other = (arguments(tensors, **{**given, "alpha": alpha}) for alpha in (0.5, 2))
    assert one.signature == other.signature
    assert one.key == other.key


@pytest.mark.parametrize(
    "changes",
    [
        {"bias": torch.ones(N, dtype=torch.bfloat16)},
        {"bias": torch.ones(M, N)},
        {"bias": torch.ones(1, N)},
        {"bias": torch.ones(2 * N)[::2]},
        {"pre": torch.empty(N, M).t()},
        {"pre": torch.empty(M, N, dtype=torch.float16)},
        {"amax": torch.empty(1, 1)},
        {"alpha": torch.ones(())},
        {
            "function": lambda accum, bias, alpha: (
                alpha * accum + bias,
                accum,
                ep.amax(accum, None),
            )
        },
    ],
    ids="-".join,
)
def test_what_needs_other_code_changes_the_signature(changes):
    assert arguments(**changes).signature != arguments().signature


def test_a_plain_product_has_another_signature():
    tensors = gemm_tensors(M, N, K)
    identity = ka.EpilogueArguments(lambda accum: accum)
    fused = ka.GemmArguments(*tensors, epilogue=identity)
    assert fused.signature != ka.GemmArguments(*tensors).signature


def test_sizes_change_the_key_alone():
    one = arguments()
    other = arguments(gemm_tensors(2 * M, N, K), pre=torch.empty(2 * M, N))
    assert one.signature == other.signature
    assert one.key != other.key


@pytest.mark.parametrize(
    "changes",
    [
        {"pre": torch.empty(M, 2 * N)[:, :N]},
        {"bias": torch.ones(N + 1)[1:]},
        {"pre": torch.empty(M * N + 1)[1:].reshape(M, N)},
    ],
    ids=["pitch", "address", "address of an output"],
)
def test_strides_and_alignment_change_the_key(changes):
    tensors, given = gemm_tensors(M, N, K), operands()
    before, after = arguments(tensors, **given), arguments(tensors, **{**given, **changes})
    assert after.signature == before.signature
    assert after.key != before.key


# Tracing once ----------------------------------------------------------------------------


@pytest.fixture
def traces(monkeypatch):
    """How often an epilogue was traced."""
    calls = []
    original = module.trace

    def counted(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(module, "trace", counted)
    monkeypatch.setattr(frozen, "_kept", {})
    return calls


def test_an_epilogue_that_joins_again_is_not_traced_again(traces):
    epilogue = ka.EpilogueArguments(fn, **operands())
    tensors = gemm_tensors(M, N, K)
    found = [ka.GemmArguments(*tensors, epilogue=epilogue).epilogue for _ in range(3)]
    assert len(traces) == 1
    assert found[0] is found[2]


def test_other_operands_of_other_sizes_are_not_traced_again(traces):
    args = arguments()
    A, B, out = gemm_tensors(2 * M, N, K)
    other = args.rebuilt(A, B, out, pre=torch.empty(2 * M, N), alpha=3.0)
    assert len(traces) == 1
    assert other.epilogue.graph is args.epilogue.graph
    assert other.epilogue.scalars == {"alpha": 3.0}


def test_a_function_may_be_applied_to_other_operands_alone(traces):
    def optional(accum, alpha=1.0, bias=None):
        x = alpha * accum
        return x if bias is None else x + bias

    bare = ka.EpilogueArguments(optional)
    tensors = gemm_tensors(M, N, K)
    for _ in range(2):
        found = [
            ka.GemmArguments(*tensors, epilogue=bare.applied_to(**given)).epilogue
            for given in ({}, {"bias": torch.ones(N)}, {"bias": torch.zeros(N), "alpha": 2.0})
        ]
        assert [set(one.operands) for one in found] == [set(), {"bias"}, {"bias", "alpha"}]
    assert len(traces) == 3
    assert not bare.operands
    with pytest.raises(EpilogueError, match="fn takes bias"):
        ka.EpilogueArguments(lambda accum, bias: accum + bias, bias=torch.ones(N)).applied_to()


def test_traces_of_more_and_more_sizes_are_not_kept(traces):
    bare = ka.EpilogueArguments(lambda accum, C=None: accum + C)
    for columns in range(1, 100):
        A, B, out = gemm_tensors(M, columns, K)
        ka.GemmArguments(A, B, out, epilogue=bare.applied_to(C=torch.ones(M, columns)))
    assert len(bare._traces) <= module._TRACES_KEPT


def test_operands_that_broadcast_otherwise_are_traced_again(traces):
    args = arguments()
    other = args.rebuilt(*args.tensors, bias=torch.ones(M, 1))
    assert len(traces) == 2
    assert other.epilogue.identity != args.epilogue.identity
    assert args.epilogue.graph.leaves["bias"].shape.columns


def test_one_epilogue_may_join_problems_of_different_sizes():
    epilogue = ka.EpilogueArguments(lambda accum, alpha: accum * alpha, alpha=2.0)
    small, large, batch = (
        ka.GemmArguments(*gemm_tensors(*sizes), epilogue=epilogue)
        for sizes in ((2, 3, 4), (5, 6, 7), (2, 3, 4, 5))
    )
    assert small.epilogue.identity == large.epilogue.identity == batch.epilogue.identity
    for args in (small, large, batch):
        assert ka.verify(reference_kernel(args), args)


def test_arguments_that_are_gone_keep_no_tensor_alive():
    pre = torch.empty(M, N)
    alive = weakref.ref(pre)
    gc.disable()  # memory of a GPU must not wait for it
    try:
        args = arguments(pre=pre)
        reference_kernel(args).run(args)
        del pre, args
        assert alive() is None
    finally:
        gc.enable()


# Rebuilding and launching ----------------------------------------------------------------


def test_rebuilt_arguments_keep_what_is_not_given():
    args = arguments()
    pre = torch.empty(M, N)
    other = args.rebuilt(*args.tensors, pre=pre)
    assert other.epilogue.outputs["pre"].tensor is pre
    assert other.epilogue.inputs["bias"].tensor is args.epilogue.inputs["bias"].tensor
    assert other.signature == args.signature


def test_an_operand_that_is_not_there_cannot_be_rebuilt():
    args = arguments()
    with pytest.raises(EpilogueError, match="there is no operand gamma; there are bias, alpha"):
        args.rebuilt(*args.tensors, gamma=torch.ones(N))
    plain = ka.GemmArguments(*args.tensors)
    with pytest.raises(ArgumentError, match="there is no epilogue, so it has no bias"):
        plain.rebuilt(*plain.tensors, bias=torch.ones(N))


def test_a_prepared_launch_takes_epilogue_operands_by_name():
    launch = reference_kernel(arguments()).prepare(arguments())
    for seed, rows in enumerate((M, 3)):
        A, B, out = gemm_tensors(rows, N, K, seed=seed)
        bias, pre = normal(N, seed=seed, dtype=torch.float32), torch.empty(rows, N)
        amax = torch.empty(())
        launch(A, B, out, bias=bias, alpha=float(seed), pre=pre, amax=amax)
        expected = seed * (A @ B) + bias
        torch.testing.assert_close(pre, expected)
        torch.testing.assert_close(out, torch.nn.functional.gelu(expected))
        torch.testing.assert_close(amax, out.abs().max())


def test_an_operand_may_be_called_self():
    A, B, out = gemm_tensors(M, N, K)
    epilogue = ka.EpilogueArguments(lambda accum, self: accum + self, self=torch.zeros(N))
    args = ka.GemmArguments(A, B, out, epilogue=epilogue)
    launch = reference_kernel(args).prepare(args)
    launch(A, B, out, self=torch.ones(N))
    torch.testing.assert_close(out, A @ B + 1)
    for made in (args.rebuilt, args.blueprint()):
        assert made(A, B, out, self=torch.zeros(N)).signature == args.signature
    x = torch.randn(M, N)
    norm = ka.RmsNormArguments(x, x.clone(), epilogue=epilogue)
    assert norm.rebuilt(x, x.clone(), self=torch.ones(N)).signature == norm.signature


def test_a_prepared_launch_keeps_the_operands_that_are_not_named():
    args = arguments()
    launch = reference_kernel(args).prepare(args)
    A, B, out = gemm_tensors(M, N, K, seed=1)
    launch(A, B, out, alpha=0.0)
    bias = args.epilogue.inputs["bias"].tensor
    torch.testing.assert_close(out, torch.nn.functional.gelu(bias).expand(M, N))


def test_a_prepared_launch_refuses_operands_of_another_signature():
    args = arguments()
    launch = reference_kernel(args).prepare(args)
    with pytest.raises(SignatureError):
        launch(*args.tensors, bias=torch.ones(M, 1))


def test_only_a_kernel_with_data_can_be_prepared():
    args = arguments()
    tensors = [torch.empty_like(t, device="meta") for t in args.tensors]
    meta = {name: o.tensor.to("meta") for name, o in args.epilogue.tensors.items()}
    found = args.rebuilt(*tensors, **meta)
    assert found.key[1:] != args.key[1:]
    assert found.signature == args.signature


# Verification ----------------------------------------------------------------------------


class Wrong(ka.Kernel):
    """A kernel that does what the reference does, and then something wrong."""

    def __init__(self, args, spoil):
        self._kernel, self._spoil = reference_kernel(args), spoil
        super().__init__(self._kernel.metadata)

    def run(self, args, *, stream=None):
        self._kernel.run(args)
        tensors = {name: o.tensor for name, o in args.named_operands.items()}
        self._spoil(tensors)


def verified(spoil, **changes):
    args = arguments(**changes)
    return ka.verify(Wrong(args, spoil), args)


def test_a_right_kernel_passes():
    assert verified(lambda tensors: None)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda t: t["out"][2, 3].add_(1e-4), "out: "),
        (lambda t: t["pre"][2, 3].add_(1e-4), "pre: "),
        (lambda t: t["pre"].fill_(float("nan")), "pre: elements are not finite"),
        (lambda t: t["amax"].mul_(1.001), "amax: "),
        (lambda t: t["amax"].fill_(float("nan")), "amax: elements are not finite"),
        (lambda t: t["bias"][0].add_(1), "the kernel changed its input bias"),
        (lambda t: t["A"][0].add_(1), "the kernel changed its input A"),
    ],
)
def test_a_wrong_output_of_the_epilogue_is_found(spoil, reason):
    found = verified(spoil)
    assert not found
    assert reason in found.reason


def test_an_output_that_is_not_written_is_found():
    class Lazy(Wrong):
        def run(self, args, *, stream=None):
            tensors = [torch.empty_like(t) for t in args.tensors[2:]]
            others = {n: torch.empty_like(o.tensor) for n, o in args.epilogue.outputs.items()}
            spare = args.rebuilt(*args.tensors[:2], *tensors, **others)
            self._kernel.run(spare)
            args.out.tensor.copy_(tensors[0])

    args = arguments()
    found = ka.verify(Lazy(args, None), args)
    assert "pre: elements are not finite" in found.reason


def test_memory_between_rows_of_an_output_is_guarded():
    storage = torch.zeros(M, 2 * N)
    found = verified(lambda t: storage[1, N + 2].fill_(7), pre=storage[:, :N])
    assert "the kernel wrote outside of pre" in found.reason


def test_outputs_may_be_parts_of_one_buffer():
    storage = torch.zeros(M, 3 * N)
    A, B, _ = gemm_tensors(M, N, K)
    tensors = (A, B, storage[:, :N])
    assert verified(lambda t: None, tensors=tensors, pre=storage[:, N : 2 * N])
    found = verified(lambda t: storage[:, -1].fill_(1), tensors=tensors, pre=storage[:, N : 2 * N])
    assert "the kernel wrote outside of" in found.reason


def test_integers_may_differ_where_rounding_is_close_only():
    def quantised(accum, scale):
        return ep.quantize(accum, "int8", scale)

    A, B, _ = gemm_tensors(32, 64, 128)
    out = torch.empty(32, 64, dtype=torch.int8)
    epilogue = ka.EpilogueArguments(quantised, scale=0.25)
    args = ka.GemmArguments(A, B, out, epilogue=epilogue)
    kernel = reference_kernel(args)
    assert ka.verify(kernel, args)
    kernel.run(args)
    exact = (A.double() @ B.double() / 0.25).clamp(-128, 127)
    nearest = int((exact - exact.floor() - 0.5).abs().argmin())
    from kernel_api.verification import judge

    out.view(-1)[(nearest + 1) % out.numel()] += 1
    assert not judge(args)


def test_an_output_of_steps_may_differ_at_a_step_only():
    def step(accum, threshold):
        return ep.where(accum > threshold, 1.0, 0.0)

    from kernel_api.verification import judge

    A, B, out = gemm_tensors(32, 64, 128)
    exact = A.double() @ B.double()
    threshold = float(exact[3, 5].float())  # within rounding of one element
    args = ka.GemmArguments(A, B, out, epilogue=ka.EpilogueArguments(step, threshold=threshold))
    reference_kernel(args).run(args)
    out[3, 5] = 1 - out[3, 5]
    assert judge(args)
    out[3, 6] = 1 - out[3, 6]
    assert not judge(args)


@pytest.mark.parametrize(
    "sizes", [(0, 8, 4), (4, 8, 0), (0, 0, 0), (4, 8, 0, 2), (0, 8, 3, 2)], ids=str
)
def test_empty_problems_have_their_outputs(sizes):
    def sums(accum, alpha):
        return alpha * accum + 1, ep.sum(accum, -2), ep.amax(accum, None)

    A, B, out = gemm_tensors(*sizes)
    batch = out.shape[:-2]
    columns, amax = torch.full((*batch, out.shape[-1]), 7.0), torch.full(batch, 7.0)
    epilogue = ka.EpilogueArguments(sums, alpha=2.0, columns=columns, amax=amax)
    args = ka.GemmArguments(A, B, out, epilogue=epilogue)
    assert args.writes_anything
    assert ka.verify(reference_kernel(args), args)
    assert (out == 1).all()
    assert (columns == 0).all()
    assert (amax == 0).all()


def test_a_problem_without_batches_writes_nothing():
    A, B, out = gemm_tensors(4, 8, 3, 0)
    total = torch.empty(0)
    epilogue = ka.EpilogueArguments(lambda accum: (accum, ep.sum(accum, None)), total=total)
    args = ka.GemmArguments(A, B, out, epilogue=epilogue)
    assert not args.writes_anything
    assert ka.verify(reference_kernel(args), args)


@pytest.mark.parametrize("types", [("bf16",) * 3, ("f16", "f16", "f32"), ("e4m3", "e4m3", "bf16")])
def test_the_reference_passes_its_own_verification(types):
    args = arguments(gemm_tensors(M, N, K, types=types))
    kernel = reference_kernel(args)
    assert ka.verify(kernel, args)
    assert kernel.metadata.kernel_class.family == "reference.gemm"


def test_complex_products_have_no_epilogue():
    A, B, out = gemm_tensors(4, 4, 4, types=("c64",) * 3)
    with pytest.raises(EpilogueError, match="out is complex64"):
        ka.GemmArguments(A, B, out, epilogue=ka.EpilogueArguments(ep.relu))
    args = ka.GemmArguments(A, B, torch.empty(4, 4), epilogue=ka.EpilogueArguments(ep.relu))
    assert ka.get_kernels(args) == []
