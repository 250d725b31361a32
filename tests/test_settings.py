"""Settings of the environment are read as it is, wherever it has them."""

import os

import pytest

from kernel_api import offsets, provider
from kernel_api._settings import raw_setting, setting

NAME = "KERNEL_API_TESTS_OF_SETTINGS"


@pytest.mark.parametrize("is_known", [True, False])
def test_what_the_environment_says_is_seen_at_once(monkeypatch, is_known):
    if not is_known:
        monkeypatch.setattr("kernel_api._settings._STORED", None)
    name = os.fsencode(NAME)
    monkeypatch.delenv(NAME, raising=False)
    assert setting(name) is None
    for text in ("", "torch, cutedsl", "größer", "\udcff"):
        monkeypatch.setenv(NAME, text)
        assert os.fsdecode(setting(name)) == text and setting(name) == raw_setting(name)
    monkeypatch.delenv(NAME)
    assert setting(name) is None


def test_an_environment_in_place_of_it_is_read(monkeypatch):
    assert not offsets.check_is_asked()
    settings = {offsets.VARIABLE: "1", "KERNEL_API_PROVIDERS": "torch"}
    monkeypatch.setattr(os, "environ", settings)
    assert offsets.check_is_asked()
    assert [one.name for one in provider.providers()] == ["torch"]
