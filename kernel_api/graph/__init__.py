"""The graph front end: code written for cuDNN's Python frontend runs on this library's kernels.

    import kernel_api.graph as cudnn

    with cudnn.Graph(io_data_type=cudnn.data_type.BFLOAT16) as graph:
        y = graph.gelu(graph.bias(graph.matmul(x, weight, name="up"), bias), name="act")
        y.set_output(True)

    y = graph(x, weight, bias)      # one kernel: a matrix product with an epilogue
    print(graph.explain())          # what was fused into which kernel, and why the rest was not

A graph is operations on descriptions of tensors. It is planned onto the fewest kernels of the
registry, compiled, and executed as often as wanted. Mode FALLBACK evaluates it with torch,
operation by operation, on any device.

``pygraph`` is the interface of single steps, ``Graph`` the one that takes torch tensors and does
the steps itself; ``graph``, ``jit`` and ``graph_cache`` build graphs in functions.

What is not as in cuDNN's frontend:

=========================  ==================================  ==================================
what                       there                               here, and why
=========================  ==================================  ==================================
device                     NVIDIA GPUs                         the CPU as well, by FALLBACK
kernels                    cuDNN's engines                     the registry's kernels; names of
                                                               plans are names of kernels
types                      cuDNN's                             those that torch stores: no FP4,
                                                               INT4, INT8x4, INT8x32
layouts                    reorderings (F16x16, F8_128x4)      strides alone; scores that are kept
                                                               with F16x16 are opaque
``heur_mode.CUDNN_FIND``   documented, not there               plans timed, the fastest first
serialised graphs          bytes of cuDNN                      JSON with a checksum: readable, and
                                                               nothing in it is ever executed
``Graph``: plans           blocked                             ``autotune``, ``select_plan``, ...
``Graph``: positional      needs ``inputs=``                   without it, in the order in which
                                                               inputs came up
``Graph.deserialize``      of an instance                      static: returns the graph
``Graph``: workspace       one, made when the block ends       one for each call, so that calls may
                                                               be on several streams at once
``graph_cache``            the key is the user's               by default layouts, types, devices
                                                               and all other arguments; thread-safe
operations                 of fixed signatures                 those of the documents too: norms
                                                               with numbers and 1-D scales, ``silu``
``backend_version()``      cuDNN's                             this library's, counted alike
=========================  ==================================  ==================================

Everything here is loaded on first use: importing the module loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel_api._lazy import attribute

if TYPE_CHECKING:
    from kernel_api.errors import (
        GraphError,
        GraphNotSupportedError,
        GraphStateError,
        SerializedGraphError,
        VariantPackError,
    )
    from kernel_api.errors import GraphNotSupportedError as cudnnGraphNotSupportedError
    from kernel_api.graph._decorators import graph, graph_cache, jit
    from kernel_api.graph._enums import (
        attention_implementation,
        behavior_note,
        build_plan_policy,
        convolution_mode,
        data_type,
        diagonal_alignment,
        heur_mode,
        moe_grouped_matmul_mode,
        norm_forward_phase,
        numerical_note,
        reduction_mode,
        reshape_mode,
        rng_distribution,
        tensor_reordering,
    )
    from kernel_api.graph._graph import pygraph
    from kernel_api.graph._handle import (
        Handle,
        backend_version,
        backend_version_string,
        create_handle,
        destroy_handle,
        get_stream,
        set_stream,
    )
    from kernel_api.graph._tensor import Tensor
    from kernel_api.graph._wrapper import Graph

_ENUMS = (
    "attention_implementation",
    "behavior_note",
    "build_plan_policy",
    "convolution_mode",
    "data_type",
    "diagonal_alignment",
    "heur_mode",
    "moe_grouped_matmul_mode",
    "norm_forward_phase",
    "numerical_note",
    "reduction_mode",
    "reshape_mode",
    "rng_distribution",
    "tensor_reordering",
)
_HANDLES = (
    "Handle",
    "backend_version",
    "backend_version_string",
    "create_handle",
    "destroy_handle",
    "get_stream",
    "set_stream",
)
_ERRORS = (
    "GraphError",
    "GraphNotSupportedError",
    "GraphStateError",
    "SerializedGraphError",
    "VariantPackError",
)
_HOME_OF = {
    **dict.fromkeys(_ENUMS, "graph._enums"),
    **dict.fromkeys(_HANDLES, "graph._handle"),
    **dict.fromkeys(_ERRORS, "errors"),
    **dict.fromkeys(("graph", "graph_cache", "jit"), "graph._decorators"),
    "Graph": "graph._wrapper",
    "Tensor": "graph._tensor",
    "pygraph": "graph._graph",
}
#: cuDNN's names of what is called otherwise here.
_OTHER_NAMES = {"cudnnGraphNotSupportedError": "GraphNotSupportedError"}

__all__ = [
    "Graph",
    "GraphError",
    "GraphNotSupportedError",
    "GraphStateError",
    "Handle",
    "SerializedGraphError",
    "Tensor",
    "VariantPackError",
    "attention_implementation",
    "backend_version",
    "backend_version_string",
    "behavior_note",
    "build_plan_policy",
    "convolution_mode",
    "create_handle",
    "cudnnGraphNotSupportedError",
    "data_type",
    "destroy_handle",
    "diagonal_alignment",
    "get_stream",
    "graph",
    "graph_cache",
    "heur_mode",
    "jit",
    "moe_grouped_matmul_mode",
    "norm_forward_phase",
    "numerical_note",
    "pygraph",
    "reduction_mode",
    "reshape_mode",
    "rng_distribution",
    "set_stream",
    "tensor_reordering",
]


if not TYPE_CHECKING:  # to which every name would be there, and of any type

    def __getattr__(name: str) -> Any:
        if name in _OTHER_NAMES:
            return attribute(__name__, _OTHER_NAMES[name], _HOME_OF)
        return attribute(__name__, name, _HOME_OF)


def __dir__() -> list[str]:
    return sorted(__all__)
