"""The declarative design space: kernel_api.space."""

from dataclasses import dataclass

import pytest
from support.kernels import CudaGemm

import kernel_api as ka
from kernel_api.dtypes import dtype
from kernel_api.errors import PluginWarning, RegistrationError
from kernel_api.metadata import DesignMetadata, GemmOperandsMetadata
from kernel_api.provider import providers
from kernel_api.space import Miss, Operands, Rule, Space, rule

MODES = ka.GemmArguments.modes


@dataclass(frozen=True)
class Design(DesignMetadata):
    tile: int = 0
    stages: int = 0
    schedule: str = "plain"


# Space -----------------------------------------------------------------------------------


def test_axes_are_multiplied():
    space = Space(tile=(16, 32), stages=(2, 3, 4))
    assert [(d.tile, d.stages) for d in space.designs(Design)] == [
        (16, 2), (16, 3), (16, 4), (32, 2), (32, 3), (32, 4),
    ]  # fmt: skip


def test_points_are_multiplied_with_axes():
    space = Space({"tile": 16, "stages": 4}, {"tile": 32, "stages": 2}, schedule=("a", "b"))
    assert list(space.designs(Design)) == [
        Design(16, 4, "a"), Design(16, 4, "b"), Design(32, 2, "a"), Design(32, 2, "b"),
    ]  # fmt: skip


def test_an_empty_space_has_the_default_design():
    assert list(Space().designs(Design)) == [Design()]


def test_an_axis_without_values_is_refused():
    with pytest.raises(RegistrationError, match="the axis tile of a space has no values, so there"):
        Space(tile=())


@pytest.mark.parametrize("values", [5, "abc", {"a": 1}, None, iter(())], ids=type)
def test_an_axis_that_is_no_tuple_is_refused_with_what_to_write(values):
    with pytest.raises(RegistrationError) as caught:
        Space(tile=values)
    text = f"the axis tile of a space is {values!r}; expected a tuple of its values, as in tile="
    assert str(caught.value).startswith(text)


def test_a_point_that_is_neither_a_design_nor_fields_is_refused():
    with pytest.raises(RegistrationError, match=r"the point \(32, 32, 1\); expected designs, or"):
        Space((32, 32, 1))


def test_a_field_of_a_point_that_is_an_axis_too_is_refused():
    with pytest.raises(RegistrationError, match=r"tile is in the point .*, and is an axis"):
        Space({"tile": 16}, tile=(16, 32))


def test_a_sample_has_every_group_and_every_value_and_no_more():
    space = Space({"tile": 16}, {"tile": 32}, stages=(2, 3, 4), schedule=("a", "b"))
    assert [tuple(one.values()) for one in space.sample()] == [
        (16, 2, "a"), (32, 2, "a"), (16, 3, "a"), (16, 4, "a"), (16, 2, "b"),
    ]  # fmt: skip
    assert list(Space(Design(16, 2)).sample()) == []


# Operands --------------------------------------------------------------------------------


def variants(**row):
    return list(Operands(**row).variants(GemmOperandsMetadata, MODES))


def types_of(found):
    return [tuple(t.dtype and t.dtype.short for t in v.tensors.values()) for v in found]


def test_alternatives_are_multiplied_and_like_repeats_a_type():
    found = variants(
        A="f16 | bf16", B="like A", out="f16 | f32", accumulator="f32", majors="strided"
    )
    assert types_of(found) == [
        ("f16", "f16", "f16"),
        ("f16", "f16", "f32"),
        ("bf16", "bf16", "f16"),
        ("bf16", "bf16", "f32"),
    ]
    assert {v.accumulator_type for v in found} == {dtype("f32")}


def test_any_type_is_none():
    found = variants(A="any", B="any", out="any", accumulator="any", majors="strided")
    assert types_of(found) == [(None, None, None)]
    assert found[0].accumulator_type is None


def units_of(found):
    return ["".join("t" if t.unit_mode == -1 else "n" for t in v.tensors.values()) for v in found]


def test_any_majors_are_one_variant_for_each_combination():
    found = variants(A="f16", B="f16", out="f16", accumulator="f32")
    assert units_of(found) == ["ttt", "ttn", "tnt", "tnn", "ntt", "ntn", "nnt", "nnn"]


def test_majors_can_be_fixed_by_the_letter_of_the_mode():
    found = variants(A="e4m3", B="e4m3", out="f16", accumulator="f32", majors="A:k B:k")
    assert units_of(found) == ["tnt", "tnn"]


def test_strided_is_one_variant_without_a_unit_mode():
    (found,) = variants(A="f16", B="f16", out="f16", accumulator="f32", majors="strided")
    assert [t.stride for t in found.tensors.values()] == [None, None, None]


def test_alignments_are_bytes_and_become_elements_aligned_ones_first():
    found = variants(
        A="f16", B="f16", out="f32", accumulator="f32", majors="A:k B:k out:n",
        alignments=({"A": 16, "B": 16, "out": 16}, {"A": 4}, {}),
    )  # fmt: skip
    assert [tuple(t.divisibility for t in v.tensors.values()) for v in found] == [
        (8, 8, 4),
        (2, 1, 1),
        (1, 1, 1),
    ]


