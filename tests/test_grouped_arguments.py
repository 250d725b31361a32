"""What GroupedGemmArguments checks, defaults and tells apart; offsets."""

import numpy as np
import pytest
import torch
from support.grouped import OFFSETS, ends, index, of_rows, of_sums, zeros

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api._description import described, rebuilt
from kernel_api.arguments import grouped
from kernel_api.dtypes import dtype
from kernel_api.errors import ArgumentError, EpilogueError, UnsupportedError
from kernel_api.metadata import GroupedGemmOperandsMetadata, TensorAttributes
from kernel_api.tuning._data import random_arguments

# What they are ---------------------------------------------------------------------------


def test_the_form_is_told_by_the_shapes():
    rows, sums = of_rows(), of_sums()
    assert (rows.ragged, rows.M, rows.N, rows.K, rows.L, rows.T) == ("M", 20, 6, 8, 3, 20)
    assert (sums.ragged, sums.M, sums.N, sums.K, sums.L, sums.T) == ("K", 8, 6, 20, 3, 20)


def test_tokens_are_counted_by_the_indices_where_there_are_some():
    A, B = zeros(2, 8), zeros(3, 8, 6)
    pick, place = torch.zeros(20, dtype=torch.int32), torch.arange(20, dtype=torch.int32)
    picked = ka.GroupedGemmArguments(A, B, zeros(20, 6), OFFSETS, row_index=pick)
    both = ka.GroupedGemmArguments(
        A, B, zeros(50, 6), OFFSETS, row_index=pick, out_row_index=place
    )  # fmt: skip
    placed = ka.GroupedGemmArguments(
        zeros(20, 8), B, zeros(50, 6), OFFSETS, out_row_index=place
    )  # fmt: skip
    assert picked.T == both.T == placed.T == both.M == 20
    assert list(both.indices) == ["row_index", "out_row_index"]
    assert list(both.named_operands) == ["A", "B", "out", "offsets", "row_index", "out_row_index"]
    assert both.launch_values["row_index"] is pick


@pytest.mark.parametrize(
    ("element", "accumulator"),
    [(torch.bfloat16, "f32"), (torch.float64, "f64"), (torch.int8, "i32")],
)
def test_the_accumulator_follows_the_operands(element, accumulator):
    out = torch.int32 if element is torch.int8 else element
    args = ka.GroupedGemmArguments(
        zeros(20, 8, element=element), zeros(3, 8, 6, element=element),
        zeros(20, 6, element=out), OFFSETS,
    )  # fmt: skip
    assert args.accumulator_type is dtype(accumulator)


def test_float32_is_multiplied_as_asked():
    assert of_rows().fp32_precision == "ieee"
    assert of_rows(fp32_precision="tf32").fp32_precision == "tf32"


def test_signatures_hold_no_sizes_and_keys_hold_all():
    small, large = of_rows(), ka.GroupedGemmArguments(
        zeros(9, 5), zeros(2, 5, 7), zeros(9, 7), ends(3, 9)
    )  # fmt: skip
    assert small.signature == large.signature
    assert small.key != large.key
    assert small.key == of_rows().key


def test_signatures_tell_what_is_there_and_what_is_asked():
    tokens = torch.arange(20, dtype=torch.int32)
    made = [
        of_rows(), of_sums(), of_sums(accumulate=True), of_rows(row_index=tokens),
        of_rows(out_row_index=tokens), of_rows(fp32_precision="tf32"),
        ka.GroupedGemmArguments(zeros(20, 8), [zeros(8, 6)] * 3, zeros(20, 6), OFFSETS),
    ]  # fmt: skip
    assert len({args.signature for args in made}) == len(made)
    assert len({args.key for args in made}) == len(made)


def test_keys_tell_how_many_tokens_are_picked():
    def picked(tokens):
        return ka.GroupedGemmArguments(
            zeros(2, 8), zeros(3, 8, 6), zeros(50, 6), OFFSETS,
            row_index=torch.zeros(tokens, dtype=torch.int32),
            out_row_index=torch.arange(tokens, dtype=torch.int32),
        )  # fmt: skip

    assert picked(20).key != picked(30).key
    assert picked(20).signature == picked(30).signature


