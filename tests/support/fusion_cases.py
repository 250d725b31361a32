"""Arguments of fusions to run kernels with: factors and operands drawn, outputs poisoned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

import kernel_api as ka
from kernel_api import epilogue as ep
from support.data import strided_empty
from support.fusions import Draw
from support.ptx.gemm import storage_bytes

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu


@dataclass(frozen=True)
class Case:
    """Arguments of a fusion.

    Attributes:
        make: Them, of a draw.
        design: Word for the kind of design that runs it.
        how: It is drawn.
    """

    name: str
    make: Callable[[Any], ka.GemmArguments]
    design: str = "plain"
    how: dict[str, Any] = field(default_factory=dict)

    draws: ClassVar[type[Draw]] = Draw
    K: ClassVar[int] = 72

    def drawn(self, turn: int) -> ka.GemmArguments:
        """Every other output is not aligned to 16 bytes; float32 is multiplied as tfloat32."""
        how = {"K": self.K, "element": BF16, "pad": 8 if turn % 2 else 3, "seed": turn, **self.how}
        args = self.make(self.draws(**how))
        if how["element"] is not F32:
            return args
        return ka.GemmArguments(*args.tensors, epilogue=args.epilogue, fp32_precision="tf32")


def on_device(args: ka.GemmArguments, device: str) -> ka.GemmArguments:
    """The same with all tensors elsewhere, scales as well; strides are kept."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        shape, strides = tensor.shape, tensor.stride()
        found = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=device)
        return found if device == "meta" else found.copy_(tensor)

    def operand(one: Any) -> Any:
        if one.mode is None:
            return moved(one.tensor)
        return ka.ScaledOperand(moved(one.tensor), moved(one.scale.tensor), one.mode)

    epilogue = {name: moved(one.tensor) for name, one in args.epilogue.tensors.items()}
    return args.rebuilt(*map(operand, args.operands), **epilogue)


def on_meta(args: ka.GemmArguments) -> ka.GemmArguments:
    """The same for any device: a query asks tensors of a GPU or of none."""
    return on_device(args, "meta")


def a_gemm(draw):
    given = {"alpha": 0.7, "C": draw.matrix(), "beta": -1.3, "bias": draw.columns()}
    return ka.fusions.gemm(draw.A, draw.B, out=draw.written(), activation="leaky_relu", **given)


def a_bias_activation(activation):
    def make(draw):
        return ka.fusions.gemm_bias_activation(
            draw.A,
            draw.B,
            out=draw.written(),
            bias=draw.columns().float(),
            activation=activation,
            preactivation=draw.written(element=F32),
            alpha=0.7,
        )

    return make


def a_residual(draw):
    given = {"alpha": torch.tensor(0.7), "C": draw.matrix(), "beta": -1.3}
    return ka.fusions.gemm_residual(draw.A, draw.B, out=draw.written(), activation="relu", **given)


def an_amax(draw):
    amax = draw.reduced(element=F32)
    return ka.fusions.gemm_amax(draw.A, draw.B, out=draw.written(), amax=amax, alpha=-0.7)


