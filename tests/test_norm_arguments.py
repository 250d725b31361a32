"""What the arguments of norms take, refuse and tell apart."""

import pytest
import torch
from support.norms import KINDS, LAYER, LAYER_BACKWARD, RMS, RMS_BACKWARD, Draw

import kernel_api as ka
from kernel_api._description import described, rebuilt
from kernel_api.arguments.norm import default_rows_per_block
from kernel_api.errors import ArgumentError, EpilogueError

M, N = 5, 48


def every(kind, draw=None, **changed):
    """Arguments with every operand that the kind has."""
    draw = draw or Draw(M, N, "bfloat16")
    statistic, written = draw.statistic, draw.columns(read=False, element="float32")
    given = {"weight": draw.columns()}
    if kind in (RMS, LAYER):
        given |= {"residual": draw.matrix(), "residual_out": draw.matrix(read=False)}
    else:
        given |= {"dresidual": draw.matrix()}
    if kind is RMS:
        more = {"signs": draw.statistic((16,)), "hadamard": True, "rows_per_block": 2}
        maxima = {"amax": statistic((3,)), "global_amax": statistic(())}
        given |= {"bias": draw.columns(), "rstd": statistic(), **maxima, **more}
    elif kind is LAYER:
        given |= {"bias": draw.columns(), "rstd": statistic(), "mean": statistic()}
    else:
        given |= {"dweight": written, "dbias": written.clone()}
    return draw.arguments(kind, **{**given, **changed})


every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


# Fields ----------------------------------------------------------------------------------


@every_kind
def test_all_operands_are_named_and_those_that_are_written_are_outputs(kind):
    args = every(kind)
    assert list(args.named_operands) == [*args.operand_names, *args.further_names]
    assert set(args.outputs) == set(args.output_names)
    assert list(args.further) == list(args.further_names)
    for name, operand in args.named_operands.items():
        assert getattr(args, name) is operand
    assert (args.M, args.N) == (M, N)


@every_kind
def test_operands_may_be_absent_and_are_none_then(kind):
    args = Draw(M, N).arguments(kind)
    required = {"rstd", "mean"} if kind in (RMS_BACKWARD, LAYER_BACKWARD) else set()
    assert set(args.further) <= required
    assert args.weight is None
    assert set(args.outputs) == {args.output_names[0]}


def test_statistics_are_float32_or_float64_where_x_is():
    assert every(RMS).accumulator_type is ka.arguments.gemm.dtype("float32")
    assert every(RMS, Draw(M, N, "float64")).accumulator_type.name == "float64"
    with pytest.raises(ArgumentError, match="rstd is float32; expected float64, which it is comp"):
        every(LAYER, Draw(M, N, "float64"), rstd=torch.empty(M))


@pytest.mark.parametrize(("rows", "expected"), [(1, 2), (588, 2), (589, 4), (1176, 4), (1177, 8)])
def test_rows_per_block_gives_148_blocks_if_it_can(rows, expected):
    assert default_rows_per_block(rows) == expected


# Refused ---------------------------------------------------------------------------------


def x(*shape, element=torch.float32):
    return torch.zeros(shape or (M, N), dtype=element)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RMS(x(3, M, N), x(3, M, N)), r"x has shape \(3, 5, 48\); expected \(M, N\)"),
        (lambda: RMS(x(), x(M, 47)), r"out has \(M, N\) = \(5, 47\) but x has \(5, 48\)"),
        (lambda: RMS_BACKWARD(x(4, N), x(), x(), x(M)), r"dy has \(M, N\) = \(4, 48\) but x has"),
        (lambda: RMS(x(M, 0), x(M, 0)), "the mean of no columns is undefined"),
        (lambda: RMS(x(), x(), x(47)), r"weight has shape \(47,\); expected \(N\) = \(48,\)"),
        (lambda: RMS(x(), x(), bias=x(1, N)), r"bias has shape \(1, 48\); expected \(N\)"),
        (lambda: LAYER(x(), x(), mean=x(4)), r"mean has shape \(4,\); expected \(M\) = \(5,\)"),
        (lambda: RMS(x(), x(), mean=x(M)), "an RMS norm subtracts none, LayerNormArguments writes"),
        (lambda: RMS(x(), x(), amax=x(5)), r"amax has shape \(5,\); expected \(B\) = \(3,\)"),
        (lambda: RMS(x(), x(), signs=x(16)), "signs are given and hadamard is False"),
        (lambda: RMS(x(M, 40), x(M, 40), hadamard=True), "N = 40; a Hadamard transform takes 16"),
        (lambda: RMS(x(), x(), rows_per_block=0), "rows_per_block is 0; expected a number of"),
        (lambda: RMS(x(), x(), eps=-1e-6), "eps is -1e-06; expected a number that is not neg"),
        (lambda: RMS(x(), x(), eps=float("nan")), "eps is nan; expected a number"),
        (lambda: RMS(x(), x(), eps=True), "eps is True; expected a number"),
        (lambda: RMS(x().int(), x()), "x is int32; expected a floating type"),
        (lambda: RMS(x(), x(), x(N).bool()), "weight is bool; expected a floating type"),
        (lambda: RMS(x(), x().to("meta")), "out is on meta but x is on cpu"),
        (lambda: RMS(x(), x(), x(N).to("meta")), "weight is on meta but x is on cpu"),
        (lambda: RMS_BACKWARD(x(), x(), x(), None), r"rstd is None; expected the \(M,\) that the"),
        (lambda: LAYER_BACKWARD(x(), x(), x(), None, x(M)), "mean is None; expected the"),
        (lambda: RMS("x", x()), "x is a str; expected a torch tensor"),
    ],
)
def test_operands_that_contradict_each_other_are_refused_with_both_values(make, words):
    with pytest.raises(ArgumentError, match=words):
        make()


