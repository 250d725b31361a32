"""Matrix products of groups: tokens times the weights of their experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kernel_api.errors import GraphError
from kernel_api.graph._builder import Builder
from kernel_api.graph._enums import data_type, member_of, moe_grouped_matmul_mode
from kernel_api.graph._kinds import Kind, one_of, whole
from kernel_api.graph._node import Node, Operation, settle
from kernel_api.graph._options import optional_whole
from kernel_api.offsets import check_starts

_INTEGERS = (data_type.INT32, data_type.INT64)


class GroupedMethods(Builder):
    """Products of groups."""

    def moe_grouped_matmul(
        self,
        token: Any,
        weight: Any,
        first_token_offset: Any,
        token_index: Any = None,
        token_ks: Any = None,
        mode: Any = "NONE",
        top_k: int | None = None,
        compute_data_type: Any = None,
        name: str | None = None,
    ) -> Any:
        """OUT: each row of tokens times the weight of its expert.

        There are M rows of work in groups: that of expert e begins at row
        ``first_token_offset[e]`` and ends where that of the next begins; the first begins at 0,
        the last ends at M. That the first begins at 0 is checked where the host has the offsets,
        and on a GPU with ``KERNEL_API_CHECK_OFFSETS=1``; else it is taken for granted.

        =========  =====================  ==================  ===================================
        mode       token                  OUT                 row i of work
        =========  =====================  ==================  ===================================
        NONE       (1, M, K)              (1, M, N)           OUT[i] = token[i] · weight
        GATHER     (1, T, K)              (1, M, N)           OUT[i] = token[index[i]] · weight
        SCATTER    (1, M, K)              (1, M, N)           OUT[index[i]] = token[i] · weight
        =========  =====================  ==================  ===================================

        Args:
            token: Modes in front of the last two have extent 1.
            weight: (E, K, N), any strides.
            first_token_offset: INT32 (E, 1, 1), the first of them 0, never decreasing.
            token_index: INT32, M elements, of the modes GATHER and SCATTER; no two are equal of
                SCATTER. With ``top_k`` of GATHER it counts pairs of tokens and experts: the token
                is ``index // top_k``.
            token_ks: Kept for compatibility; not supported.

        Raises:
            GraphError: ``token_index`` is there without a mode that reads it, or the other way
                round; or ``token_ks`` is given.
            ArgumentError: when executed, if the first group is found to begin elsewhere than at 0.
        """
        kind = member_of(moe_grouped_matmul_mode, mode).name
        _check_index("moe_grouped_matmul", kind, token_index)
        if token_ks is not None:
            raise GraphError("moe_grouped_matmul has token_ks, which is not supported")
        inputs = {
            "token": token, "weight": weight, "first_token_offset": first_token_offset,
            "token_index": token_index,
        }  # fmt: skip
        given = optional_whole("moe_grouped_matmul", "top_k", top_k)
        divisor = given if given is not None and kind == "GATHER" else 1
        return self._add(
            "moe_grouped_matmul", inputs, name=name, compute=compute_data_type, mode=kind,
            top_k=divisor,
        )  # fmt: skip


def _check_index(what: str, mode: str, index: Any) -> None:
    if (index is None) != (mode == "NONE"):
        given = "None" if index is None else "given"
        raise GraphError(
            f"{what} has mode {mode} and token_index is {given}; GATHER and SCATTER read it, NONE "
            f"does not"
        )


class MoeGroupedMatmul(Operation):
    """Rows of tokens times the weights of their experts."""

    name = "moe_grouped_matmul"
    result = ("OUT",)
    inputs = ("token", "weight", "first_token_offset", "token_index")
    optional = ("token_index",)
    attributes: ClassVar[dict[str, Kind]] = {
        "mode": one_of(moe_grouped_matmul_mode.__members__),
        "top_k": whole(1, 2**31 - 1),
    }

    def check(self, node: Node) -> None:
        _check_index(str(node), node["mode"], node.optional("token_index"))

    def infer(self, node: Node) -> None:
        token, weight = node.input("token").dim, node.input("weight").dim
        if len(token) < 2 or any(extent != 1 for extent in token[:-2]) or len(weight) != 3:
            raise GraphError(
                f"{node} has token of dim {list(token)} and weight of dim {list(weight)}; expected "
                f"(1, M, K) and (E, K, N)"
            )
        if token[-1] != weight[1]:
            raise GraphError(
                f"{node} has token with K = {token[-1]} but weight with K = {weight[1]}"
            )
        offset = node.input("first_token_offset")
        if _count(offset.dim) != weight[0] or offset.data_type not in _INTEGERS:
            raise GraphError(
                f"{node} has first_token_offset {offset.data_type.name} {list(offset.dim)}; "
                f"expected INT32 (E, 1, 1) with E = {weight[0]}, where each group begins"
            )
        index, rows = node.optional("token_index"), token[-2]
        if index is not None:
            if index.data_type not in _INTEGERS:
                raise GraphError(f"{node} has token_index {index.data_type.name}; expected INT32")
            if node["mode"] == "GATHER":
                rows = _count(index.dim)
            elif _count(index.dim) != rows:
                raise GraphError(
                    f"{node} has token_index of dim {list(index.dim)}; expected one for each of "
                    f"{rows} rows"
                )
        settle(node, node.outputs.get("OUT"), (*token[:-2], rows, weight[2]))

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        token, weight = given["token"].flatten(0, -2), given["weight"]
        whole = not (token.is_floating_point() or weight.is_floating_point())
        kind = torch.float64 if whole else node.arithmetic
        token, weight = token.to(kind), weight.to(kind)
        index = given.get("token_index")
        index = None if index is None else index.flatten().long()
        if node["mode"] == "GATHER":
            token = token[index // node["top_k"]]
        check_starts(given["first_token_offset"].flatten())
        starts = given["first_token_offset"].flatten().tolist()
        found = token.new_zeros(token.shape[0], weight.shape[2])
        for expert, start in enumerate(starts):
            end = starts[expert + 1] if expert + 1 < len(starts) else token.shape[0]
            found[start:end] = token[start:end] @ weight[expert]
        if node["mode"] == "SCATTER":
            assert index is not None
            found = torch.zeros_like(found).index_copy_(0, index, found)
        return {"OUT": found.reshape(_out_dim(node))}


def _out_dim(node: Node) -> tuple[int, ...]:
    return node.outputs["OUT"].dim


def _count(dim: tuple[int, ...]) -> int:
    found = 1
    for extent in dim:
        found *= extent
    return found
