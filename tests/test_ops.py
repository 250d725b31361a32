"""One-call forms: ka.ops."""

import copy
import gc
import inspect
import pickle
import threading
import warnings
import weakref

import numpy as np
import pytest
import torch
from support.data import gemm_tensors
from support.fusions import ACTIVATIONS, GLU, close, pairs
from support.kernels import CpuGemm
from torch._subclasses.fake_tensor import FakeTensorMode

import kernel_api as ka
from kernel_api import _launches
from kernel_api.errors import ArgumentError, NoKernelError
from kernel_api.operands import Operand

TENSOR = ka.ScaleMode.PER_TENSOR


def exact(A, B):
    return A.double() @ B.double()


def test_gemm_allocates_a_row_major_out_of_the_type_of_a():
    A, B, _ = gemm_tensors(4, 5, 6, values="integers", layouts="nnt")
    out = ka.ops.gemm(A, B)
    assert out.dtype is torch.float32
    assert out.is_contiguous()
    assert torch.equal(out.double(), exact(A, B))


def test_gemm_writes_and_returns_a_given_out():
    A, B, out = gemm_tensors(4, 5, 6, values="integers", pads=(0, 0, 3))
    assert ka.ops.gemm(A, B, out=out) is out
    assert torch.equal(out.double(), exact(A, B))


def test_gemm_multiplies_batches():
    A, B, _ = gemm_tensors(4, 5, 6, 3, values="integers")
    assert torch.equal(ka.ops.gemm(A, B).double(), exact(A, B))


@pytest.mark.parametrize(
    ("element", "taken"), [(torch.int8, torch.int32), (torch.float8_e4m3fn, torch.bfloat16)]
)
def test_products_of_8_bits_are_not_stored_in_8_bits(element, taken):
    A = torch.full((4, 32), 100.0).to(element)
    B = A.t() if element is torch.int8 else ka.ScaledOperand(A.t(), torch.tensor(0.5), TENSOR)
    A = A if element is torch.int8 else ka.ScaledOperand(A, torch.tensor(2.0), TENSOR)
    out = ka.ops.gemm(A, B)
    assert out.dtype is taken
    value = float((A.tensor if element is not torch.int8 else A)[0, 0])
    assert (out == torch.tensor(32 * value * value).to(taken)).all()


@pytest.mark.parametrize("whole", [torch.bool, torch.int8, torch.int64])
@pytest.mark.parametrize(
    ("element", "taken"),
    [(torch.float32, torch.float32), (torch.float8_e4m3fn, torch.bfloat16)],
)
def test_products_of_whole_numbers_and_others_are_not_rounded_to_whole_ones(whole, element, taken):
    A, B = torch.eye(4).to(whole), torch.full((4, 4), 0.25).to(element)
    ends = torch.tensor([4], dtype=torch.int32)
    calls = [
        lambda: ka.ops.gemm(A, B),
        lambda: ka.ops.grouped_gemm(A, [B], ends),
        lambda: ka.nn.linear_activation(A, B, activation="relu"),
    ]
    for call in calls:
        assert torch.equal(call(), B.to(taken))
        torch._dynamo.reset()
        assert torch.equal(torch.compile(call, backend="aot_eager")(), B.to(taken))


@pytest.mark.parametrize(
    ("element", "taken"), [(torch.int8, torch.bfloat16), (torch.int16, torch.float32)]
)
@pytest.mark.parametrize("scaled", ["A", "B", "AB"])
def test_products_of_integers_in_units_of_a_scale_are_stored_as_real_numbers(
    element, taken, scaled
):
    unit = torch.tensor(2.0**-6)

    def operand(name):
        matrix = torch.full((4, 4), 3, dtype=element)
        return ka.ScaledOperand(matrix, unit, TENSOR) if name in scaled else matrix

    A, B = operand("A"), operand("B")
    assert torch.equal(
        ka.ops.gemm(A, B), torch.full((4, 4), 36 * 2.0 ** (-6 * len(scaled))).to(taken)
    )
    assert ka.ops.gemm(A, B, bias=torch.zeros(4)).dtype is taken
    assert ka.ops.gemm(A, B, out_dtype="f32").dtype is torch.float32