def test_rebuilt_keeps_what_is_not_given():
    tokens = torch.arange(20, dtype=torch.int32)
    args = of_rows(row_index=tokens, epilogue=ka.EpilogueArguments(lambda a, s: a * s, s=2.0))
    other = zeros(20, 8)
    again = args.rebuilt(other, *args.tensors[1:])
    assert again.A.tensor is other
    assert again.row_index.tensor is tokens
    assert again.epilogue.scalars == {"s": 2.0}
    turned = tokens.flip(0)
    changed = args.rebuilt(*args.tensors, row_index=turned, s=3.0)
    assert changed.row_index.tensor is turned
    assert changed.epilogue.scalars == {"s": 3.0}
    assert of_sums(accumulate=True).rebuilt(*of_sums().tensors).accumulate


def test_a_blueprint_asks_for_indices():
    make = of_rows(row_index=torch.zeros(20, dtype=torch.int32)).blueprint()
    with pytest.raises(ArgumentError, match="row_index must be given by name"):
        make(*of_rows().tensors)


def test_arguments_are_described_and_rebuilt_without_data():
    tokens = torch.arange(20, dtype=torch.int32)
    listed = ka.GroupedGemmArguments(zeros(20, 8), [zeros(8, 6)] * 3, zeros(20, 6), OFFSETS)
    for args in (of_rows(row_index=tokens), of_sums(accumulate=True), listed):
        again = rebuilt(described(args))
        assert again.signature == args.signature
        assert again.device.type == "meta"
        assert again.T == args.T


def test_their_text_names_form_sizes_and_options():
    assert repr(of_rows()) == (
        "GroupedGemmArguments(3 groups of 20 tokens, 20x6x8 (M x N x K), ragged M, "
        "f32 x f32 -> f32, accumulated in f32, on cpu)"
    )
    assert "ragged K" in repr(of_sums(accumulate=True))
    assert repr(of_sums(accumulate=True)).endswith("on cpu, added to out)")


def test_layouts_that_fit_are_not_kept_without_end(monkeypatch):
    monkeypatch.setattr(grouped, "_FITTING_KEPT", 4)
    for rows in range(1, 20):
        ka.GroupedGemmArguments(zeros(rows, 3), zeros(2, 3, 5), zeros(rows, 5), ends(0, 1))
        assert len(grouped._fitting) <= 4


# Refusals: at construction, with both values ---------------------------------------------


def refusal(*operands, error=ArgumentError, **options):
    with pytest.raises(error) as caught:
        ka.GroupedGemmArguments(*operands, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("a", "b", "out"),
    [
        ((20, 8), (8, 6), (20, 6)),
        ((3, 20, 8), (3, 8, 6), (3, 20, 6)),
        ((20, 8), (3, 8, 6), (3, 20, 6)),
        ((20,), (3, 8, 6), (20, 6)),
    ],
)
def test_ranks_of_neither_form_are_refused(a, b, out):
    text = refusal(zeros(*a), zeros(*b), zeros(*out), OFFSETS)
    assert f"A has rank {len(a)}, B rank {len(b)}, out rank {len(out)}; expected A (T, K)" in text


def test_different_sums_are_refused_with_both():
    text = refusal(zeros(20, 8), zeros(3, 7, 6), zeros(20, 6), OFFSETS)
    assert text == (
        "A has K = 8 but B has K = 7 (A (T, K) = (20, 8), B (E, K, N) = (3, 7, 6))"
    )  # fmt: skip
    text = refusal(zeros(8, 20), zeros(19, 6), zeros(3, 8, 6), OFFSETS)
    assert "A has T = 20 but B has T = 19 (A (M, T) = (8, 20), B (T, N) = (19, 6))" in text


