"""Builds what pyproject.toml cannot say: the pybind11 extension for index building (csrc/cpu)."""

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

setup(
    ext_modules=[Pybind11Extension("megalin._index", ["csrc/cpu/index.cpp"], cxx_std=17, extra_compile_args=["-O3"])],
    cmdclass={"build_ext": build_ext},
)
