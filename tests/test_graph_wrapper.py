"""``Graph``: written with torch tensors in a block, called with tensors like them."""

import contextlib
import gc
import inspect
import re
import weakref

import numpy as np
import pytest
import torch
from support.graph_product import B, W, X, as_is_compared, expected, product

import kernel_api.graph as cudnn

# The block -----------------------------------------------------------------------------------


def test_the_end_of_the_block_plans_and_compiles():
    graph = product()
    assert graph.get_execution_plan_count() >= 2
    assert graph.selected is not None
    assert [node.name for node in graph.nodes] == ["mm", "shift", "act"]
    assert "of 3 operations, ready" in repr(graph)


def test_it_is_called_with_other_tensors_than_it_was_written_with():
    graph = product()
    x, w, b = (torch.randn(t.shape).half() for t in (X, W, B))
    as_is_compared(graph(x, w, b), *expected(x, w, b))


def test_one_object_is_one_tensor_of_the_graph():
    x = torch.randn(7, 7)
    with cudnn.Graph() as graph:
        y = graph.add(graph.matmul(x, x), x)
        assert graph.tensor_like(x) is graph.inputs[0]
        y.set_output(True)
    assert len(graph.inputs) == 1
    torch.testing.assert_close(graph(x), x @ x + x)


def test_equal_objects_are_two_tensors():
    with cudnn.Graph() as graph:
        graph.add(torch.ones(3), torch.ones(3)).set_output(True)
    assert torch.equal(graph(torch.full((3,), 2.5), torch.full((3,), 4.25)), torch.full((3,), 6.75))


def test_identity_survives_while_the_block_is_written():
    """Objects are kept: a new one at the address of one that is gone would be taken for it."""
    with cudnn.Graph() as graph:
        total = graph.identity(torch.ones(5))
        for _ in range(50):
            total = graph.add(total, torch.ones(5))
        total.set_output(True)
    assert len(graph.inputs) == 51


def test_objects_are_not_kept_when_the_block_has_ended():
    x = torch.randn(5)
    with cudnn.Graph() as graph:
        graph.relu(x).set_output(True)
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
    assert graph(torch.randn(5)).shape == (5,)


@pytest.mark.parametrize("fails", [False, True])
def test_objects_are_not_kept_where_there_is_nothing_to_call(fails):
    x = torch.randn(5)
    gone = weakref.ref(x)
    graph = cudnn.Graph()
    with contextlib.suppress(ZeroDivisionError), graph:
        graph.relu(x)
        _ = 1 / (0 if fails else 1)
    del x
    gc.collect()
    assert gone() is None


def test_tensors_with_gradients_are_taken_without():
    w = torch.nn.Parameter(torch.randn(5, 3))
    x = torch.randn(4, 5, requires_grad=True)
    with cudnn.Graph() as graph:
        graph.matmul(x, w).set_output(True)
    out = graph({x: x, w: w})["matmul.0::C"]
    assert not out.requires_grad
    torch.testing.assert_close(out, (x @ w).detach())


def test_dlpack_tensors_of_other_libraries_are_taken():
    x = np.random.default_rng(3).standard_normal((4, 6)).astype(np.float32)
    with cudnn.Graph() as graph:
        graph.relu(x, negative_slope=0.3, name="act").set_output(True)
    torch.testing.assert_close(graph(x), torch.nn.functional.leaky_relu(torch.from_numpy(x), 0.3))


def test_numbers_are_constants_and_no_inputs():
    with cudnn.Graph() as graph:
        graph.mul(graph.add(X, 0.75), -2).set_output(True)
    assert len(graph.inputs) == 1
    as_is_compared(graph(X), (X.double() + 0.75) * -2, (X + 0.75) * -2)


def test_tensors_in_tuples_are_taken():
    a, b, c = torch.randn(2, 3), torch.randn(4, 3), torch.randn(1, 3)
    with cudnn.Graph() as graph:
        graph.concatenate([a, b, c], axis=0, name="cat").set_output(True)
    assert torch.equal(graph(a, b, c), torch.cat([a, b, c]))
    found = graph({"cat::inputs::0": a, "cat::inputs::1": b, "cat::0::2": c})
    assert torch.equal(found["cat::Y"], torch.cat([a, b, c]))