@pytest.mark.parametrize(
    ("offsets", "text"),
    [
        (torch.zeros(3, dtype=torch.int64), "offsets is int64; expected int32"),
        (torch.zeros(3), "offsets is float32; expected int32"),
        (torch.zeros(3, 1, dtype=torch.int32), "offsets has shape (3, 1); expected (E,)"),
        (torch.zeros(6, dtype=torch.int32)[::2], "offsets has stride 2; expected 1"),
        (torch.zeros(4, dtype=torch.int32), "offsets has shape (4,); expected (3,), the end"),
    ],
)
def test_offsets_are_one_int32_per_group(offsets, text):
    assert text in refusal(zeros(20, 8), zeros(3, 8, 6), zeros(20, 6), offsets)
    assert text in refusal(zeros(8, 20), zeros(20, 6), zeros(3, 8, 6), offsets)


def test_no_groups_are_refused():
    text = refusal(zeros(20, 8), zeros(0, 8, 6), zeros(20, 6), OFFSETS[:0])
    assert "offsets is empty" in text


@pytest.mark.parametrize("shape", [(19, 6), (20, 5), (6, 20)])
def test_an_out_of_another_shape_is_refused(shape):
    text = refusal(zeros(20, 8), zeros(3, 8, 6), zeros(*shape), OFFSETS)
    assert f"out has shape {shape} but A and B give (20, 6)" in text


def test_a_gradient_of_another_shape_is_refused():
    text = refusal(zeros(8, 20), zeros(20, 6), zeros(3, 8, 5), OFFSETS)
    assert "out has shape (3, 8, 5) but A and B give (3, 8, 6)" in text


def test_only_sums_accumulate():
    operands = (zeros(20, 8), zeros(3, 8, 6), zeros(20, 6), OFFSETS)
    assert "accumulate is True and the groups are rows of A" in refusal(*operands, accumulate=True)


@pytest.mark.parametrize("value", ["no", 1, None, [], torch.tensor([True, False])], ids=str)
def test_accumulate_is_true_or_false(value):
    operands = (zeros(8, 20), zeros(20, 6), zeros(3, 8, 6), OFFSETS)
    text = refusal(*operands, accumulate=value)
    assert text == f"accumulate is {value!r}; expected True or False"
    assert ka.GroupedGemmArguments(*operands, accumulate=np.True_).accumulate is True


def test_only_rows_are_picked_and_placed():
    operands = (zeros(8, 20), zeros(20, 6), zeros(3, 8, 6), OFFSETS)
    for name in ("row_index", "out_row_index"):
        assert f"{name} is given" in refusal(*operands, **{name: index(0)})


def test_indices_are_one_int32_per_token():
    operands = (zeros(20, 8), zeros(3, 8, 6), zeros(20, 6), OFFSETS)
    text = refusal(*operands, row_index=torch.zeros(20, dtype=torch.int64))
    assert "row_index is int64; expected int32" in text
    text = refusal(*operands, out_row_index=torch.zeros(19, dtype=torch.int32))
    assert "out_row_index has T = 19 but A has T = 20" in text
    both = {"row_index": index(0, 1), "out_row_index": index(0)}
    assert "row_index has T = 2 but out_row_index has T = 1" in refusal(*operands, **both)


def test_operands_on_two_devices_are_refused_by_name():
    A, B, out = zeros(20, 8), zeros(3, 8, 6), zeros(20, 6)
    assert "offsets is on meta but A is on cpu" in refusal(A, B, out, OFFSETS.to("meta"))
    text = refusal(A, B, out, OFFSETS, row_index=torch.zeros(20, dtype=torch.int32, device="meta"))
    assert "row_index is on meta but A is on cpu" in text


