"""Norms whose results are quantised, and rows that are: operands, and what comes of them by the
formulas."""

from __future__ import annotations

from typing import Any

import torch

import kernel_api as ka
from kernel_api.verification import FACTOR_REORDERED, judge
from support.norms import LAYER, Draw, norm, poisoned

MODES = ("block", "mx", "row", "tensor")
#: Columns that share a scale.
WIDTHS = {"block": 128, "mx": 32}
STORED = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
LEAST, EPS = 2.0**-126, 0.03


def drawn(
    name: str,
    mode: str,
    M: int,
    N: int,
    element: Any = torch.bfloat16,
    stored: Any = torch.float8_e4m3fn,
    *,
    seed: int = 0,
    device: Any = "cpu",
) -> Any:
    """Arguments of a fusion, a norm's or ``quantize``: rows of very different size, one of zeros;
    weights or none."""
    draw = Draw(M, N, element, pad=16, offset=16, device=device, seed=seed)
    x = draw.matrix()
    if not x.is_meta:
        x *= 2.0 ** torch.arange(-3, M - 3, device=device).remainder(7)[:, None]
        x[M // 2] = 0
    out, scale = draw.matrix(read=False, element=stored), _scale(mode, M, N, seed, x)
    if name == "quantize":
        return ka.fusions.quantize(x, out=out, scale=scale, mode=mode)
    given: dict[str, Any] = {"eps": EPS}
    if seed % 3:
        given["weight"] = draw.columns(element=("float32", None)[seed % 2])
    if seed % 4 == 1:
        given["bias"] = draw.columns()
    if seed % 2:
        given["rstd"] = draw.statistic()
    if seed % 3 == 0:
        given |= _residual(draw, ("bfloat16", "float32")[seed % 2])
    return getattr(ka.fusions, name)(x, out=out, scale=scale, mode=mode, **given)


def _residual(draw: Draw, element: Any) -> dict[str, Any]:
    """And its sum, of which a row is zeros as well."""
    residual = draw.matrix(element=element)
    if not residual.is_meta:
        residual[draw.M // 2] = 0
    return {"residual": residual, "residual_out": draw.matrix(read=False, element=element)}


def _scale(mode: str, M: int, N: int, seed: int, like: torch.Tensor) -> Any:
    if mode == "tensor":
        return 0.037 if seed % 2 else torch.full((), 0.037, device=like.device)
    if mode == "row":
        return poisoned(like.new_empty(2 * M, dtype=torch.float32))[::2]
    if mode == "mx":
        codes = torch.full((M, N // 32), 0xFF, dtype=torch.uint8, device=like.device)
        return codes.view(torch.float8_e8m0fnu)
    return poisoned(like.new_empty(M, N // 128 + 3, dtype=torch.float32))[:, 1:-2]


def check(args: Any, mode: str) -> None:
    """By the rule of ``verify``, and against the formulas."""
    verdict = judge(args, FACTOR_REORDERED)
    assert verdict, verdict
    y = _rows(args)
    out, top = args.out.tensor, STORED[args.out.tensor.dtype]
    if mode == "tensor":
        each = torch.full((), 0.037, dtype=torch.float64, device=y.device)
    else:
        scale = args.epilogue.outputs["scale"].tensor.double()
        exact = _found(y, mode, top)
        off = (scale / exact).log2().abs()
        assert off.max() <= (1 if mode == "mx" else 1e-5)  # powers may be the next one
        assert off.mean() <= 0.01
        each = scale[:, None] if mode == "row" else scale.repeat_interleave(WIDTHS[mode], 1)
    if out.dtype is torch.int8:
        assert (out.double() - (y / each).clamp(-128, 127)).abs().max() <= 0.5 + 1e-2
        return
    stored = (y / each).clamp(-top, top)
    eps = torch.finfo(out.dtype).eps
    steps = (out.double() - stored).abs() / (stored.abs() * eps + 2.0**-8)
    assert steps.max() <= 0.51


def _rows(args: Any) -> torch.Tensor:
    """What is quantised, in float64."""
    if isinstance(args, ka.ElementwiseArguments):
        return args.x.tensor.double()
    weight, bias = (None if one is None else one.tensor for one in (args.weight, args.bias))
    x = args.x.tensor
    if args.residual is not None:
        x = (x.float() + args.residual.tensor.float()).to(args.residual.tensor.dtype)
        assert torch.equal(args.residual_out.tensor, x)
    return norm(x, weight, bias, centred=isinstance(args, LAYER), eps=EPS)


def _found(y: torch.Tensor, mode: str, top: float) -> torch.Tensor:
    blocks = y if mode == "row" else y.unflatten(-1, (-1, WIDTHS[mode]))
    largest = blocks.abs().amax(-1)
    if mode == "mx":
        return torch.exp2((largest / top).clamp(min=2.0**-127).log2().ceil())
    return torch.where(largest == 0, 1.0, (largest / top).clamp(min=LEAST))
