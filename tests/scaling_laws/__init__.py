"""Tests of the scaling laws."""