@pytest.mark.parametrize("element", [torch.complex64, torch.complex128, torch.float64])
def test_other_products_in_units_of_a_scale_are_stored_in_their_own_type(element):
    A = ka.ScaledOperand(torch.full((4, 4), 3, dtype=element), torch.tensor(0.5), TENSOR)
    out = ka.ops.gemm(A, torch.full((4, 4), 2, dtype=element))
    assert torch.equal(out, torch.full((4, 4), 12, dtype=element))


@pytest.mark.parametrize("spelling", ["float64", torch.float64, np.float64, "f64"], ids=str)
def test_gemm_allocates_the_type_that_is_asked_for_in_any_spelling(spelling):
    A, B, _ = gemm_tensors(4, 5, 6, values="integers")
    out = ka.ops.gemm(A, B, out_dtype=spelling)
    assert out.dtype is torch.float64
    assert torch.equal(out, exact(A, B))


@pytest.mark.parametrize("spelling", ["", 0, {}, torch.ones(2)], ids=str)
def test_what_names_no_type_is_refused(spelling):
    A, B, _ = gemm_tensors(4, 5, 6, values="integers")
    with pytest.raises(ArgumentError, match="names no element type"):
        ka.ops.gemm(A, B, out_dtype=spelling)


def test_gemm_of_an_empty_sum_is_zero():
    assert not ka.ops.gemm(torch.empty(3, 0), torch.empty(0, 4)).any()


def test_gemm_takes_numpy_operands():
    A, B = np.ones((4, 6), np.float32), np.ones((6, 5), np.float32)
    out = ka.ops.gemm(A, B)
    assert torch.equal(out, torch.full((4, 5), 6.0))


def test_a_repeated_call_takes_new_data_and_sizes():
    for seed, extent in enumerate((4, 4, 5, 4)):
        A, B, _ = gemm_tensors(extent, extent, extent, values="integers", seed=seed)
        assert torch.equal(ka.ops.gemm(A, B).double(), exact(A, B))


def test_the_best_kernel_is_used_also_when_it_is_registered_later(registry):
    ran = []

    class Better(CpuGemm):
        def _run(self, args, artifact, stream, workspace=None):
            ran.append(args)
            super()._run(args, artifact, stream, workspace)

    A, B, _ = gemm_tensors(4, 4, 4, values="integers")
    ka.ops.gemm(A, B)
    provider = registry.register(Better)
    assert torch.equal(ka.ops.gemm(A, B).double(), exact(A, B))
    assert len(ran) == 1
    provider.unregister(Better)
    ka.ops.gemm(A, B)
    assert len(ran) == 1


def test_a_repeated_call_goes_by_the_providers_that_are_named_at_the_time(registry, monkeypatch):
    ran = []

    class Counting(CpuGemm):
        def _run(self, args, artifact, stream, workspace=None):
            ran.append(args)
            super()._run(args, artifact, stream, workspace)

    registry.provider("counting", rank=-5).register(Counting)
    A, B, _ = gemm_tensors(4, 4, 4, values="integers")
    for turn in range(2):
        monkeypatch.delenv("KERNEL_API_PROVIDERS", raising=False)
        ka.ops.gemm(A, B), ka.ops.gemm(A, B)
        assert len(ran) == 2 * turn + 2
        monkeypatch.setenv("KERNEL_API_PROVIDERS", "reference")
        ka.ops.gemm(A, B), ka.ops.gemm(A, B)
        assert len(ran) == 2 * turn + 2


@pytest.mark.parametrize(
    "call",
    [
        lambda x: ka.ops.gemm(x, x),
        lambda x: ka.ops.grouped_gemm(x, x[None], torch.tensor([4], dtype=torch.int32)),
        lambda x: ka.ops.sdpa(x[None, None], x[None, None], x[None, None]),
        lambda x: ka.ops.rmsnorm(x),
    ],
    ids=["gemm", "grouped_gemm", "sdpa", "rmsnorm"],
)
def test_providers_that_there_are_not_are_refused_also_by_a_repeated_call(call, monkeypatch):
    x = torch.eye(4)
    call(x), call(x)
    monkeypatch.setenv("KERNEL_API_PROVIDERS", "torhc")
    with pytest.raises(ArgumentError, match="KERNEL_API_PROVIDERS is 'torhc': no provider is"):
        call(x)
    monkeypatch.setenv("KERNEL_API_PROVIDERS", " ,")
    with pytest.raises(ArgumentError, match="KERNEL_API_PROVIDERS is ' ,', which names no provi"):
        call(x)


