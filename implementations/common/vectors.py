"""Several neighbours in one instruction, as PTX has it."""

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint16, Uint32

VECTOR = {1: "", 2: ".v2", 4: ".v4"}  # by words


def braced(names: list[str]) -> str:
    """As an instruction on so many words names them."""
    return f"{{{', '.join(names)}}}" if len(names) > 1 else names[0]


def load_words(
    first: Int64, left: Int32 | None, column: int, count: int, width: int, kind: str = ""
) -> list:
    """`count` elements of a row from `column` on, in one load; zeros if fewer are left.

    Args:
        left: Of the row, from `first` on; None: enough.
        width: Of an element, in bits.
        kind: Of the load, as ``.nc``.

    Returns words of 32 bits; or one of 16, for what is less.
    """
    bits = count * width
    word = Uint32 if bits >= 32 else Uint16  # nothing holds less
    words = max(1, bits // 32)
    names = [f"{{$w{i}}}" for i in range(words)]
    zeros = " ".join(f"mov.b{word.width} {name}, 0;" for name in names)
    load = (
        f"ld.global{kind}{VECTOR[words]}.b{min(bits, 32)} {braced(names)}, "
        f"[{{$r0}} + {column * width // 8}];"
    )
    if left is not None:
        inside = f".reg .pred inside; setp.gt.s32 inside, {{$r1}}, {column + count - 1};"
        load = f"{{ {inside} {zeros} @inside {load} }}"
    loaded = cute.arch.inline_ptx(
        load,
        write_only_types=[word] * words,
        read_only_args=[first] if left is None else [first, left],
    )
    return list(loaded) if words > 1 else [loaded]