def test_dropout_takes_a_tuple_with_tensors():
    q = torch.randn(1, 2, 9, 16)
    seed, offset = (torch.full((1, 1, 1, 1), n, dtype=torch.int64) for n in (5, 7))
    with cudnn.Graph() as graph:
        out, _ = graph.sdpa(q=q, k=q, v=q, dropout=(0.3, seed, offset), name="attn")
        out.set_output(True)
    first = graph({q: q, seed: seed, offset: offset})["attn::O"]
    again = graph({"attn::q": q, "attn::dropout::1": seed, "attn::dropout::2": offset})["attn::O"]
    assert torch.equal(first, again)
    other = graph({q: q, seed: seed + 1, offset: offset})["attn::O"]
    assert not torch.equal(first, other)


def test_functions_of_scores_may_use_torch_tensors():
    q, slope = torch.randn(2, 3, 9, 16), torch.rand(1, 3, 1, 1)
    with cudnn.Graph() as graph:
        # Names of operations in the function are free afterwards.
        out, _ = graph.sdpa(q=q, k=q, v=q, score_mod=lambda g, s: g.mul(s, slope), name="attn")
        graph.mul(out, slope).set_output(True)
    assert [node.name for node in graph.nodes] == ["attn", "mul.0"]
    scores = (q.double() @ q.double().mT) * slope.double()
    exact = scores.softmax(-1) @ q.double() * slope.double()
    same = ((q @ q.mT) * slope).softmax(-1) @ q * slope
    as_is_compared(graph(q, slope), exact, same)


def test_default_types_fill_what_is_not_set():
    with cudnn.Graph(io_data_type="bfloat16", intermediate_data_type="float32") as graph:
        c = graph.matmul(X, W)
        out = graph.relu(c).set_output(True)
    assert c.get_data_type() is cudnn.data_type.FLOAT
    assert out.get_data_type() is cudnn.data_type.BFLOAT16
    assert graph(X, W).dtype is torch.bfloat16


def test_outputs_have_the_strides_of_the_graph():
    with cudnn.Graph() as graph:
        out = graph.matmul(X, W).set_output(True)
        out.set_dim([3, 17, 11]).set_stride([17 * 11, 1, 17])
    found = graph(X, W)
    assert found.stride() == (187, 1, 17)
    as_is_compared(found, X.double() @ W.double(), X @ W)


def test_outputs_of_broadcast_inputs_are_row_major():
    row, column = torch.randn(1, 4).expand(3, 4), torch.randn(3, 1).expand(3, 4)
    for x in (row, column):
        with cudnn.Graph() as graph:
            graph.neg(graph.relu(x)).set_output(True)
        found = graph(x)
        assert torch.equal(found, -x.relu()) and found.is_contiguous()


def test_an_exception_in_the_block_is_the_users():
    graph = cudnn.Graph()
    with pytest.raises(ZeroDivisionError), graph:
        graph.relu(X)
        _ = 1 / 0
    with pytest.raises(cudnn.GraphStateError, match="its block raised ZeroDivisionError"):
        graph(X)


def test_what_cannot_be_is_raised_where_the_block_ends():
    graph = cudnn.Graph()
    with pytest.raises(cudnn.GraphError, match="mm"), graph:
        graph.matmul(X, B.reshape(1, 11), name="mm").set_output(True)
    with pytest.raises(cudnn.GraphStateError, match="could not be built when its block ended"):
        graph(X, B)


def test_a_graph_without_an_output_is_validated_and_not_planned():
    with cudnn.Graph() as graph:
        out = graph.matmul(X, W)
    assert out.get_dim() == [3, 17, 11]
    assert graph.get_execution_plan_count() == 0
    for use in (lambda: graph(X, W), graph.serialize, lambda: graph.get_workspace_size()):
        with pytest.raises(cudnn.GraphStateError, match=r"no output.*set_output\(True\)"):
            use()
    with pytest.raises(cudnn.GraphError, match="K"), cudnn.Graph() as bad:
        bad.matmul(X, X)


def test_a_block_is_written_once():
    graph = product()
    with pytest.raises(cudnn.GraphStateError, match="a new one needs a new Graph"), graph:
        pass
    with pytest.raises(cudnn.GraphStateError, match="relu cannot be added: the block of the graph"):
        graph.relu(X)


def test_it_is_not_called_before_the_block_ends():
    graph = cudnn.Graph()
    with pytest.raises(
        cudnn.GraphStateError, match="You should not invoke the graph before the context exits"
    ), graph:  # fmt: skip
        graph.relu(X).set_output(True)
        graph(X)


# Names ---------------------------------------------------------------------------------------


def test_operations_without_a_name_are_counted():
    with cudnn.Graph() as graph:
        graph.relu(graph.relu(graph.neg(X)))
    assert [node.name for node in graph.nodes] == ["neg.0", "relu.0", "relu.1"]


