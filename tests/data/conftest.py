"""No test reads or writes the user's own cache or data folder."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEDNCV_CACHE", str(folder))
    monkeypatch.delenv("FEDNCV_DATA", raising=False)
    monkeypatch.delenv("FEDNCV_HUB", raising=False)
    return folder