def a_glu(kind, element=None, **options):
    def make(draw):
        return ka.fusions.gemm_glu(
            draw.A,
            draw.B,
            out=draw.written(draw.N // 2, element),
            kind=kind,
            preactivation=draw.written(),
            bias=draw.columns(),
            prob=draw.rows().float(),
            alpha=0.7,
            **options,
        )

    return make


def a_dglu(kind, **options):
    def make(draw):
        wide = 2 * draw.N
        return ka.fusions.gemm_dglu(
            draw.A,
            draw.B,
            out=draw.written(wide),
            preactivation=draw.matrix(wide),
            kind=kind,
            prob=draw.rows().float(),
            dprob=draw.reduced(*draw.batches, draw.M, element=F32),
            dbias=draw.reduced(*draw.batches, wide, element=F32),
            alpha=0.7,
            **options,
        )

    return make


def a_recomputed_dglu(draw):
    return ka.fusions.gemm_recompute_dglu(
        draw.A,
        draw.B,
        out=draw.written(),
        upstream=draw.matrix(draw.N // 2),
        bias=draw.columns(),
        dbias=draw.reduced(*draw.batches, draw.N, element=F32),
        alpha=0.7,
    )


def an_srelu(draw):
    return ka.fusions.gemm_srelu(
        draw.A,
        draw.B,
        out=draw.written(),
        preactivation=draw.written(),
        prob=draw.rows().float(),
        alpha=0.7,
    )


def a_dactivation(activation):
    def make(draw):
        return ka.fusions.gemm_dactivation(
            draw.A,
            draw.B,
            out=draw.written(),
            preactivation=draw.matrix(),
            activation=activation,
            prob=draw.rows(),
            dprob=draw.reduced(*draw.batches, draw.M, element=F32),
            dbias=draw.reduced(*draw.batches, draw.N, element=F32),
            alpha=0.7,
        )

    return make


def a_recomputed_dactivation(activation):
    def make(draw):
        return ka.fusions.gemm_recompute_dactivation(
            draw.A,
            draw.B,
            out=draw.written(),
            upstream=draw.matrix(),
            activation=activation,
            bias=draw.columns(),
            prob=draw.rows().float(),
            dprob=draw.reduced(*draw.batches, draw.M, element=F32),
            dbias=draw.reduced(*draw.batches, draw.N, element=F32),
            alpha=0.7,
        )

    return make


def a_rope(**how):
    def make(draw):
        width = how.get("width", how["head_dim"] - how.get("start", 0))
        angle = draw.random(*draw.batches, draw.M, width // 2, element=F32)
        tables = {"cos": angle.cos(), "sin": angle.sin()}
        return ka.fusions.gemm_rope(draw.A, draw.B, out=draw.written(), **tables, **how)

    return make


def a_dropout(draw):
    state = {"p": 0.3, "seed": torch.tensor(2**40 + 17), "offset": 2**33 + 5}
    return ka.fusions.gemm_dropout(draw.A, draw.B, out=draw.written(), alpha=0.7, **state)


def a_dropout_of(what):
    """Of columns taken apart or put together, or of what all batches share, where it keeps what is
    1; the state is negative, and narrow."""

    def fn(accum, seed, offset):
        y = accum * 0.0 + 1.0
        if what == "split":
            gate, up = ep.glu_pair(y, granularity=8)
            y = gate * up
        else:
            y = ep.interleave(y, y)
        return ep.dropout(y, 0.25, seed, offset)

    def of_shared(accum, shared, seed, offset):
        return (accum * 0.0 + 1.0) * ep.dropout(shared, 0.25, seed, offset)

    def make(draw):
        state = {"seed": torch.tensor(-5).to(torch.int8), "offset": torch.tensor(-(2**20)).int()}
        if what == "shared":
            state["shared"] = torch.ones(draw.M, draw.N, dtype=draw.element)
        epilogue = ka.EpilogueArguments(of_shared if what == "shared" else fn, **state)
        width = {"split": draw.N // 2, "interleave": 2 * draw.N}.get(what, draw.N)
        return ka.GemmArguments(draw.A, draw.B, draw.written(width), epilogue=epilogue)

    return make


def a_quantize(mode, element=E4M3):
    def make(draw):
        scale = {
            "tensor": 0.013,
            "row": draw.reduced(*draw.batches, draw.M, element=F32),
            "mx": draw.written(draw.N // 32, E8M0),
        }[mode]
        return ka.fusions.gemm_quantize(
            draw.A,
            draw.B,
            out=draw.written(element=element),
            scale=scale,
            mode=mode,
            amax=draw.reduced(*draw.batches, element=F32),
            alpha=0.7,
            bias=draw.columns(),
        )

    return make


def a_hadamard(draw):
    """With signs, and the largest magnitude of every row."""

    def fn(accum, signs, alpha):
        turned = ep.hadamard(alpha * accum, signs=signs)
        return turned, ep.amax(turned, -1)

    signs = draw.random(16, element=F32).sign()
    amax = draw.reduced(*draw.batches, draw.M, element=F32)
    epilogue = ka.EpilogueArguments(fn, signs=signs, alpha=0.7, amax=amax)
    return ka.GemmArguments(draw.A, draw.B, draw.written(), epilogue=epilogue)


def many_outputs(more=F16):
    """Matrices of different types and layouts, and every reduction, over all batches too."""

    def fn(accum, row, column, full, batch, scalar, number):
        x = accum * row + number * full
        y = ep.silu(x + column) * scalar - batch
        return (
            y, x, x * 10.0, ep.sum(y, -1), ep.max(x, -1), ep.sum(x * y, -2), ep.min(y, -2),
            ep.mean_square(x, None), ep.amax(y, None),
        )  # fmt: skip

    def make(draw):
        L, M, N = draw.batch, draw.M, draw.N
        other = strided_empty((L, M, N), F32, "n", pad=5)
        rounded = strided_empty((L, M, N), more, "t", pad=1)
        for tensor in (other, rounded):
            storage_bytes(tensor)[:] = 0xFF
        epilogue = ka.EpilogueArguments(
            fn,
            row=draw.random(L, M, 1),
            column=draw.random(N, element=F32),
            full=draw.matrix(),
            batch=draw.random(L, 1, 1),
            scalar=draw.random(element=F32),
            number=2,
            x=other,
            rounded=rounded,
            row_sum=draw.reduced(L, M, element=F32),
            row_max=draw.reduced(L, M, element=BF16),
            column_sum=draw.reduced(L, N, element=F32),
            column_min=draw.reduced(L, N, element=F32),
            mean_square=draw.reduced(L, element=F32),
            amax=draw.reduced(element=F32),
        )
        return ka.GemmArguments(draw.A, draw.B, draw.written(), epilogue=epilogue)

    return make


def reduced_matrices(draw):
    """What is reduced over rows and columns: of each batch, and of all."""

    def fn(accum, row, factor):
        x = accum * row
        reduced = ep.max(x, None), ep.sum(x, None), ep.min(x * factor, None), ep.amax(x, None)
        return x * factor, *reduced

    L = draw.batch
    epilogue = ka.EpilogueArguments(
        fn,
        row=draw.random(L, draw.M, 1),
        factor=-1.7,
        largest=draw.reduced(L, element=F32),
        sum=draw.reduced(L, element=F32),
        least=draw.reduced(element=F32),
        amax=draw.reduced(element=F32),
    )
    return ka.GemmArguments(draw.A, draw.B, draw.written(), epilogue=epilogue)


def a_norm(draw):
    """Of rows that lie in one tile."""

    def fn(accum, weight):
        scale = ep.rsqrt(ep.mean_square(accum, -1) + 1e-5)
        return accum * scale * weight, scale, ep.sum(accum * scale, -2)

    epilogue = ka.EpilogueArguments(
        fn,
        weight=draw.random(draw.N),
        rstd=draw.reduced(*draw.batches, draw.M, element=F32),
        total=draw.reduced(*draw.batches, draw.N, element=F32),
    )
    return ka.GemmArguments(draw.A, draw.B, draw.written(), epilogue=epilogue)


def repeated_blocks(draw):
    """Each block of 16 columns minus half of its largest magnitude, which is stored, too."""

    def fn(accum, column):
        x = accum + column
        largest = ep.amax(x, -1, 16)
        return x - ep.repeat(largest * 0.5, 16), largest

    column, largest = draw.random(draw.N), draw.written(draw.N // 16)
    epilogue = ka.EpilogueArguments(fn, column=column, largest=largest)
    return ka.GemmArguments(draw.A, draw.B, draw.written(), epilogue=epilogue)


#: What the catalogue has, and what can be written beside it: with more than one tile of 64 columns.
CATALOGUE = {
    "gemm": a_gemm,
    "bias gelu": a_bias_activation("gelu"),
    "bias gelu_tanh": a_bias_activation("gelu_tanh"),
    "residual": a_residual,
    "amax": an_amax,
    "swiglu": a_glu("swiglu"),
    "geglu": a_glu("geglu", F32),
    "reglu, pairs": a_glu("reglu", granularity=1),
    "geglu_clamped": a_glu("geglu_clamped", limit=0.8),
    "situglu": a_glu("situglu", order="gate_up"),
    "halves": a_glu("swiglu", granularity="halves"),
    "dswiglu": a_dglu("swiglu"),
    "dglu, clamped": a_dglu("geglu_clamped", limit=0.8, granularity=8),
    "dswiglu, halves": a_dglu("swiglu", granularity="halves"),
    "recompute_dswiglu": a_recomputed_dglu,
    "srelu": an_srelu,
    "dsrelu": a_dactivation("squared_relu"),
    "dgelu": a_dactivation("gelu"),
    "recompute_dsilu": a_recomputed_dactivation("silu"),
    "rope": a_rope(head_dim=64),
    "rope, some heads": a_rope(head_dim=64, heads=2),
    "rope, part": a_rope(head_dim=64, start=16, width=32, style="interleaved"),
    "dropout": a_dropout,
    "dropout of gates": a_dropout_of("split"),
    "dropout of interleaved": a_dropout_of("interleave"),
    "dropout of shared": a_dropout_of("shared"),
    "hadamard": a_hadamard,
    "quantize": a_quantize("tensor"),
    "quantize to e5m2": a_quantize("tensor", E5M2),
    "quantize to integers": a_quantize("tensor", torch.int8),
    "quantize, mx": a_quantize("mx"),
    "quantize, row": a_quantize("row"),
    "norm": a_norm,
    "blocks": repeated_blocks,
}


def on_gpu(args: ka.GemmArguments) -> ka.GemmArguments:
    """The same values and strides, on the current GPU."""
    return on_device(args, "cuda")


def check_twice(kernel: ka.Kernel, args: Any) -> None:
    """A kernel is right, and gives the same bits when it runs again."""
    verdict = ka.verify(kernel, args)
    assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"
    first = {name: one.tensor.clone() for name, one in args.outputs.items()}
    kernel.run(args)
    for name, one in args.outputs.items():
        same = same_bits(one.tensor, first[name])
        assert same, f"{kernel.metadata.kernel_name}: {name} differs when repeated"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also of tensors without modes, which have no view as bytes, and of NaN."""
    return torch.equal(*(t.clone().reshape(-1).view(torch.uint8) for t in (a, b)))