def test_a_name_is_taken_once():
    with pytest.raises(cudnn.GraphError, match="Node name mm already used"), cudnn.Graph() as graph:
        graph.matmul(graph.matmul(X, W, name="mm"), W.T, name="mm")


@pytest.mark.parametrize(
    "keys", [("mm::A", "mm::B", "shift::bias"), ("mm::0", "mm::1", "shift::1")]
)
def test_inputs_are_called_by_argument_or_by_its_place(keys):
    found = product()(dict(zip(keys, (X, W, B), strict=True)))
    as_is_compared(found["act::OUT_0"], *expected(X, W, B))


def test_arguments_are_counted_as_the_operation_has_them_also_if_given_by_name():
    with cudnn.Graph() as graph:
        graph.matmul(B=W, A=X, name="mm").set_output(True)
    found = graph({"mm::0": X, "mm::1": W})
    as_is_compared(found["mm::C"], X.double() @ W.double(), X @ W)


def test_a_tensor_that_is_used_twice_has_both_names():
    x = torch.randn(5, 5)
    with cudnn.Graph() as graph:
        graph.matmul(graph.relu(x, name="act"), x, name="mm").set_output(True)
    for key in ("act::input", "act::0", "mm::B"):
        torch.testing.assert_close(graph({key: x})["mm::C"], torch.relu(x) @ x)


def test_a_name_of_ones_own_is_one_more():
    with cudnn.Graph() as graph:
        x = graph.tensor_like(X).set_name("features")
        graph.relu(x, name="act").set_output(True).set_name("rectified")
    for key in ("features", "act::input", "act::0", x):
        found = graph({key: X})
        assert set(found) == {key, "rectified", "act::OUT_0"}
        assert found["rectified"] is found["act::OUT_0"]


def test_results_are_called_as_the_operation_calls_them():
    x, scale = torch.randn(9, 16), torch.randn(16)
    q = torch.randn(1, 2, 9, 16)
    with cudnn.Graph() as graph:
        for one in graph.layernorm(x, scale, scale, epsilon=3e-4, name="norm"):
            one.set_output(True)
        for one in graph.sdpa(q, q, q, generate_stats=True, name="attn"):
            one.set_output(True)
    found = graph({x: x, scale: scale, q: q})
    assert {"norm::Y", "norm::mean", "norm::inv_var", "attn::O", "attn::Stats"} <= set(found)
    assert found["attn::Stats"].shape == (1, 2, 9, 1)


# Calls with names ----------------------------------------------------------------------------


def test_tensors_are_found_by_all_that_names_them():
    with cudnn.Graph() as graph:
        c = graph.matmul(X, W, name="mm")
        out = graph.bias(c, B, name="shift").set_output(True).set_uid(77)
    a, w, b = graph.inputs
    exact, same = X.double() @ W.double() + B.double(), X @ W + B
    for key_a, key_w, key_b in (("mm::A", "mm::1", "shift::bias"), (a, w, b), (X, W, B),
                                (a.get_uid(), w.get_uid(), b.get_uid())):  # fmt: skip
        found = graph({key_a: X, key_w: W, key_b: B})
        as_is_compared(found["shift::OUT_0"], exact, same)
    for key in (out, 77, "shift::OUT_0"):
        given = torch.empty(3, 17, 11).half()
        found = graph({X: X, W: W, B: B, key: given})
        assert found["shift::OUT_0"] is given
        as_is_compared(given, exact, same)


def test_what_was_given_comes_back_and_is_not_changed():
    graph = product()
    given = {"mm::A": X, W: W, "shift::bias": B}
    found = graph(given)
    assert len(given) == 3
    assert found["mm::A"] is X
    assert set(found) == {*given, "act::OUT_0"}
    # Outputs are new at every call.
    assert graph(given)["act::OUT_0"] is not found["act::OUT_0"]


def test_missing_inputs_are_named():
    graph = product()
    with pytest.raises(
        cudnn.VariantPackError,
        match=re.escape("Non-virtual input tensors not found in variant pack: "
                        "['mm::B', 'shift::bias']"),
    ):  # fmt: skip
        graph({"mm::A": X})


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("mm::Z", "'mm::Z' is no tensor of the graph; there are mm::A, mm::B, shift::bias, act"),
        (99, "99 is no tensor of the graph"),
        ("mm::C", "'mm::C' is virtual"),
        (torch.zeros(3), "a Tensor that the block was not written with is no tensor"),
        (3.5, "3.5 is no tensor of the graph"),
    ],
)
def test_keys_that_name_nothing_are_refused(key, what):
    graph = product()
    with pytest.raises(cudnn.VariantPackError, match=re.escape(what)):
        graph({"mm::A": X, "mm::B": W, "shift::bias": B, key: X})