@pytest.mark.parametrize("name", ["A", "offsets", "row_index"])
def test_an_out_that_is_read_is_refused_by_name(name):
    storage = torch.zeros(400)
    out = storage[:160].view(20, 8)
    tokens = torch.zeros(20, dtype=torch.int32)
    operands = {"A": zeros(20, 8), "offsets": OFFSETS, "row_index": tokens}
    kinds = {"A": out, "offsets": storage[:3].view(torch.int32),
             "row_index": storage[:20].view(torch.int32)}  # fmt: skip
    operands[name] = kinds[name]
    text = refusal(
        operands["A"], zeros(3, 8, 8), out, operands["offsets"], row_index=operands["row_index"]
    )  # fmt: skip
    assert f"out shares memory with {name}" in text


def test_what_layouts_do_not_tell_is_checked_though_they_were_seen_before():
    A, B, out = zeros(20, 8), zeros(3, 8, 8), zeros(20, 8)
    ka.GroupedGemmArguments(A, B, out, OFFSETS)
    assert "out shares memory with A" in refusal(out, B, out, OFFSETS)
    assert "accumulate is True" in refusal(A, B, out, OFFSETS, accumulate=True)
    assert "fp32_precision is 'half'" in refusal(A, B, out, OFFSETS, fp32_precision="half")


# Scales ----------------------------------------------------------------------------------


def scaled(tensor, mode, *shape):
    return ka.ScaledOperand(tensor, torch.ones(shape), ka.ScaleMode(mode))


@pytest.mark.parametrize(
    ("mode_a", "a", "mode_b", "b"),
    [
        ("per_tensor", (), "per_tensor", ()),
        ("per_tensor", (), "per_tensor", (3,)),
        ("per_row", (20,), "per_row", (3, 6)),
        ("block_1x128", (20, 2), "block_128x128", (3, 2, 1)),
    ],
)
def test_scales_are_per_token_and_per_expert(mode_a, a, mode_b, b):
    A, B = scaled(zeros(20, 200), mode_a, *a), scaled(zeros(3, 200, 6), mode_b, *b)
    assert ka.GroupedGemmArguments(A, B, zeros(20, 6), OFFSETS).scaled == ("A", "B")


def test_scales_of_other_shapes_are_refused():
    A, out = zeros(20, 8), zeros(20, 6)
    text = refusal(A, scaled(zeros(3, 8, 6), "per_row", 6), out, OFFSETS)
    assert "B's per_row scale has shape (6,); expected (3, 6)" in text


def test_sums_over_tokens_take_no_scales_of_blocks():
    A = scaled(zeros(8, 20), "block_1x128", 8, 1)
    text = refusal(A, zeros(20, 6), zeros(3, 8, 6), OFFSETS)
    assert "A carries a block_1x128 scale and the groups are summed over" in text


# Epilogues -------------------------------------------------------------------------------


def every_value(accum, prob, bias, column, alpha):
    x = alpha * accum + bias + column
    y = x * prob
    return y, x, ep.sum(x, -1), ep.sum(y, -2), ep.amax(y, None), ep.max(x, None)


def every_operand(T, E, N):
    return {
        "prob": zeros(T, 1), "bias": zeros(E, 1, N), "column": zeros(N), "alpha": zeros(E, 1, 1),
        "x": zeros(T, N), "row": zeros(T), "columns": zeros(E, N), "amax": zeros(E),
        "largest": zeros(),
    }  # fmt: skip


def fused(T=20, E=3, N=6, K=8, offsets=OFFSETS, **options):
    epilogue = ka.EpilogueArguments(every_value, **{**every_operand(T, E, N), **options})
    return ka.GroupedGemmArguments(
        zeros(T, K), zeros(E, K, N), zeros(T, N), offsets, epilogue=epilogue
    )  # fmt: skip


def test_an_epilogue_has_rows_of_tokens_and_batches_of_experts():
    graph = fused().epilogue.graph
    shapes = {name: str(leaf.shape) for name, leaf in graph.leaves.items()}
    assert shapes == {"alpha": "(L)", "bias": "(L, N)", "column": "(N)", "prob": "(L, M)"}
    written = {name: str(graph.output_shape(name)) for name, _ in graph.outputs}
    assert written == {
        "D": "(L, M, N)", "x": "(L, M, N)", "row": "(L, M)", "columns": "(L, N)", "amax": "(L)",
        "largest": "()",
    }  # fmt: skip


