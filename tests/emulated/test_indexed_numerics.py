"""The families of indexed rows move the right rows: their PTX runs in the emulator.

What nobody names is NaN, as is what lies between rows; the emulator refuses every access outside of
an operand, and every race between warps. With KERNEL_API_EMULATE=designs in the environment every
kernel runs, else one in four.
"""

import os

import pytest
from support.indexed import GATHER, KINDS, SCATTER, arguments, arguments_for, check
from support.kernels import generated_by
from support.ptx.kernel import EmulatedKernel, poison

from kernel_api import provider
from kernel_api._description import described, rebuilt
from kernel_api.verification import judge

pytestmark = pytest.mark.compile

(CUTEDSL,) = provider.providers(["cutedsl"])
KERNELS = [
    kernel
    for family in CUTEDSL.families()
    if family.arguments in KINDS
    for kernel in generated_by(family)
]
SPARSELY = 1 if os.environ.get("KERNEL_API_EMULATE") in ("designs", "all") else 12
CHOICES = (1, 2, 3, 4, 5, 8, 9)
WEIGHTS = (None, "float32", "bfloat16", "float16")


def run(kernel, args, index=0):
    poison(args.out.tensor)
    EmulatedKernel.compile(kernel, args, "sm_80").run(args, multiprocessors=1, seed=index)
    check(args)


@pytest.mark.parametrize(
    "index", range(0, len(KERNELS), SPARSELY), ids=lambda i: KERNELS[i].metadata.kernel_name
)
def test_every_kernel_moves_the_right_rows(index):
    kernel, k = KERNELS[index], CHOICES[index % 7]
    M = 2 * kernel.metadata.design.rows - index % 3
    N = 20 + 37 * index % 200
    args = arguments_for(kernel, M, N, k=k, seed=index, weight=WEIGHTS[index % 4])
    assert kernel.supports(rebuilt(described(args)))
    run(kernel, args, index)
    assert judge(args)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_be_many_times_as_long_as_their_threads_have_at_once(kind):
    narrow = [k for k in KERNELS if k.arguments is kind and k.metadata.design.threads_per_row == 8]
    run(narrow[0], arguments_for(narrow[0], 17, 8 * 8 * 3 + 8, k=2))


def test_out_is_zero_where_nothing_is_named():
    kernel = next(k for k in KERNELS if k.arguments is GATHER and k.metadata.design.rows > 4)
    args = arguments(GATHER, 5, 64, 3, 7)
    args.row_index.tensor.fill_(7)
    run(kernel, args)
    assert not args.out.tensor.any()


def test_nothing_is_written_where_nothing_is_named():
    kernel = next(k for k in KERNELS if k.arguments is SCATTER and k.metadata.design.rows > 4)
    args = arguments(SCATTER, 5, 64, 3, 20)
    args.row_index.tensor.fill_(-1)
    run(kernel, args)
    assert args.out.tensor.isnan().all()