def test_tensors_of_other_graphs_are_refused():
    graph = product()
    other = product().inputs[0]
    with pytest.raises(cudnn.VariantPackError, match="'mm::A' is no tensor of the graph"):
        graph({other: X, "mm::B": W, "shift::bias": B})


def test_a_tensor_is_given_once():
    graph = product()
    with pytest.raises(cudnn.VariantPackError, match="mm::A is given twice, once as 'mm::0'"):
        graph({"mm::A": X, "mm::0": X.clone(), "mm::B": W, "shift::bias": B})
    graph({"mm::A": X, "mm::0": X, "mm::B": W, "shift::bias": B})


def test_tensors_that_are_not_as_those_of_the_block_are_refused():
    graph = product()
    with pytest.raises(cudnn.VariantPackError, match=r"mm::A .* float32\[3, 17, 23\]"):
        graph(X.float(), W, B)
    with pytest.raises(cudnn.VariantPackError, match="mm::B"):
        graph(X, W[:, :7], B)


# Calls by position ---------------------------------------------------------------------------


def test_without_names_inputs_come_as_they_came_up_and_outputs_as_their_operations():
    with cudnn.Graph() as graph:
        c = graph.matmul(X, W, name="mm").set_output(True)
        graph.relu(graph.bias(bias=B, input=c)).set_output(True)
    c, out = graph(X, W, B)
    as_is_compared(c, X.double() @ W.double(), X @ W)
    as_is_compared(out, *expected(X, W, B))


def test_names_say_the_order():
    with cudnn.Graph(
        inputs=["shift::bias", "mm::1", "mm::A"], outputs=["out", "mm::C"], name="ordered"
    ) as graph:
        c = graph.matmul(X, W, name="mm").set_output(True)
        graph.relu(graph.bias(c, B, name="shift")).set_output(True).set_name("out")
    out, c = graph(B, W, X)
    as_is_compared(c, X.double() @ W.double(), X @ W)
    as_is_compared(out, *expected(X, W, B))


def test_as_many_tensors_as_inputs_are_expected():
    graph = product()
    with pytest.raises(
        cudnn.VariantPackError, match="with 2 tensors; expected 3: mm::A, mm::B, shift::bias"
    ):
        graph(X, W)
    with pytest.raises(cudnn.VariantPackError, match="with 4 tensors; expected 3"):
        graph(X, W, B, B)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"inputs": ["mm::A", "mm::B", "mm::A"]}, "names 'mm::A', which is there already"),
        ({"inputs": ["mm::A", "mm::0", "mm::B"]}, "names 'mm::0', which is there already"),
        ({"inputs": ["mm::A", "mm::C", "mm::B"]}, "inputs= names 'mm::C', which is virtual"),
        ({"inputs": ["mm::A", "act::OUT_0"]}, "names 'act::OUT_0', which is no input"),
        ({"inputs": ["mm::A", "mm::B"]}, "every non-virtual input; ['shift::bias'] are not there"),
        ({"inputs": ["mm::A", "mm::Z"]}, "'mm::Z', which is no tensor; there are mm::A, mm::B"),
        ({"outputs": ["mm::C"]}, "outputs= names 'mm::C', which is virtual"),
        ({"outputs": ["mm::A"]}, "outputs= names 'mm::A', which is no output"),
        ({"outputs": []}, "every non-virtual output; ['act::OUT_0'] are not there"),
    ],
)
def test_names_that_do_not_fit_are_refused_where_the_block_ends(options, what):
    with pytest.raises(cudnn.GraphError, match=re.escape(what)):
        product(**options)


# Options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heuristics", "modes"),
    [
        (None, {"A", "FALLBACK"}),
        (cudnn.heur_mode.FALLBACK, {"FALLBACK"}),
        ([cudnn.heur_mode.FALLBACK], {"FALLBACK"}),
        (["A"], {"A"}),
    ],
)
def test_heuristics_say_where_plans_come_from(heuristics, modes):
    graph = product(heuristics=heuristics)
    assert {plan.mode.name for plan in graph.plans} == modes
    as_is_compared(graph(X, W, B), *expected(X, W, B))


