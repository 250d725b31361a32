"""Packed sequences of which the longest is said to be longer than it is, by far: kernels launch
what there are rows for."""

from typing import Any

import pytest
import torch
from support.ptx.kernel import EmulatedKernel
from support.sampling import some

import kernel_api as ka
from kernel_api.verification import FACTOR_REORDERED, conduct, judge

pytestmark = pytest.mark.compile

LENGTHS = (200, 0, 100)
ROWS, HEADS, KEY_HEADS = sum(LENGTHS) + 5, 2, 1
FAR = (2**31, 2**32 + 100, 2**62)


def rows(heads: int, device: str, columns: int = 64, element: Any = torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(ROWS, heads, columns, device=device).to(element)


def told(longest: int, device: str) -> dict[str, Any]:
    ends = torch.tensor((0, *LENGTHS)).cumsum(0).int().to(device)
    found = {}
    for side in ("q", "kv"):
        found |= {f"cu_seqlens_{side}": ends.clone(), f"max_seqlen_{side}": longest}
    return found


def forward(longest: int, device: str) -> Any:
    Q, K, V, out = (rows(heads, device) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS))
    return ka.SdpaArguments(Q, K, V, out, **told(longest, device))


def forward_of_8_bits(longest: int, device: str) -> Any:
    F8 = torch.float8_e4m3fn
    Q, K, V = (rows(heads, device, element=F8) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    return ka.SdpaArguments(Q, K, V, rows(HEADS, device), **told(longest, device))


def backward(longest: int, device: str) -> Any:
    Q, out, dO, dQ = (rows(HEADS, device) for _ in range(4))
    K, V, dK, dV = (rows(KEY_HEADS, device) for _ in range(4))
    lse = torch.zeros(HEADS, ROWS, device=device)
    return ka.SdpaBackwardArguments(Q, K, V, out, dO, lse, dQ, dK, dV, **told(longest, device))


def kernels_of(args: Any) -> dict[str, ka.Kernel]:
    """The first of each family."""
    found: dict[str, ka.Kernel] = {}
    for kernel in ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"]):
        found.setdefault(kernel.family_name(), kernel)
    return found


@pytest.mark.parametrize("problem", some([forward, backward, forward_of_8_bits], 2))
def test_no_more_is_launched_than_there_are_rows_for(problem):
    offered = kernels_of(problem(ROWS, "meta"))
    assert len(offered) > 1
    for family, kernel in offered.items():
        compiled = EmulatedKernel.compile(kernel, problem(ROWS, "cpu"))
        right = [one.grid for one in compiled.launches(problem(ROWS, "cpu"))]
        for longest in FAR:
            args = problem(longest, "cpu")
            assert [one.grid for one in compiled.launches(args)] == right, (family, longest)


@pytest.mark.parametrize("family", ["sm90.sdpa_forward", "sm90.sdpa_decode", "sm80.sdpa_forward"])
def test_all_rows_are_computed(family):
    for longest in some(FAR, 1):
        args = forward(longest, "cpu")
        compiled = EmulatedKernel.compile(kernels_of(forward(ROWS, "meta"))[family], args)
        broken = conduct(args, lambda: compiled.run(args))  # noqa: B023
        assert broken is None
        verdict = judge(args, FACTOR_REORDERED)
        assert verdict, str(verdict)


# Rules -------------------------------------------------------------------------------------


def reasons(args: Any) -> str:
    offered = ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"])
    assert not offered, offered
    return str(ka.explain(args, cc="sm_90a", providers=["cutedsl"]))


def test_more_tiles_than_32_bits_count_are_refused():
    def args(sequences: int) -> Any:
        def b(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

        T, longest = 2**20 + 2048, 2**20
        ends = torch.empty(sequences + 1, dtype=torch.int32, device="meta")
        packed = {}
        for side in ("q", "kv"):
            packed |= {f"cu_seqlens_{side}": ends, f"max_seqlen_{side}": longest}
        return ka.SdpaArguments(b(T, 128, 64), b(T, 8, 64), b(T, 8, 64), b(T, 128, 64), **packed)

    assert ka.get_kernels(args(16), cc="sm_90a", providers=["cutedsl"])
    assert "tiles of all heads and sequences are counted in 32 bits" in reasons(args(20000))


def test_pages_of_more_keys_than_are_counted_are_refused():
    def args(pages: int) -> Any:
        def b(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

        def i(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=torch.int32, device="meta")

        K = b(8, 1, 256, 64)
        where = {"page_table": i(1, pages), "seq_lens_kv": i(1)}
        return ka.SdpaArguments(b(1, 1, 4, 64), K, K, b(1, 1, 4, 64), **where)

    assert ka.get_kernels(args(2**22), cc="sm_90a", providers=["cutedsl"])
    assert "pages of a sequence have 2147483648 keys" in reasons(args(2**23))


@pytest.mark.parametrize(
    ("heads", "key_heads", "columns"), [(128, 8, (64, 64)), (128, 1, (576, 512))]
)
def test_long_tables_of_pages_are_bounds(heads, key_heads, columns):
    """Of a server that may decode as many sequences, whose lengths are short: of keys no tiles are
    launched."""
    B, pages = 1024, 2**14

    def b(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    Q, K = b(B, heads, 1, columns[0]), b(5000, key_heads, 64, columns[0])
    V, out = K[..., : columns[1]], b(B, heads, 1, columns[1])
    table = torch.empty(B, pages, dtype=torch.int32, device="meta")
    lengths = torch.empty(B, dtype=torch.int32, device="meta")
    args = ka.SdpaArguments(Q, K, V, out, page_table=table, seq_lens_kv=lengths)
    assert ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"])


@pytest.mark.parametrize(("scale", "taken"), [(1e-40, True), (1e-46, False), (0.0, False)])
def test_scales_are_positive_in_float32(scale, taken):
    Q, out = (torch.empty(1, 1, 8, 64, dtype=torch.bfloat16, device="meta") for _ in range(2))
    args = ka.SdpaArguments(Q, Q, Q, out, scale=scale)
    if taken:
        assert ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"])
    else:
        assert f"scale is {scale}" in reasons(args)
