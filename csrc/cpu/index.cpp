// Index building for token shards (pybind11 module megalin._index).
#include <pybind11/pybind11.h>

PYBIND11_MODULE(_index, module) { module.doc() = "Index building for token shards."; }