def test_memory_that_is_written_is_nobody_elses():
    shared = x()
    with pytest.raises(ArgumentError, match="out shares memory with x"):
        RMS(shared, shared)
    with pytest.raises(ArgumentError, match="dweight shares memory with weight"):
        weight = x(N)
        RMS_BACKWARD(x(), x(), x(), x(M), weight, dweight=weight)
    with pytest.raises(ArgumentError, match=r"rstd has shape .* several of its elements are one"):
        RMS(x(), x(), rstd=x(1).expand(M))


def test_a_scale_is_refused_where_it_would_be_ignored():
    scaled = ka.ScaledOperand(x(), torch.tensor(2.0), ka.ScaleMode.PER_TENSOR)
    with pytest.raises(ArgumentError, match="x is a ScaledOperand; expected a plain tensor"):
        RMS(scaled, x())


def test_an_epilogue_replaces_the_transform_and_may_not_take_the_names_of_operands():
    epilogue = ka.EpilogueArguments(lambda accum, C: accum * C, C=x())
    assert "D of accum, C" in repr(RMS(x(), x(), epilogue=epilogue))
    with pytest.raises(ArgumentError, match="epilogue is given and so is one of hadamard, amax"):
        RMS(x(), x(), hadamard=True, epilogue=epilogue)
    for name in ("weight", "eps", "x"):
        fn = eval(f"lambda accum, {name}: accum + {name}")
        with pytest.raises(EpilogueError, match=f"an operand of the epilogue is called {name}"):
            RMS(x(), x(), epilogue=ka.EpilogueArguments(fn, **{name: x()}))


# What tells two problems apart -----------------------------------------------------------


@every_kind
def test_sizes_and_numbers_are_no_part_of_the_signature(kind):
    one, other = every(kind), every(kind, Draw(M, 2 * N, "bfloat16", seed=1))
    assert one.signature == other.signature
    assert one.key != other.key
    assert hash(one.signature) == hash(other.signature)
    if kind in (RMS, LAYER):
        assert one.rebuilt(*one.tensors, eps=0.5).key == one.key


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (RMS, {"weight": None}),
        (RMS, {"weight": x(N)}),
        (RMS, {"weight": x(2 * N)[::2].bfloat16().repeat_interleave(2)[::2]}),
        (RMS, {"rstd": None}),
        (RMS, {"signs": None}),
        (RMS, {"global_amax": None}),
        (RMS, {"hadamard": False, "signs": None}),
        (LAYER, {"mean": None}),
        (RMS, {"residual_out": None}),
        (LAYER, {"residual": x(), "residual_out": x()}),
        (RMS_BACKWARD, {"dresidual": None}),
        (RMS_BACKWARD, {"dbias": None}),
        (LAYER_BACKWARD, {"dweight": x(N).bfloat16()}),
    ],
)
def test_what_compiled_code_depends_on_is_in_the_signature(kind, change):
    assert every(kind, **change).signature != every(kind).signature


def test_blocks_of_rows_are_in_the_key_and_not_in_the_signature():
    one, other = every(RMS), every(RMS, rows_per_block=1, amax=x(M))
    assert one.signature == other.signature
    assert one.key != other.key


# Made again ------------------------------------------------------------------------------


@every_kind
def test_arguments_are_described_to_another_process_and_come_back(kind):
    args = every(kind, Draw(M, N, "bfloat16", pad=8))
    again = rebuilt(described(args))
    assert type(again) is kind
    assert again.signature == args.signature
    assert again.launch_values.keys() == args.launch_values.keys()
    assert [o.shape for o in again.named_operands.values()] == [
        o.shape for o in args.named_operands.values()
    ]
    assert again.device.type == "meta"


@every_kind
def test_the_same_problem_on_other_tensors(kind):
    args, others = every(kind), every(kind, Draw(M, N, "bfloat16", seed=1))
    moved = args.rebuilt(*others.tensors)
    assert moved.operands[0].tensor is others.operands[0].tensor
    assert moved.weight.tensor is args.weight.tensor
    assert moved.signature == args.signature
    by_place = args.rebuilt(*others.tensors, *(o.tensor for o in others.further.values()))
    assert by_place.weight.tensor is others.weight.tensor
    by_name = args.rebuilt(*others.tensors, weight=others.weight.tensor)
    assert by_name.weight.tensor is others.weight.tensor
    with pytest.raises(ArgumentError, match="takes no colour"):
        args.rebuilt(*others.tensors, colour=1)


def test_numbers_stay_unless_they_are_given_anew():
    args = every(RMS, eps=0.25)
    assert args.rebuilt(*args.tensors).eps == 0.25
    assert args.rebuilt(*args.tensors, eps=0.5).eps == 0.5
    assert args.rebuilt(*args.tensors).hadamard


def test_a_description_names_sizes_types_and_what_is_there():
    text = repr(every(RMS))
    assert text.startswith("RmsNormArguments(5x48 (M x N), bf16 -> bf16, weight bf16, bias bf16")
    assert "global_amax f32, residual bf16, residual_out bf16, hadamard, on cpu" in text