def test_the_graph_depends_on_no_size():
    small = fused(1, 1, 2, 1, ends(1))
    assert small.epilogue.identity == fused().epilogue.identity == fused(3, 3).epilogue.identity


def test_the_graph_is_that_of_a_batch():
    operands = {**every_operand(20, 3, 6), "prob": zeros(3, 20, 1), "x": zeros(3, 20, 6),
                "row": zeros(3, 20)}  # fmt: skip
    batch = ka.GemmArguments(
        zeros(3, 20, 8), zeros(3, 8, 6), zeros(3, 20, 6),
        epilogue=ka.EpilogueArguments(every_value, **operands),
    )  # fmt: skip
    assert batch.epilogue.identity == fused().epilogue.identity


def test_modes_of_one_element_are_kept_where_they_are_given():
    args = fused(row=zeros(20, 1), columns=zeros(3, 1, 6), amax=zeros(3, 1, 1))
    assert args.outputs["columns"].shape == (3, 1, 6)


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("prob", (19, 1), "prob has shape (19, 1), which does not broadcast"),
        ("prob", (3, 20, 1), "prob has shape (3, 20, 1), which does not broadcast"),
        ("bias", (2, 1, 6), "bias has shape (2, 1, 6), which does not broadcast"),
        ("x", (3, 20, 6), "x has shape (3, 20, 6); fn gives it (20, 6)"),
        ("row", (3, 20), "row has shape (3, 20); fn gives it (20,)"),
        ("columns", (6,), "columns has shape (6,); fn gives it (3, 6)"),
        ("amax", (1,), "amax has shape (1,); fn gives it (3,)"),
    ],
)
def test_operands_of_an_epilogue_that_do_not_fit_are_named(name, shape, text):
    with pytest.raises(EpilogueError) as caught:
        fused(**{name: zeros(*shape)})
    assert text in str(caught.value)
    assert "(20, 6) in 3 groups of rows" in str(caught.value)


def test_an_out_that_is_scattered_has_its_own_rows_and_the_epilogue_has_the_tokens():
    place = torch.arange(20, dtype=torch.int32)
    epilogue = ka.EpilogueArguments(lambda accum: (accum, accum), x=zeros(20, 6))
    operands = (zeros(20, 8), zeros(3, 8, 6))
    args = ka.GroupedGemmArguments(
        *operands, zeros(50, 6), OFFSETS, out_row_index=place, epilogue=epilogue
    )  # fmt: skip
    assert args.outputs["x"].shape == (20, 6)
    text = refusal(*operands, zeros(50, 5), OFFSETS, out_row_index=place, epilogue=epilogue,
                   error=EpilogueError)  # fmt: skip
    assert "out has shape (50, 5); fn gives it (50, 6)" in text


def test_sums_have_the_epilogue_of_a_batch():
    epilogue = ka.EpilogueArguments(
        lambda accum, alpha: (accum * alpha, ep.sum(accum, -1)),
        alpha=zeros(3, 1, 1), total=zeros(3, 8),
    )  # fmt: skip
    assert of_sums(epilogue=epilogue).outputs["total"].shape == (3, 8)


def test_names_of_operands_are_taken():
    epilogue = ka.EpilogueArguments(lambda accum, offsets: accum * offsets, offsets=2.0)
    with pytest.raises(EpilogueError, match="called offsets, which is taken"):
        of_rows(epilogue=epilogue)


@pytest.mark.parametrize("name", ["row_index", "out_row_index"])
def test_names_of_indices_are_taken_where_they_are_given(name):
    read = {name: torch.zeros(20, 1)}
    function = {
        "row_index": lambda accum, row_index: accum + row_index,
        "out_row_index": lambda accum, out_row_index: accum + out_row_index,
    }[name]
    epilogue = ka.EpilogueArguments(function, **read)
    assert of_rows(epilogue=epilogue).epilogue.operands.keys() == read.keys()
    with pytest.raises(EpilogueError, match=f"called {name}, which is taken"):
        of_rows(epilogue=epilogue, **{name: torch.arange(20, dtype=torch.int32)})


