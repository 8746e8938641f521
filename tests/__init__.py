"""Tests of megalin. Importing torch makes no garbage, so collections are rare from here on."""

from tests import rare_collections  # noqa: F401
