"""Operands and whether they share memory: kernel_api.operands."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data import strided_empty

import kernel_api as ka
from kernel_api import operands
from kernel_api._sketch import Sketch
from kernel_api.dtypes import dtype
from kernel_api.errors import ArgumentError
from kernel_api.operands import MAX_ALIGNMENT, Operand, is_fake, overlap, self_overlapping

BF16 = torch.bfloat16


def test_an_operand_reads_the_tensor_once():
    tensor = torch.empty(3, 4, 5, dtype=BF16)
    operand = Operand(tensor)
    assert operand.tensor is tensor
    assert operand.shape == (3, 4, 5)
    assert operand.stride == (20, 5, 1)
    assert operand.dtype is dtype("bf16")
    assert operand.device == torch.device("cpu")
    assert operand.rank == 3


@pytest.mark.parametrize(
    ("shape", "stride", "unit"),
    [
        ((4, 5), (5, 1), -1),
        ((4, 5), (1, 4), -2),
        ((4, 5), (10, 2), None),
        ((4, 5), (0, 0), None),
        ((4, 5), (0, 1), -1),
        ((1, 1), (1, 1), -1),
        ((3, 4, 5), (1, 15, 3), None),
    ],
)
def test_the_unit_mode_is_the_one_of_stride_one_among_the_last_two(shape, stride, unit):
    storage = torch.empty(1000)
    assert Operand(storage.as_strided(shape, stride)).unit_mode == unit


@pytest.mark.parametrize(
    ("pad", "offset", "alignment"),
    [(0, 0, MAX_ALIGNMENT), (8, 0, 16), (4, 0, 8), (1, 0, 2), (0, 8, 16), (0, 1, 2), (8, 4, 8)],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("layout", "tn")
def test_alignment_divides_address_and_leading_stride(layout, device, pad, offset, alignment):
    tensor = strided_empty((64, 64), BF16, layout, pad=pad, offset=offset, device=device)
    found = Operand(tensor).alignment
    if device == "cpu":  # the address of the storage itself is whatever the allocator gave
        base = tensor.untyped_storage().data_ptr()
        alignment = min(alignment, base & -base)
    assert found == alignment


def test_alignment_counts_the_batch_stride_but_not_that_of_a_broadcast():
    storage = torch.empty(100_000, dtype=BF16, device="meta")
    assert Operand(storage.as_strided((2, 64, 64), (64 * 64 + 1, 64, 1))).alignment == 2
    assert Operand(storage.as_strided((2, 64, 64), (0, 64, 1))).alignment == MAX_ALIGNMENT


def test_alignment_of_an_operand_without_unit_mode_counts_every_stride():
    storage = torch.empty(1000, device="meta")
    assert Operand(storage.as_strided((4, 4), (32, 2))).alignment == 8


def test_meta_tensors_have_no_data_and_no_address():
    for tensor in (torch.empty(4, 4, device="meta"), torch.empty(8, 4, device="meta")[3:]):
        operand = Operand(tensor)
        assert not operand.has_data
        assert operand.address == 0


def test_fake_tensors_are_operands_without_data():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        on_gpu = Operand(torch.empty(64, 64, dtype=BF16, device="cuda"))
        shifted = Operand(torch.empty(64, 64, dtype=BF16)[:, 1:])
    assert not on_gpu.has_data
    assert on_gpu.device.type == "cuda"
    assert on_gpu.address == 0
    assert on_gpu.alignment == MAX_ALIGNMENT
    assert shifted.alignment == 2


def test_what_stands_for_a_tensor_in_a_graph_is_told_from_tensors_and_other_subclasses():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    with FakeTensorMode():
        fake = torch.nn.Parameter(torch.empty(4))
    with FunctionalTensorMode():
        functional = [FunctionalTensor.to_functional(one) for one in (fake, torch.empty(4))]
    assert is_fake(fake) and is_fake(functional[0]) and not is_fake(functional[1])

    class Other(torch.Tensor):
        pass

    plain = torch.empty(4)
    for one in (plain, torch.nn.Parameter(plain), plain.as_subclass(Other), plain.numpy()):
        assert not is_fake(one)


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.int8, np.float64])
def test_numpy_arrays_are_viewed_without_a_copy(kind):
    array = np.zeros((3, 4), dtype=kind)
    operand = Operand(array)
    assert operand.dtype is dtype(kind)
    assert operand.address == array.ctypes.data
    operand.tensor[1, 2] = 5
    assert array[1, 2] == 5


def test_a_strided_numpy_array_keeps_its_strides():
    array = np.zeros((6, 8), dtype=np.float32)[::2].T
    assert Operand(array).shape == (8, 3)
    assert Operand(array).stride == (1, 16)


def test_an_operand_of_an_operand_is_a_view_of_the_same_tensor():
    tensor = torch.empty(3, 4)
    assert Operand(Operand(tensor)).tensor is tensor


@pytest.mark.parametrize("value", [None, 3, "A", [[1.0]], object()])
def test_what_is_no_tensor_is_refused_by_operand_name_and_type(value):
    with pytest.raises(ArgumentError, match=f"B is a {type(value).__name__}; expected a torch"):
        Operand(value, "B")


def test_arrays_that_are_read_backwards_are_refused():
    backwards = np.ones((4, 6), np.float32)[::-1]
    with pytest.raises(ArgumentError, match=r"A has strides of \(-24, 4\) bytes; .*copy it"):
        Operand(backwards, "A")
    assert Operand(np.ascontiguousarray(backwards), "A").stride == (6, 1)


def test_what_dlpack_cannot_express_is_refused_with_its_reason():
    with pytest.raises(ArgumentError, match="A could not be viewed through DLPack"):
        Operand(np.zeros((2, 2), dtype=ml_dtypes.float8_e4m3b11fnuz), "A")


def test_a_sparse_tensor_is_refused_because_it_has_no_strides():
    with pytest.raises(ArgumentError, match="A "):
        Operand(torch.eye(4).to_sparse(), "A")


def test_repr_shows_type_shape_strides_and_device():
    assert repr(Operand(torch.empty(3, 4))) == "float32[3, 4]:[4, 1] on cpu"


# Layouts ---------------------------------------------------------------------------------


def test_tensors_that_are_alike_share_a_layout():
    tensor, alike = torch.empty(3, 4), torch.empty(9, 4)[2:5]
    others = [
        torch.empty(3, 5),
        torch.empty(4, 3).T,
        torch.empty(3, 4, dtype=BF16),
        torch.empty(3, 4, device="meta"),
    ]
    assert Operand(tensor).layout is Operand(alike).layout
    assert len({Operand(one).layout for one in (tensor, *others)}) == 5


def test_layouts_are_forgotten_and_stay_right_where_they_are_used(monkeypatch):
    monkeypatch.setattr(operands, "_LAYOUTS_KEPT", 4)
    found = [Operand(torch.empty(rows, 4)) for rows in range(1, 20)]
    assert len(operands._layouts) <= 4
    assert [one.layout.shape for one in found] == [(rows, 4) for rows in range(1, 20)]
    assert [one.span for one in found] == [rows * 16 for rows in range(1, 20)]


def test_keys_of_layouts_can_be_hashed_by_every_dynamo():
    """It reads all of them where an operand is made inside a graph, and before torch 2.13 raises
    for objects of classes of ours: so those of sketches are apart."""
    sketch = Sketch(dtype("float32"), (4, 5), (5, 1), 0)
    assert Operand(sketch).layout is Operand(sketch).layout
    assert Operand(torch.empty(4, 5)).layout is not Operand(sketch).layout
    assert operands._of_sketches
    for element, *_, device in (key[:4] for key in operands._layouts):
        assert (type(element), type(device)) == (torch.dtype, torch.device)


def test_sizes_that_are_symbols_are_taken_as_they_are():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    operand = Operand(mode.from_tensor(torch.empty(6, 5), static_shapes=False))
    assert operand.rank == 2
    assert not environment.guards
    assert operand.span == 6 * 5 * 4


# Shared memory ---------------------------------------------------------------------------


def overlapping(a, b):
    forth, back = overlap(Operand(a), Operand(b)), overlap(Operand(b), Operand(a))
    assert forth == back
    return forth


def test_separate_tensors_do_not_overlap():
    assert not overlapping(torch.empty(4, 4), torch.empty(4, 4))


def test_a_tensor_overlaps_itself_its_transpose_and_its_slices():
    tensor = torch.empty(8, 8)
    assert overlapping(tensor, tensor)
    assert overlapping(tensor, tensor.T)
    assert overlapping(tensor, tensor[2:4, 3:5])


def test_rows_behind_each_other_do_not_overlap():
    tensor = torch.empty(8, 8)
    assert not overlapping(tensor[:4], tensor[4:])
    assert overlapping(tensor[:5], tensor[4:])


def test_columns_of_a_packed_projection_side_by_side_do_not_overlap():
    packed = torch.empty(16, 3 * 8)
    q, k, v = packed[:, :8], packed[:, 8:16], packed[:, 16:]
    assert not overlapping(q, k)
    assert not overlapping(k, v)
    assert not overlapping(q, v)
    assert overlapping(packed[:, :9], k)
    assert overlapping(packed[:, 15:], k)


def test_columns_side_by_side_in_a_batch_do_not_overlap():
    packed = torch.empty(2, 16, 3 * 8)
    assert not overlapping(packed[..., :8], packed[..., 8:16])
    assert overlapping(packed[..., :9], packed[..., 8:16])


def test_columns_that_wrap_around_the_row_pitch_overlap():
    storage = torch.empty(1000)
    one = storage.as_strided((4, 8), (16, 1), 12)  # reaches into the next row of the other
    other = storage.as_strided((4, 8), (16, 1), 0)
    assert overlapping(one, other)


def test_empty_and_meta_operands_overlap_nothing():
    tensor = torch.empty(8, 8)
    meta = torch.empty(8, 8, device="meta")
    assert not overlapping(tensor[:0], tensor)
    assert not overlapping(meta, meta)
    assert not overlapping(meta[1:], meta[2:])


@st.composite
def views_of_one_buffer(draw):
    rank = draw(st.sampled_from((2, 3)))
    shape = draw(st.tuples(*[st.integers(0, 4)] * rank))
    stride = draw(st.tuples(*[st.integers(0, 9)] * rank))
    return shape, stride, draw(st.integers(0, 12))


def elements(shape, stride, offset):
    indices = np.ndindex(*shape)
    return {offset + sum(i * s for i, s in zip(index, stride, strict=True)) for index in indices}


@settings(max_examples=500)
@given(views_of_one_buffer(), views_of_one_buffer())
def test_overlap_is_never_denied_to_views_that_share_an_element(one, other):
    storage = torch.empty(256)
    if elements(*one) & elements(*other):
        assert overlapping(storage.as_strided(*one), storage.as_strided(*other))


@settings(max_examples=500)
@given(views_of_one_buffer())
def test_self_overlap_is_never_denied_to_a_view_with_a_doubled_element(view):
    shape, stride, offset = view
    tensor = torch.empty(256).as_strided(shape, stride, offset)
    if len(elements(*view)) < tensor.numel():
        assert self_overlapping(Operand(tensor))


@settings(max_examples=300)
@given(st.tuples(*[st.integers(0, 5)] * 2), st.tuples(*[st.integers(0, 9)] * 2), st.integers(1, 3))
def test_two_modes_that_take_turns_overlap_themselves_if_an_element_is_doubled(
    shape, stride, batches
):
    apart = 100  # more than any of these reach
    view = (batches, *shape), (apart, *stride), 0
    tensor = torch.empty(300).as_strided(*view)
    doubled = len(elements(*view)) < tensor.numel()
    assert self_overlapping(Operand(tensor)) == doubled


def test_a_matrix_whose_columns_are_between_rows_of_others_is_written():
    out = torch.empty(8).as_strided((2, 3), (3, 2))  # elements 0 2 4 and 3 5 7
    assert ka.ElementwiseArguments(torch.ones(2, 3), out).out.stride == (3, 2)


@pytest.mark.parametrize("shape", [(4, 5), (3, 4, 5), (1, 1), (0, 5), (4, 0)])
def test_a_contiguous_tensor_and_its_transpose_do_not_overlap_themselves(shape):
    tensor = torch.empty(shape)
    assert not self_overlapping(Operand(tensor))
    assert not self_overlapping(Operand(tensor.mT))


def test_a_view_without_elements_does_not_overlap_itself():
    assert not self_overlapping(Operand(torch.empty(10).as_strided((3, 0, 4), (0, 4, 1))))


def test_a_broadcast_and_a_sliding_window_overlap_themselves():
    assert self_overlapping(Operand(torch.empty(1, 4).expand(3, 4)))
    assert self_overlapping(Operand(torch.empty(10).unfold(0, 4, 1)))
    assert not self_overlapping(Operand(torch.empty(12).unfold(0, 4, 4)))


def test_the_negative_bit_is_refused_by_name():
    C = torch.randn(4, 4, dtype=torch.complex64).conj().imag
    for call in (lambda: Operand(C, "C"), lambda: ka.ops.gemm(C, torch.randn(4, 4))):
        with pytest.raises(ArgumentError, match=r"negative bit set.*resolve_neg\(\)"):
            call()
    plain = torch.randn(4, 4)
    ka.ops.gemm(plain, plain)  # such a call is known now
    with pytest.raises(ArgumentError, match=r"out has .* for an output a tensor of its own, and"):
        ka.ops.gemm(plain, plain, out=C)
    bias = torch.randn(4, dtype=torch.complex64).conj().imag
    with pytest.raises(ArgumentError, match="bias has torch's negative bit set"):
        ka.ops.gemm_bias_activation(plain, plain, bias=bias, activation="relu")


def test_nested_tensors_are_refused_by_name():
    nested = torch.nested.nested_tensor([torch.randn(4, 4), torch.randn(4, 4)])
    with pytest.raises(ArgumentError, match="A is a nested tensor"):
        Operand(nested, "A")