# Metadata --------------------------------------------------------------------------------


def test_metadata_names_the_form():
    asked = {name: TensorAttributes("f32", None) for name in ("A", "B", "out")}
    made = GroupedGemmOperandsMetadata(
        **asked, offsets=TensorAttributes("i32", (0, 0, 1)), accumulator_type="f32"
    )  # fmt: skip
    assert made.names == ("A", "B", "out", "offsets")
    assert (made.ragged, made.experts) == ("M", "dense")
    with pytest.raises(ArgumentError, match="ragged is 'N'; expected one of"):
        GroupedGemmOperandsMetadata(
            **asked, offsets=asked["A"], accumulator_type="f32", ragged="N"
        )  # fmt: skip


def test_the_reference_takes_both_forms_and_other_kernels_say_which_they_take():
    assert [k.metadata.kernel_name for k in ka.get_kernels(providers=["reference"])
            if "grouped" in k.metadata.kernel_name] == ["reference_grouped_gemm"]  # fmt: skip
    element = torch.bfloat16
    sums = ka.GroupedGemmArguments(
        zeros(16, 24, element=element), zeros(24, 8, element=element),
        zeros(3, 16, 8, element=element), OFFSETS,
    )  # fmt: skip
    (kernel,) = (k for k in ka.get_kernels(providers=["torch"])
                 if k.metadata.kernel_name.startswith("torch_grouped_mm_ragged_m")
                 and "ttt" in k.metadata.kernel_name)  # fmt: skip
    status = kernel.supports(sums)
    assert not status
    assert "the groups are what is summed over (ragged K); the kernel is for ragged M" in str(
        status.error
    )
    with pytest.raises(UnsupportedError):
        kernel.run(sums)


def test_described_arguments_are_drawn_with_groups_that_can_be():
    tokens = torch.zeros(20, dtype=torch.int32)
    args = ka.GroupedGemmArguments(
        zeros(5, 8), [zeros(8, 6)] * 3, zeros(50, 6), OFFSETS, row_index=tokens,
        out_row_index=tokens,
    )  # fmt: skip
    drawn = random_arguments(described(args), "cpu", 0)
    assert drawn.offsets.tensor.tolist() == [6, 13, 20]
    assert 0 <= int(drawn.row_index.tensor.min()) <= int(drawn.row_index.tensor.max()) < 5
    assert len(drawn.out_row_index.tensor.unique()) == 20
    assert all(part.tensor.any() for part in drawn.B.memory)
    (kernel,) = ka.get_kernels(drawn, providers=["reference"])
    assert ka.verify(kernel, drawn)


def test_described_tokens_belong_to_a_group_as_far_as_there_are_rows_for_them():
    places = torch.zeros(20, dtype=torch.int32)
    args = ka.GroupedGemmArguments(
        zeros(20, 8), zeros(3, 8, 6), zeros(9, 6), OFFSETS, out_row_index=places
    )  # fmt: skip
    drawn = random_arguments(described(args), "cpu", 0)
    assert drawn.offsets.tensor.tolist() == [3, 6, 9]
    assert sorted(drawn.out_row_index.tensor[:9].tolist()) == list(range(9))
    (kernel,) = ka.get_kernels(drawn, providers=["reference"])
    assert ka.verify(kernel, drawn)


def test_described_tokens_that_there_are_none_of_belong_to_no_group():
    picks = torch.zeros(5, dtype=torch.int32)
    args = ka.GroupedGemmArguments(
        zeros(0, 8), zeros(3, 8, 6), zeros(5, 6), OFFSETS, row_index=picks
    )
    drawn = random_arguments(described(args), "cpu", 0)
    assert drawn.offsets.tensor.tolist() == [0, 0, 0]
    (kernel,) = ka.get_kernels(drawn, providers=["reference"])
    assert ka.verify(kernel, drawn)
