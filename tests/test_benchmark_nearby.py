"""What is taken for sizes that were not tuned, by the rows of products that were."""

import math

import pytest
from support.benchmarks import script

nearby = script("nearby")


@pytest.fixture(scope="module")
def found():
    return [of for _, of in nearby.choices(nearby.load(nearby.ROWS))]


def mean(found, how):
    return math.exp(sum(math.log(of[how]) for of in found) / len(found))


def test_choices_for_sizes_that_were_not_tuned_are_near_the_best(found):
    assert len(found) > 100
    assert mean(found, "by what is nearby") < 1.02
    assert max(of["by what is nearby"] for of in found) < 1.4


def test_they_are_no_worse_than_those_of_a_model_that_was_fitted(found):
    assert mean(found, "by what is nearby") < 1.005 * mean(found, "by the model")


def test_they_are_better_than_what_was_fastest_nearby(found):
    timed = [of for of in found if of["the fastest nearby"] == of["the fastest nearby"]]
    assert mean(timed, "by what is nearby") < 0.96 * mean(timed, "the fastest nearby")


def test_the_script_says_how_far_choices_are(capsys):
    assert nearby.main([]) == 0
    assert "by what is nearby: 203 products, 0 of which without a time" in capsys.readouterr().out