def test_contradicting_operands_are_refused_with_both_values():
    with pytest.raises(ArgumentError, match="A has K = 6 but B has K = 7"):
        ka.ops.gemm(torch.empty(4, 6), torch.empty(7, 5))
    with pytest.raises(ArgumentError, match=r"out has \(M, N\) = \(4, 4\)"):
        ka.ops.gemm(torch.empty(4, 6), torch.empty(6, 5), out=torch.empty(4, 4))


@pytest.mark.parametrize("B", [None, 3, "B", torch.tensor(1.0), torch.empty(6)], ids=type)
def test_what_is_no_matrix_is_refused(B):
    with pytest.raises(ArgumentError):
        ka.ops.gemm(torch.empty(4, 6), B)
    with pytest.raises(ArgumentError):
        ka.ops.gemm(B, torch.empty(6, 5))


def test_what_no_kernel_takes_is_an_error_that_carries_the_explanation(monkeypatch):
    monkeypatch.setenv("KERNEL_API_PROVIDERS", "torch")
    A, B, _ = gemm_tensors(4, 5, 6, types=("int16",) * 3)
    with pytest.raises(NoKernelError, match="A is int16; expected") as caught:
        ka.ops.gemm(A, B)
    assert isinstance(caught.value, LookupError)
    assert "torch.mm" in [r.family for r in caught.value.explanation.rejected]
    assert not caught.value.explanation.accepted


def test_operands_behind_a_and_b_are_keyword_only():
    with pytest.raises(TypeError):
        ka.ops.gemm(*gemm_tensors(4, 4, 4))


def test_threads_may_call_at_the_same_time():
    wrong = []

    def work(seed):
        for extent in range(1, 20):
            A, B, _ = gemm_tensors(extent, extent, extent, values="integers", seed=seed)
            if not torch.equal(ka.ops.gemm(A, B).double(), exact(A, B)):
                wrong.append((seed, extent))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# Fusions ---------------------------------------------------------------------------------

M, N, K = 7, 64, 5
E8M0 = torch.float8_e8m0fnu


def matrix(rows=M, columns=N, seed=0, batch=()):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*batch, rows, columns, generator=generator, dtype=torch.float64)


A, B, C = matrix(M, K), matrix(K, N, 1), matrix(M, N, 2)
ROW, COLUMN = matrix(1, M, 3)[0], matrix(1, N, 4)[0]
ONE_GROUP = torch.tensor([M], dtype=torch.int32)


def test_every_fusion_has_a_one_call_form():
    for name in ka.fusions.__all__:
        if name.startswith("gemm"):
            fusion, form = getattr(ka.fusions, name), getattr(ka.ops, name)
            taken = inspect.signature(form).parameters
            assert set(taken) - {"out_dtype"} == set(inspect.signature(fusion).parameters)
            assert taken["out"].default is None
            assert (form.__module__, form.__name__) == ("kernel_api.ops", name)
            assert form.__doc__ == fusion.__doc__


def test_gemm_takes_the_terms_of_the_fusion():
    out = ka.ops.gemm(A, B, alpha=0.5, C=C, beta=0.25, bias=COLUMN, activation="relu")
    close(out, (0.5 * (A @ B) + 0.25 * C + COLUMN).relu())
    epilogue = ka.EpilogueArguments(lambda accum, C: accum * C, C=C)
    close(ka.ops.gemm(A, B, epilogue=epilogue), (A @ B) * C)


def test_one_output_comes_back_as_a_tensor():
    out = torch.empty(M, N, dtype=torch.float64)
    assert ka.ops.gemm_bias_activation(A, B, out=out, bias=COLUMN) is out
    close(out, ACTIVATIONS["gelu"](A @ B + COLUMN))
    close(ka.ops.gemm_residual(A, B, C=C), A @ B + C)
    close(ka.ops.gemm_srelu(A, B), (A @ B).relu() ** 2)


