"""What checkers of types know of a program that uses the library; ``make lint`` asks mypy. Each
``type: ignore`` is an error that has to be found: mypy tells those that nothing needs."""

from typing import Any

import torch
from typing_extensions import assert_type

import kernel_api as ka


def known(x: torch.Tensor, weight: torch.Tensor) -> None:
    args = ka.GemmArguments(x, weight, x)
    assert_type(ka.get_kernels(args)[0].supports(args), ka.Status)
    assert_type(ka.status.Status.fail("no"), ka.Status)
    assert_type(ka.nn.linear_activation(x, weight), torch.Tensor)
    assert_type(ka.nn.mlp(x, weight, weight, kind="gelu"), torch.Tensor)
    assert_type(ka.fusions.gemm(x, weight, out=x), ka.GemmArguments)
    assert_type(ka.ops.gemm(x, weight), Any)
    assert_type(ka.graph.pygraph(), ka.graph.pygraph)
    assert_type(ka.tuning.Policy(), ka.tuning.Policy)
    assert_type(ka.masks.Causal(), ka.masks.Causal)
    ka.epilogue.relu(x)
    raise ka.errors.ArgumentError


def mistaken(x: torch.Tensor) -> None:
    ka.GemArguments(1)  # type: ignore[attr-defined]
    ka.GemmArguments(x)  # type: ignore[call-arg]
    ka.nn.no_such_function(3)  # type: ignore[attr-defined]
    ka.nn.linear_activation(x)  # type: ignore[call-arg]
    ka.ops.no_such_form(x)  # type: ignore[attr-defined]
    ka.ops.gemm(x, x, bais=x)  # type: ignore[call-arg]
    ka.ops.gemm_dropout(x, x, p=0.5, seed=3)  # type: ignore[call-arg]
    ka.ops.rmsnorm(x, eps="small")  # type: ignore[arg-type]
    ka.ops.quantize(x, modes="row")  # type: ignore[call-arg]
    ka.fusions.gemm(x, x)  # type: ignore[call-arg]
    ka.graph.no_such_name()  # type: ignore[attr-defined]
    ka.epilogue.no_such_function(x)  # type: ignore[attr-defined]
    ka.tuning.no_such_name()  # type: ignore[attr-defined]
