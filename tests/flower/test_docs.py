"""The code in docs/federation.md runs, and its tables say what the code does."""

import json
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")

from fedncv.cli.federation import ACTIONS
from fedncv.flower.consent import ClientRules
from fedncv.flower.rules import Rules
from fedncv.flower.samples import read

TEXT = (Path(__file__).parents[2] / "docs" / "federation.md").read_text()


def test_own_data_are_written_as_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(code, {})
    samples = read(tmp_path / "client" / "data")
    assert samples.dataset.input_shape == (1, 28, 28)
    assert np.array_equal(samples.train, np.arange(200))


def test_every_rule_is_explained_with_its_default():
    for field in fields(Rules):
        value = getattr(Rules(), field.name)
        said = "none" if value in ({}, []) else f"{value:,g}" if isinstance(value, float) else value
        said = f"{said:,}" if isinstance(said, int) else said
        assert f"| `{field.name}` | {said} |" in TEXT


def test_every_rule_of_a_client_is_explained_with_its_default():
    for field in fields(ClientRules):
        value = getattr(ClientRules(), field.name)
        said = f"`{json.dumps(value)}`" if isinstance(value, list) else str(value).lower()
        assert f"| `{field.name}` | {said} |" in TEXT


def test_every_action_that_is_named_exists():
    named = set(re.findall(r"^fedncv federation (\w+)", TEXT, re.MULTILINE))
    assert named == set(ACTIONS)