def test_several_outputs_come_back_by_name():
    found = ka.ops.gemm_amax(A, B, alpha=2)
    assert type(found).__name__ == "GemmAmax"
    assert found._fields == ("out", "amax")
    close(found.out, 2 * (A @ B))
    close(found.amax, 2 * (A @ B).abs().max())
    assert found.amax.shape == ()


@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_what_is_true_is_allocated(batch):
    a, b = matrix(M, K, batch=batch), matrix(K, N, 1, batch=batch)
    out, pre = ka.ops.gemm_swiglu(a, b, preactivation=True)
    assert out.shape == (*batch, M, N // 2)
    close(pre, a @ b)
    close(out, GLU["swiglu"](*pairs(a @ b, "up_gate", 32)))
    found = ka.ops.gemm_dswiglu(out, matrix(32, N // 2, 2, batch), preactivation=pre, dbias=True)
    assert found._fields == ("out", "dbias")
    assert found.out.shape == (*batch, M, N)
    close(found.dbias, found.out.sum(-2))
    everything = ka.ops.gemm_dsrelu(a, b, preactivation=pre, prob=ROW, dprob=True, dbias=True)
    assert [one.shape for one in everything] == [(*batch, M, N), (*batch, M), (*batch, N)]


def test_what_is_given_is_written():
    pre, out = torch.empty(M, N), torch.empty(M, N // 2, dtype=torch.bfloat16)
    found = ka.ops.gemm_glu(A, B, out=out, kind="geglu", preactivation=pre)
    assert found.out is out
    assert found.preactivation is pre
    close(pre, (A @ B).float(), 1e-6)


def test_what_is_false_or_none_is_not_computed():
    for absent in (False, None):
        out = ka.ops.gemm_reglu(A, B, preactivation=absent)
        assert torch.is_tensor(out)


@pytest.mark.parametrize(
    ("call", "fields"),
    [
        (
            lambda: ka.ops.gemm_dglu(
                A, B[:, ::2], preactivation=C, granularity="halves", dprob=False, dbias=True
            ),
            "out dbias",
        ),
        (
            lambda: ka.ops.gemm_dactivation(A, B, preactivation=C, dprob=False, dbias=True),
            "out dbias",
        ),
        (
            lambda: ka.ops.gemm_quantize(A.float(), B.float(), mode="row", amax=False),
            "out scale",
        ),
        (
            lambda: ka.ops.grouped_gemm_glu(A, B[None], ONE_GROUP, preactivation=True, amax=False),
            "out preactivation",
        ),
    ],
    ids=["dglu", "dactivation", "quantize", "grouped_glu"],
)
def test_what_is_false_does_not_come_back_from_a_repeated_call_either(call, fields):
    for _ in range(3):
        assert call()._fields == tuple(fields.split())


def test_types_of_what_is_allocated():
    a, b = A.bfloat16(), B.bfloat16()
    found = ka.ops.gemm_swiglu(a, b, preactivation=True)
    assert {one.dtype for one in found} == {torch.bfloat16}
    found = ka.ops.gemm_swiglu(a, b, preactivation=True, out_dtype="f32")
    assert {one.dtype for one in found} == {torch.float32}
    found = ka.ops.gemm_dsrelu(a, b, preactivation=C.bfloat16(), dprob=True, dbias=True)
    assert [one.dtype for one in found] == [torch.bfloat16, torch.float32, torch.float32]
    assert ka.ops.gemm_amax(A, B).amax.dtype is torch.float64


@pytest.mark.parametrize(
    ("options", "fields", "scale_shape", "scale_type"),
    [
        ({"scale": 0.01}, None, None, None),
        ({"scale": 0.01, "amax": True}, ("out", "amax"), None, None),
        ({"mode": "row"}, ("out", "scale"), (M,), torch.float32),
        ({"mode": "mx"}, ("out", "scale"), (M, N // 32), E8M0),
        ({"mode": "mx", "amax": True}, ("out", "scale", "amax"), (M, N // 32), E8M0),
    ],
    ids=str,
)
def test_scales_are_allocated_where_they_are_written(options, fields, scale_shape, scale_type):
    found = ka.ops.gemm_quantize(A.float(), B.float(), **options)
    assert getattr(found, "_fields", None) == fields
    out = found if fields is None else found.out
    assert out.dtype is torch.float8_e4m3fn
    if scale_shape is not None:
        assert (found.scale.shape, found.scale.dtype) == (scale_shape, scale_type)
        blocks = found.scale.float().reshape(M, -1)
        real = out.float() * blocks.repeat_interleave(N // blocks.shape[1], 1)
        assert (real - A @ B).abs().max() < 0.05 * (A @ B).abs().max()


@pytest.mark.parametrize("groups", [False, True])
def test_a_scale_that_is_read_is_not_allocated(groups):
    with pytest.raises(ArgumentError, match="scale is True; expected a number"):
        if groups:
            offsets = torch.tensor([M], dtype=torch.int32)
            ka.ops.grouped_gemm_quantize(A, B[None], offsets, scale=True)
        else:
            ka.ops.gemm_quantize(A, B, scale=True)


def test_rope_and_dropout():
    angle = matrix(M, 8, 5)
    turned = ka.ops.gemm_rope(A, B, cos=angle.cos(), sin=angle.sin(), head_dim=16)
    close(turned.square().sum(), (A @ B).square().sum())
    dropped = ka.ops.gemm_dropout(A, B, p=0.5, seed=1, offset=2)
    assert 0.3 < (dropped == 0).double().mean() < 0.7


def test_a_repeated_call_takes_new_operands_and_factors():
    for seed, alpha in enumerate((0.5, 2.0, 1, -3.0)):
        a, c = matrix(M, K, seed), matrix(M, N, 10 + seed)
        close(ka.ops.gemm_residual(a, B, C=c, alpha=alpha), alpha * (a @ B) + c)


def test_operands_of_a_fusion_are_not_kept():
    residual = C.clone()
    kept = weakref.ref(residual)
    ka.ops.gemm_residual(A, B, C=residual)
    del residual
    gc.collect()
    assert kept() is None


def test_a_type_is_asked_for_once():
    out = torch.empty(M, N)
    ka.ops.gemm(A.float(), B.float(), out=out, out_dtype="f32")
    with pytest.raises(ArgumentError, match="out is float32 and out_dtype float64"):
        ka.ops.gemm(A, B, out=out, out_dtype="f64")


def test_refusals_of_fusions_reach_the_caller():
    with pytest.raises(ArgumentError, match=r"bias has shape \(7,\); expected \(64,\)"):
        ka.ops.gemm_bias_activation(A, B, bias=ROW)
    with pytest.raises(ArgumentError, match="pairs of 48 columns need a multiple of 96"):
        ka.ops.gemm_swiglu(A, B, granularity=48, preactivation=True)
    with pytest.raises(TypeError, match="prob"):
        ka.ops.gemm_amax(A, B, prob=ROW)
    with pytest.raises(ArgumentError, match="C is a bool"):
        ka.ops.gemm_residual(A, B, C=True)


def test_it_is_said_where_only_the_reference_takes_what_lies_on_a_gpu(monkeypatch):
    A, B, out = gemm_tensors(4, 5, 6)
    args = ka.GemmArguments(A, B, out)
    (oracle,) = ka.get_kernels(args, providers=["reference"])
    monkeypatch.setattr(_launches, "first_kernel", lambda args: oracle)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _launches.best(args) is oracle
    monkeypatch.setattr(ka.GemmArguments, "device", torch.device("cuda", 0))
    with pytest.warns(UserWarning, match=r"the reference computes Gemm.* ka\.explain"):
        assert _launches.best(args) is oracle


@pytest.mark.parametrize("number", [10**400, 2**64], ids=["huge", "65 bits"])
def test_numbers_beyond_64_bits_are_refused_every_time(number):
    A, B = torch.randn(5, 4), torch.randn(4, 6)
    for _ in range(2):
        ka.ops.gemm_dropout(A, B, p=0.5, seed=5, offset=3)
        ka.ops.gemm(A, B, alpha=2)
    with pytest.raises(ArgumentError, match="seed"):
        ka.ops.gemm_dropout(A, B, p=0.5, seed=number, offset=3)
    if number == 10**400:
        with pytest.raises(ArgumentError, match="alpha is beyond all numbers of float64"):
            ka.ops.gemm(A, B, alpha=number)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ka.ops.gemm_swiglu(A, B, preactivation=True),
        lambda: ka.ops.gemm_amax(A, B),
        lambda: ka.ops.grouped_gemm_glu(
            A, B[None], torch.tensor([M], dtype=torch.int32), preactivation=True, amax=True
        ),
        lambda: ka.ops.rmsnorm(A, rstd=True),
        lambda: ka.ops.layernorm(A, mean=True, rstd=True),
        lambda: ka.ops.rmsnorm_backward(A, A, rstd=A[:, 0].contiguous(), dweight=True),
    ],
)
@pytest.mark.parametrize(
    "copied", [lambda one: pickle.loads(pickle.dumps(one)), copy.copy, copy.deepcopy]
)
def test_results_with_names_are_pickled_and_copied(call, copied):
    found = call()
    again = copied(found)
    assert type(again) is type(found) and again._fields == found._fields
    for one, other in zip(again, found, strict=True):
        assert torch.equal(one, other)


def fake_swiglu(M, K, element):
    """Arguments on a GPU that need not be there."""
    with FakeTensorMode():
        A, B, out = (
            torch.empty(shape, dtype=element, device="cuda") for shape in ((M, K), (K, 64), (M, 32))
        )
    return ka.fusions.gemm_swiglu(A, B, out=out)


def test_the_reference_is_warned_of_on_a_gpu_where_it_has_something_to_compute():
    with pytest.warns(UserWarning, match="may take a thousand times as long"):
        _launches.best(fake_swiglu(4, 8, torch.float64))
    for M, K in ((0, 8), (4, 0)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kernel = _launches.best(fake_swiglu(M, K, torch.float16))
        assert kernel.metadata.provider == "reference"


class Sub(ka.ScaledOperand):
    pass


@pytest.mark.parametrize("made", [lambda one: one.numpy(), lambda one: Operand(one, "A")])
def test_what_is_no_tensor_may_stand_beside_an_operand_with_a_scale(made):
    A = torch.randint(-7, 7, (6, 16), dtype=torch.int8)
    B = torch.randint(-7, 7, (16, 32), dtype=torch.int8)
    scaled = ka.ScaledOperand(B, torch.rand(32) / 100, ka.ScaleMode.PER_ROW)
    found = ka.ops.gemm(made(A), scaled)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, ka.ops.gemm(A, scaled))


def test_kinds_of_scaled_operands_are_scaled_operands():
    A, B = torch.full((2, 2), 3, dtype=torch.int8), torch.eye(2, dtype=torch.int8)
    for _ in range(2):
        found = ka.ops.gemm(Sub(A, torch.tensor(0.01), ka.ScaleMode.PER_TENSOR), B)
        torch.testing.assert_close(found, torch.full((2, 2), 0.03).bfloat16())


def test_integers_of_experts_with_scales_anywhere_give_real_numbers():
    A = torch.randint(-9, 9, (6, 16), dtype=torch.int8)
    experts = torch.randint(-9, 9, (2, 16, 32), dtype=torch.int8)
    ends = torch.tensor([2, 6], dtype=torch.int32)
    addresses = torch.tensor([one.data_ptr() for one in experts])
    pointers = ka.ExpertPointers(addresses, shape=(16, 32), stride=(32, 1), dtype=experts.dtype)
    scale = torch.full((2, 32), 1e-3)
    found = ka.ops.grouped_gemm(A, pointers.scaled(scale), ends)
    expected = ka.ops.grouped_gemm(A, ka.ScaledOperand(experts, scale, ka.ScaleMode.PER_ROW), ends)
    assert found.dtype is torch.bfloat16 and found.any()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("unit", [0.5, 2.7])
def test_groups_of_integers_are_stored_in_units_of_a_scale(unit):
    A, B = torch.tensor([[1]], dtype=torch.int8), torch.tensor([[[0, 1, 2, 3]]], dtype=torch.int8)
    out, ends = torch.zeros(1, 4), torch.tensor([1], dtype=torch.int32)
    scale = torch.tensor(unit)
    ka.ops.grouped_gemm(A, B, ends, out=ka.ScaledOperand(out, scale, ka.ScaleMode.PER_TENSOR))
    torch.testing.assert_close(out * unit, B[0].float())