def test_the_type_of_products_is_kept_beside_that_of_the_operands():
    (found,) = variants(
        A="f32", B="f32", out="f32", accumulator="f32", multiplication="tf32", majors="strided"
    )
    assert found.multiplication_type is dtype("tf32")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"accumulator": "f65"}, "accumulator is 'f65': 'f65' names no element type; known are"),
        ({"multiplication": "f65"}, "multiplication is 'f65': 'f65' names no element type"),
        ({"A": "f16 | f65"}, "A is 'f65': 'f65' names no element type; known are float64"),
        ({"A": 16}, "A is 16; expected text such as 'f16 | bf16', 'like A' or 'any'"),
        ({"B": "like C"}, "B is 'like C'; expected like one of A, out, or its types"),
        ({"majors": "zz"}, "majors is 'zz'; expected any, strided, or modes of operands such as"),
        ({"majors": "A:mk"}, "majors is 'A:mk'; expected any, strided, or modes of operands such"),
        ({"majors": 3}, "majors is 3; expected any, strided, or modes of operands such as"),
        ({"majors": "C:k"}, "majors name C; expected one of A, B, out"),
        ({"scales": {"C": "any"}}, "scales name C; expected one of A, B, out"),
        ({"scales": "per_row"}, "scales is 'per_row'; expected a mapping such as {'A': 'per_ten"),
        ({"scales": {"A": "rows"}}, "scales of A are 'rows'; expected one of any, per_tensor, per"),
        ({"alignments": {"A": 16}}, "alignments is {'A': 16}; expected a tuple such as ({'A': 16}"),
        ({"alignments": ()}, "alignments is (); expected a tuple such as ({'A': 16}"),
        ({"alignments": (16,)}, "alignments have 16; expected mappings such as {'A': 16, 'B': 16}"),
        ({"alignments": ({"C": 16},)}, "alignments name C; expected one of A, B, out"),
        ({"alignments": ({"A": "16"},)}, "the alignment of A is '16'; expected bytes, a power"),
        ({"alignments": ({"A": 24},)}, "the alignment of A is 24; expected bytes, a power"),
        ({"alignments": ({"A": 256},)}, "the alignment of A is 256; expected bytes, a power"),
        ({"alignments": ({"A": 0},)}, "the alignment of A is 0; expected bytes, a power"),
    ],
)
def test_operands_that_name_what_there_is_not_are_refused_where_they_stand(given, message):
    row = {"A": "f16", "B": "like A", "out": "f16", "accumulator": "f32"}
    with pytest.raises(RegistrationError) as caught:
        Operands(**{**row, **given})
    assert message in str(caught.value)


def test_variants_that_cannot_be_made_fail_each_time_in_the_same_way():
    def broken(**tensors):
        raise ValueError("no such operands")

    row = Operands(A="f16", B="f16", out="f16", accumulator="f32")
    (group,) = row.groups(broken, MODES)
    for _ in range(2):
        with pytest.raises(ValueError, match="no such operands"):
            assert group.first


def test_what_is_interrupted_is_made_when_it_is_asked_for_again():
    def interrupted(**tensors):
        if len(made) == 2 and not made.count(None):
            made.append(None)
            raise KeyboardInterrupt
        made.append(GemmOperandsMetadata(**tensors))
        return made[-1]

    made = []
    row = Operands(A="f16", B="f16", out="f16", accumulator="f32")
    (group,) = row.groups(interrupted, MODES)
    with pytest.raises(KeyboardInterrupt):
        list(group)
    assert list(group) == list(row.variants(GemmOperandsMetadata, MODES))


# Rules -----------------------------------------------------------------------------------


def test_a_rule_that_agrees_is_a_success():
    assert rule("tiles are even")(lambda design: design % 2 == 0).check(design=4)


def test_a_rule_that_refuses_gives_its_sentence():
    status = rule("tiles are even")(lambda design: design % 2 == 0).check(design=3)
    assert not status
    assert status.error == "tiles are even"
    assert status.rule == "tiles are even"


def test_a_miss_adds_the_value_it_saw_and_the_nearest_one_it_takes():
    even = rule("tiles are even")(lambda design: Miss(f"this is {design}", "would match with 4"))
    status = even.check(design=3)
    assert status.error == "tiles are even; this is 3"
    assert status.rule == "tiles are even"
    assert status.nearest == "would match with 4"
    assert str(status) == "tiles are even; this is 3 (would match with 4)"


def test_a_miss_is_falsy_even_without_a_nearest_value():
    assert not Miss("too odd")


def test_a_rule_gets_only_the_values_it_names():
    both = rule("sums agree")(lambda args, design: args + design == 5)
    assert both.check(design=2, operands=None, args=3)
    assert both.needs_args
    assert not rule("constant")(lambda: True).needs_args


def test_a_rule_with_an_unknown_parameter_is_refused_by_its_sentence_and_the_parameter():
    with pytest.raises(RegistrationError, match=r"'tiles are even' takes \['shape'\]"):
        rule("tiles are even")(lambda shape: True)


