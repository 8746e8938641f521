"""Names of the reference pages that the documentation's site makes from docstrings."""

from __future__ import annotations

import pydoc

import pytest

import megalin
from megalin import datasets
from megalin.config import Config
from megalin.train.config import RunConfig
from tools.docs_site import REFERENCES, reference_names


@pytest.mark.parametrize("page", REFERENCES)
def test_names_of_a_page_exist_once(page):
    names = reference_names(page)
    assert len(set(names)) == len(names) > 10
    assert [name for name in names if pydoc.locate(name) is None] == []


def test_pages_have_the_api_the_tables_of_a_config_and_the_mixers():
    api, configs, layers = map(reference_names, REFERENCES)
    assert {name.removeprefix("megalin.") for name in api} == {
        *(set(megalin.__all__) - {"datasets", "ops"}),
        *(f"datasets.{name}" for name in datasets.__all__),
    }
    tables = [field.annotation for field in RunConfig.model_fields.values()]
    owned = {f"{table.__module__}.{table.__name__}" for table in tables if isinstance(table, type)}
    assert {name for name in owned if issubclass(pydoc.locate(name), Config)} <= set(configs)
    assert configs[0] == "megalin.train.config.RunConfig"
    assert {"megalin.layers.mixers.hgrn2", "megalin.layers.norms"} <= set(layers)
