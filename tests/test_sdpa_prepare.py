"""Prepared launches of attention: what they take anew, and what stays."""

import pytest
import torch
from support.sdpa import SDPA, Draw, backward_of, run

import kernel_api as ka
from kernel_api import masks
from kernel_api.arguments import Dropout
from kernel_api.errors import ArgumentError


def paged(page_size):
    q, pages = torch.zeros(2, 4, 6, 16), torch.zeros(7, 2, page_size, 16)
    table, lens = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    return SDPA(q, pages, pages, torch.zeros_like(q), page_table=table, seq_lens_kv=lens)


def gradient(**sizes):
    draw = Draw(**sizes)
    return backward_of(draw.arguments(), draw.results())


def test_a_prepared_launch_takes_the_operands_in_their_order_and_values_by_name():
    draw = Draw()
    args = draw.arguments(mask=masks.Causal(), softcap=3.0)
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    launch = kernel.prepare(args)
    other = Draw(seed=1).arguments(mask=masks.Causal(), softcap=5.0)
    launch(*other.tensors, other.lse.tensor, softcap=5.0)
    found = [o.tensor.clone() for o in other.outputs.values()]
    kernel.run(other)
    for one, operand in zip(found, other.outputs.values(), strict=True):
        assert torch.equal(one, operand.tensor)


def launch_of(args):
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    return kernel.prepare(args)


@pytest.mark.parametrize(
    ("make", "other", "words"),
    [
        (lambda: Draw().arguments(), lambda: Draw(D=16).arguments(), "Q has D = 16; .* D = 8"),
        (lambda: Draw().arguments(), lambda: Draw(D_v=8).arguments(), "V has D_v = 8; .* D_v = 16"),
        (lambda: paged(16), lambda: paged(8), "K has page_size = 8; .* page_size = 16"),
        (gradient, lambda: gradient(D=24), "Q has D = 24; the launch is prepared for D = 8"),
    ],
)
def test_a_prepared_launch_keeps_head_dimensions_and_pages(make, other, words):
    args, others = make(), other()
    launches = []
    checked = args.checked(lambda *tensors, stream=None, **values: launches.append(tensors))
    checked(*args.tensors, stream=None)
    for launch in (checked, launch_of(args)):
        with pytest.raises(ArgumentError, match=words):
            launch(*others.tensors)
    assert len(launches) == 1


def test_other_sizes_of_a_prepared_launch_may_differ():
    launch = launch_of(Draw().arguments())
    other = Draw(B=1, H=6, H_kv=3, S_q=9, S_kv=3).arguments()
    expected = run(other)["out"].clone()
    other.out.tensor.fill_(torch.nan)
    launch(*other.tensors, other.lse.tensor)
    assert torch.equal(other.out.tensor, expected)


def test_a_prepared_launch_says_which_tensors_it_takes():
    args = Draw().arguments()
    launch, lse = launch_of(args), args.lse.tensor
    for given in ((), args.tensors[:3], (*args.tensors, lse, lse)):
        with pytest.raises(ArgumentError) as caught:
            launch(*given)
        assert f"{len(given)} tensors are given; expected Q, K, V, out" in str(caught.value)
    backward = backward_of(args, Draw().results())
    with pytest.raises(ArgumentError, match="10 tensors are given; expected Q, K, V, out, dO, lse"):
        launch_of(backward)(*backward.tensors, lse)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_state_of_dropout_is_one_number_however_it_is_given(shape):
    seed, offset = torch.full(shape, 5), torch.full(shape, 3)
    args = Draw().arguments(dropout=Dropout(0.5, seed, offset))
    assert args.signature == Draw().arguments(dropout=Dropout(0.5, *torch.tensor([5, 3]))).signature
    state = {name: args.launch_values[name] for name in ("dropout_seed", "dropout_offset")}
    for given, taken in zip((seed, offset), state.values(), strict=True):
        assert taken.shape == ()
        assert taken.data_ptr() == given.data_ptr()
    launches = []
    launch = args.checked(lambda *tensors, stream=None, **values: launches.append(values))
    launch(*args.tensors, dropout_p=0.5, dropout_seed=seed, dropout_offset=offset)
    (values,) = launches
    assert {name: values[name].shape for name in state} == dict.fromkeys(state, ())
