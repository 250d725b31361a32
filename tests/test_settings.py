"""Settings of the environment are read as it is, however that is done."""

import os

import pytest

from kernel_api import _settings

NAME = "KERNEL_API_TESTS_OF_SETTINGS"


@pytest.mark.parametrize("read", [_settings.raw_setting, _settings._translated])
def test_what_the_environment_says_is_seen_at_once(monkeypatch, read):
    name = os.fsencode(NAME)
    monkeypatch.delenv(NAME, raising=False)
    assert read(name) is None
    for text in ("", "torch, cutedsl", "größer", "\udcff"):
        monkeypatch.setenv(NAME, text)
        assert os.fsdecode(read(name)) == text
    monkeypatch.delenv(NAME)
    assert read(name) is None