@pytest.mark.parametrize("text", [lambda design: True, None, "", " ", 3], ids=type)
def test_a_rule_without_a_text_is_refused(text):
    with pytest.raises(RegistrationError, match=r'expected the sentence .* @rule\("tiles are even'):
        rule(text)
    with pytest.raises(RegistrationError, match="for its text; expected the sentence"):
        Rule(text, lambda: True)


def test_a_rule_without_brackets_is_refused_where_it_stands():
    with pytest.raises(RegistrationError, match=r"a rule has .*_tiles_are_even for its text"):

        class Family(ka.Kernel):
            @rule
            def _tiles_are_even(design):
                return False


def test_a_rule_over_what_cannot_be_called_is_refused():
    with pytest.raises(RegistrationError, match="rule 'tiles are even' is over 3; expected a func"):
        rule("tiles are even")(3)


@pytest.mark.parametrize("by", ["N", ["N"], 3])
def test_what_a_rule_is_by_is_a_function_of_the_arguments(by):
    with pytest.raises(RegistrationError, match=r"is by .*; expected a function of the arguments"):
        rule("rows have room", by=by)(lambda args: True)


@pytest.mark.parametrize("verdict", ["the tile is odd", "", 1, 0, (), [1], object, None], ids=str)
def test_a_verdict_that_is_none_is_refused_by_the_rule(verdict):
    one = rule("tiles are even")(lambda: verdict)
    with pytest.raises(RegistrationError) as caught:
        one.check()
    assert str(caught.value).startswith(f"rule 'tiles are even' returned {verdict!r}; expected")
    assert str(caught.value).endswith("; is a return missing?") == (verdict is None)


def test_a_rule_may_return_a_bool_of_numpy():
    numpy = pytest.importorskip("numpy")
    assert rule("agrees")(lambda: numpy.bool_(True)).check()
    assert not rule("refuses")(lambda: numpy.bool_(False)).check()


def test_a_rule_with_a_wrong_verdict_leaves_the_family_out_and_the_others_answer(registry):
    from support.data import gemm_arguments
    from support.kernels import CpuGemm

    class Chatty(CpuGemm):
        @rule("M is even")
        def _(args):
            return "M is odd" if args.M % 2 else True

    args = gemm_arguments(3, 4, 4)
    provider = registry.register(Chatty, CpuGemm)
    with pytest.warns(PluginWarning, match="Chatty.*rule 'M is even' returned 'M is odd'"):
        found = ka.get_kernels(args, providers=[provider])
    assert [type(kernel) for kernel in found] == [CpuGemm]


def test_repr_of_a_rule_is_its_sentence():
    assert repr(Rule("tiles are even", lambda: True)) == "<rule: tiles are even>"


def test_no_rule_of_the_registered_families_is_written_twice():
    families = [family for one in providers() for family in one.families()]
    rules = dict.fromkeys(one for family in families for one in family.rules)
    places = {}
    for one in rules:
        # Rules that one function makes are of one code, and what they close over tells them apart.
        code = one._predicate.__code__
        places.setdefault((one.text, code.co_code, code.co_names), set()).add(code)
    assert len(rules) > 100
    assert {look[0]: codes for look, codes in places.items() if len(codes) > 1} == {}


# A declared family -----------------------------------------------------------------------


def test_a_family_has_the_product_of_its_operands_and_designs_that_its_rules_allow(registry):
    found = ka.get_kernels(providers=[registry.register(CudaGemm)])
    tiles = [(k.metadata.operands.A.divisibility, k.metadata.design.tile_shape[0]) for k in found]
    out_types, majors = 2, 8
    assert tiles.count((8, 128)) == tiles.count((8, 64)) == out_types * majors
    assert tiles.count((1, 64)) == out_types * majors
    assert tiles.count((1, 128)) == 0
    assert len(found) == 3 * out_types * majors


def test_rules_may_all_have_the_same_name_and_are_inherited_base_first():
    class Base(ka.Kernel):
        @rule("first")
        def _(design):
            return True

        @rule("second")
        def _(design):
            return True

    class Derived(Base):
        @rule("third")
        def _(design):
            return True

    assert [r.text for r in Base.rules] == ["first", "second"]
    assert [r.text for r in Derived.rules] == ["first", "second", "third"]


def test_a_rule_on_arguments_decides_queries_and_not_the_enumeration(registry):
    from support.data import gemm_arguments

    class Small(CudaGemm):
        @rule("M is at most 64")
        def _(args):
            return args.M <= 64 or Miss(f"M is {args.M}")

    provider = registry.register(Small)
    everything = ka.get_kernels(providers=[provider])
    types = ("bf16", "bf16", "f32")
    small = gemm_arguments(64, 64, 64, types=types, device="meta")
    large = gemm_arguments(65, 64, 64, types=types, device="meta")
    assert len(everything) == 48
    assert ka.get_kernels(small, providers=[provider])
    assert ka.get_kernels(large, providers=[provider]) == []
    (kernel, *_) = ka.get_kernels(small, providers=[provider])
    assert kernel.supports(large).error == "M is at most 64; M is 65"