@pytest.mark.parametrize("handle", ["auto", None, "of the cpu"])
def test_handles(handle):
    given = cudnn.create_handle("cpu") if handle == "of the cpu" else handle
    graph = product(handle=given)
    as_is_compared(graph(X, W, B), *expected(X, W, B))
    other = cudnn.create_handle("cpu")
    graph(X, W, B, handle=other)
    cudnn.destroy_handle(other)
    with pytest.raises(cudnn.GraphError, match="destroyed"):
        graph(X, W, B, handle=other)


def test_a_handle_is_one():
    with pytest.raises(cudnn.GraphError, match="handle is 'mine'; expected one of create_handle"):
        cudnn.Graph(handle="mine")


def two_kernels(**options):
    x, gamma, w = torch.randn(33, 64), torch.randn(64), torch.randn(64, 24)
    with cudnn.Graph(**options) as graph:
        norm, _ = graph.rmsnorm(x, gamma, epsilon=1e-4)
        graph.matmul(norm, w).set_output(True)
    return graph, (x, gamma, w)


def test_a_workspace_is_made_or_has_to_be_brought():
    graph, tensors = two_kernels()
    size = graph.get_workspace_size()
    assert size > 0
    out = graph(*tensors)
    own, _ = two_kernels(workspace_alloc=False)
    with pytest.raises(cudnn.GraphStateError, match=f"needs {size} bytes; call it with workspace="):
        own(*tensors)
    workspace = torch.empty(size, dtype=torch.uint8)
    assert torch.equal(own(*tensors, workspace=workspace), out)
    # Where none is needed, none is asked for.
    product(workspace_alloc=False)(X, W, B)


def test_it_is_tuned_with_the_forms_of_a_call():
    graph = product()
    for times in (graph.autotune(X, W, B), graph.autotune({X: X, W: W, B: B})):
        assert {name for name, _ in times} <= {plan.name for plan in graph.plans}
        assert [seconds for _, seconds in times] == sorted(seconds for _, seconds in times)
    assert graph.selected.name == times[0][0]
    as_is_compared(graph(X, W, B), *expected(X, W, B))


# What is passed through ----------------------------------------------------------------------


def test_plans_can_be_looked_at_and_chosen():
    graph = product()
    assert graph.get_plan_name() in str(graph.explain())
    assert graph.to_svg().lstrip().startswith("<svg")
    assert graph._repr_svg_() == graph.to_svg()
    assert graph.query_tensor_attributes_of_uid(graph.inputs[1].get_uid()) is graph.inputs[1]
    last = graph.get_execution_plan_count() - 1
    graph.select_plan(last)
    assert graph.get_plan_name() == graph.get_plan_name_at_index(last)
    as_is_compared(graph(X, W, B), *expected(X, W, B))


@pytest.mark.parametrize(
    "step", ["validate", "build_operation_graph", "create_execution_plans", "check_support",
             "build_plans", "build", "execute"]
)  # fmt: skip
def test_single_steps_are_the_wrappers(step):
    graph = product()
    with pytest.raises(AttributeError, match=f"Calling {step} via wrapper is not allowed"):
        getattr(graph, step)
    assert not hasattr(graph, step)
    assert step not in dir(graph)


def test_operations_keep_their_signatures_and_documentation():
    graph = cudnn.Graph()
    own = inspect.signature(cudnn.pygraph.sdpa).parameters
    assert list(inspect.signature(graph.sdpa).parameters) == list(own)[1:]
    assert graph.sdpa.__doc__ == cudnn.pygraph.sdpa.__doc__
    assert {"sdpa", "matmul", "explain", "autotune"} <= set(dir(graph))


def test_what_is_nowhere_is_an_attribute_error():
    graph = cudnn.Graph()
    for name in ("convolve", "_secret", "__array__"):
        assert not hasattr(graph, name)


def test_calls_from_several_threads_are_independent():
    from concurrent.futures import ThreadPoolExecutor

    graph = product()
    tensors = [tuple(torch.randn(t.shape).half() for t in (X, W, B)) for _ in range(16)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda one: graph(*one), tensors * 4))
    for one, out in zip(tensors * 4, found, strict=True):
        assert torch.equal(out, graph(*one))


@pytest.mark.gpu
def test_outputs_are_of_the_stream_that_they_are_written_on():
    x, w = (torch.randn(512, 512, device="cuda").half() for _ in range(2))
    with cudnn.Graph() as graph:
        graph.matmul(x, w).set_output(True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    handle = cudnn.create_handle()
    cudnn.set_stream(handle, stream)
    results = [graph(x, w, handle=handle), graph(x, w, stream=stream)]
    stream.synchronize()
    for out in results:
        as_is_compared(out, x.double() @ w.double(), x @ w)
