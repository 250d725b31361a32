"""Options that describe a problem, and the operands made from them. The entries of problem lists
have the same names (see :mod:`._problem_list`)."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kernel_api.cli._attention_problem import ATTENTION, attention_arguments
from kernel_api.cli._fused_problem import FUSED, beside, fused_arguments
from kernel_api.cli._grouped_problem import GROUPED, grouped_arguments
from kernel_api.cli._indexed_problem import INDEXED, PLACES, indexed_arguments
from kernel_api.cli._norm_problem import NORMS, norm_arguments
from kernel_api.cli._query import at_least, seed
from kernel_api.dtypes import dtype
from kernel_api.errors import ArgumentError, KernelApiError

if TYPE_CHECKING:
    from kernel_api.arguments import Arguments, GemmArguments

OPERATIONS = ("gemm", *FUSED, *NORMS, *GROUPED, *INDEXED, *ATTENTION)

#: Operations that have an option, of those that not all have.
_OPERATIONS_WITH = {"groups": GROUPED, "heads": ATTENTION, "heads_kv": ATTENTION}

#: Of each mode, if it is not given.
_SIZE = 1024

#: What ``--scales`` may be.
SCALES = ("per_tensor", "per_row", "blocks", "per_row-per_tensor", "per_tensor-per_row")
_BLOCK = 128

#: Of what torch can number.
_MOST_BYTES = 2**63 - 1

_LAYOUT_HELP = (
    "one letter each for A, B and out: t row-major, n column-major; as in BLAS, two letters "
    "(tn, nt, nn, tt) name A and B only, and out is row-major (default: ttt; a torch.nn.Linear "
    "weight, used as weight.t(), makes it tn)"
)


def add_problem_options(
    parser: argparse.ArgumentParser, devices: tuple[str, ...], device: str | None
) -> None:
    """Operation, sizes, types, layout and placement; ``device`` is the default one."""
    sizes = parser.add_argument_group(
        "problem: out (M, N) = A (M, K) · B (K, N), or of x (M, N); attention of M queries and N "
        "keys with head dimension K; M tokens of groups, or K that are summed over; M times K rows "
        "of N that an index names"
    )
    sizes.add_argument(
        "--operation",
        choices=OPERATIONS,
        default=OPERATIONS[0],
        metavar="NAME",
        help="a name of kernel_api.fusions, such as gemm_swiglu, rmsnorm or grouped_gemm; sdpa or "
        "sdpa_backward (default: gemm)",
    )
    sizes.add_argument(
        "--with",
        dest="beside",
        action="append",
        type=beside,
        metavar="NAME[=VALUE]",
        help="what an operation may take beside its matrices: an operand that may be absent, as "
        "bias, or an option, as kind=geglu or causal; may be repeated",
    )
    for name in ("m", "n"):
        sizes.add_argument(f"--{name}", type=at_least(0), default=_SIZE, help=f"(default: {_SIZE})")
    sizes.add_argument(
        "--k",
        type=at_least(0),
        help=f"(default: {_SIZE}, of {' and '.join(INDEXED)} {PLACES}; norms have none)",
    )
    sizes.add_argument("--batch", type=at_least(0), metavar="L", help="(default: no batch mode)")
    sizes.add_argument(
        "--groups", type=at_least(1), metavar="E", help="of grouped products (default: 8)"
    )
    sizes.add_argument("--heads", type=at_least(1), help="of attention (default: 1)")
    sizes.add_argument(
        "--heads-kv", type=at_least(1), metavar="HEADS", help="of K and V (default: as many)"
    )
    sizes.add_argument("--dtype", default="bfloat16", help="of A and B (default: bfloat16)")
    sizes.add_argument("--out-dtype", metavar="DTYPE", help="(default: that of A)")
    sizes.add_argument("--accumulator", metavar="DTYPE", help="(default: float32, int32, float64)")
    sizes.add_argument(
        "--scales", choices=SCALES, help="of A and B, or A-B; blocks: 1x128 of A, 128x128 of B"
    )
    sizes.add_argument("--layout", default="ttt", help=_LAYOUT_HELP)
    sizes.add_argument(
        "--fp32-precision",
        choices=("ieee", "tf32x3", "tf32"),
        help="how float32 operands are multiplied",
    )
    sizes.add_argument(
        "--pad",
        type=at_least(0),
        default=0,
        metavar="COUNT",
        help="elements between the rows (columns) of every operand",
    )
    sizes.add_argument(
        "--offset",
        type=at_least(0),
        default=0,
        metavar="COUNT",
        help="elements in front of every operand, which then starts misaligned",
    )
    sizes.add_argument(
        "--device", choices=devices, default=device, help=f"(default: {device or 'cuda, else cpu'})"
    )
    sizes.add_argument("--seed", type=seed, default=0, help="of the random operands (default: 0)")
    parser.add_argument_group("kernels").add_argument(
        "--cc", help="architecture asked about, such as 90 or sm_90a (default: the device's)"
    )


def problem_arguments(
    options: argparse.Namespace, sizes: tuple[int, int, int] | None = None
) -> Arguments:
    """The operands that the options describe; ``sizes`` replaces their M, N and K.

    Raises:
        ArgumentError: the options contradict each other, the device is not here, or it has no room
            for the operands.
    """
    _check_options(options)
    with _enough_room():
        return _made(options, sizes or sizes_of(options))


def sizes_of(options: argparse.Namespace) -> tuple[int, int, int]:
    """M, N and K; a norm has no K, and does not look at it."""
    usual = PLACES if options.operation in INDEXED else _SIZE
    return options.m, options.n, usual if options.k is None else options.k


def on_cpu(args: Arguments) -> Arguments:
    """The same problem there, without data; raises ArgumentError if it has no room there."""
    from kernel_api._description import described, rebuilt

    with _enough_room():
        return rebuilt(described(args), "cpu")


@contextlib.contextmanager
def _enough_room() -> Iterator[None]:
    """Makes an ArgumentError of what torch says of sizes and types that it has no operands of."""
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError) as error:
        if isinstance(error, KernelApiError):
            raise
        told = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ArgumentError(
            f"the operands cannot be made: {told}; expected sizes that there is memory for, of "
            f"types that torch makes"
        ) from error


def _made(options: argparse.Namespace, sizes: tuple[int, int, int]) -> Arguments:
    m, n, k = sizes
    if options.operation in NORMS:
        return norm_arguments(options, Maker(options), m, n)
    if options.operation in INDEXED:
        return indexed_arguments(options, Maker(options), (m, n, k))
    if options.operation in ATTENTION:
        return attention_arguments(options, Maker(options), (m, n, k))
    if options.operation in GROUPED:
        layout = _layout(options.layout)
        return grouped_arguments(options, Maker(options), (m, n, k), layout, _scaled)
    return gemm_arguments(options, (m, n, k))


def _check_options(options: argparse.Namespace) -> None:
    """Raises ArgumentError for one that the operation has not."""
    for name, operations in _OPERATIONS_WITH.items():
        given = getattr(options, name)
        if given is not None and options.operation not in operations:
            raise ArgumentError(
                f"--{name.replace('_', '-')} is {given}; {options.operation} has no such thing, "
                f"{' and '.join(operations)} have"
            )
    if options.k is not None and options.operation in NORMS:
        raise ArgumentError(
            f"--k is {options.k}; {options.operation} has sizes M and N, leave it out"
        )


def gemm_arguments(options: argparse.Namespace, sizes: tuple[int, int, int]) -> GemmArguments:
    """Of a product with these M, N and K, fused or not."""
    import kernel_api as ka

    m, n, k = sizes
    element = dtype(options.dtype)
    layout = _layout(options.layout)
    maker = Maker(options)
    A = maker.tensor((m, k), element, layout[0], fill=True)
    B = maker.tensor((k, n), element, layout[1], fill=True)
    operands = _scaled(options.scales, maker, A, B)
    if options.operation in FUSED or options.beside:
        return fused_arguments(options, maker, operands, layout[2])
    out_element = dtype(options.out_dtype) if options.out_dtype else element
    return ka.GemmArguments(
        *operands,
        maker.tensor((m, n), out_element, layout[2], fill=False),
        options.accumulator,
        fp32_precision=options.fp32_precision,
    )


def _scaled(scales: str | None, maker: Maker, A: Any, B: Any) -> tuple[Any, Any]:
    """A and B with scales, where these are asked for."""
    if scales is None:
        return A, B
    from kernel_api.arguments import ScaledOperand, ScaleMode

    def scale(of: Any, rows: int, columns: int) -> Any:
        batch = of.shape[0] if of.ndim == 3 else None
        return maker.matrices((rows, columns), dtype("float32"), "t", batch, fill=True)

    def whole(of: Any, size: int, mode: Any) -> tuple[Any, Any]:
        """(L, size), or (L,) where it is one."""
        if mode is ScaleMode.PER_TENSOR:
            return scale(of, 1, 1)[..., 0, 0], mode
        return scale(of, 1, size)[..., 0, :], mode

    (m, k), n = A.shape[-2:], B.shape[-1]
    if scales == "blocks":
        blocks_k, blocks_n = -(-k // _BLOCK), -(-n // _BLOCK)
        of_A = scale(A, m, blocks_k), ScaleMode.BLOCK_1x128
        of_B = scale(B, blocks_k, blocks_n), ScaleMode.BLOCK_128x128
    else:
        for_A, _, for_B = scales.partition("-")
        of_A = whole(A, m, ScaleMode(for_A))
        of_B = whole(B, n, ScaleMode(for_B or for_A))
    return ScaledOperand(A, *of_A), ScaledOperand(B, *of_B)


def _layout(text: str) -> str:
    letters = text.lower()
    if len(letters) == 2:
        letters += "t"
    if len(letters) != 3 or set(letters) - set("nt"):
        raise ArgumentError(
            f"--layout is {text!r}; expected t or n for A, B and out, such as ttt, tnt or tn"
        )
    return letters


class Maker:
    """Makes the operands of one problem, all on one device from one stream of random numbers."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        self.options = options
        here = torch.cuda.is_available()
        self.device = options.device or ("cuda" if here else "cpu")
        if self.device == "cuda" and not here:
            raise ArgumentError("--device cuda: torch sees no GPU here")
        self.random = None
        if self.device != "meta":
            self.random = torch.Generator(self.device).manual_seed(options.seed)

    def tensor(self, shape: tuple[int, int], element: Any, letter: str, *, fill: bool) -> Any:
        """A matrix, or a batch of them, as the options say."""
        return self.matrices(shape, element, letter, self.options.batch, fill=fill)

    def matrices(
        self, shape: tuple[int, int], element: Any, letter: str, batch: int | None, *, fill: bool
    ) -> Any:
        """A batch of matrices, or one; what lies between and before their rows is poison."""
        import torch

        pad, offset = self.options.pad, self.options.offset
        rows, columns = shape
        leading = (columns if letter == "t" else rows) + pad
        stride = (leading, 1) if letter == "t" else (1, leading)
        matrix = leading * (rows if letter == "t" else columns)
        count = offset + matrix * (1 if batch is None else batch)
        if count * element.itemsize > _MOST_BYTES:
            of = shape if batch is None else (batch, *shape)
            raise ArgumentError(
                f"an operand of shape {of} takes {count * element.itemsize} bytes as "
                f"{element}; expected {_MOST_BYTES} at most"
            )
        memory = torch.empty(count, dtype=element.torch, device=self.device)
        if batch is None:
            view = memory.as_strided(shape, stride, offset)
        else:
            view = memory.as_strided((batch, *shape), (matrix, *stride), offset)
        if self.random is not None:
            memory.fill_(_poison(memory))
            if fill:
                view.copy_(self._values(view.shape, element))
        return view

    def _values(self, shape: Any, element: Any) -> Any:
        """Normal numbers; small integers for integers, so that sums do not wrap."""
        import torch

        random, device = self.random, self.device
        if element.kind == "float":
            wide = torch.float64 if element.bits == 64 else torch.float32
            return torch.randn(shape, dtype=wide, generator=random, device=device)
        if element.kind == "other":
            return torch.randn(shape, dtype=element.torch, generator=random, device=device)
        lowest, end = {"int": (-4, 5), "uint": (0, 9), "bool": (0, 2)}[element.kind]
        return torch.randint(lowest, end, shape, generator=random, device=device)


def _poison(tensor: Any) -> Any:
    """What must not be read: not a number, or the largest integer."""
    import torch

    if tensor.is_floating_point() or tensor.is_complex():
        return float("nan")
    return True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max
