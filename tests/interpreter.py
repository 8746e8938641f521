"""Triton kernels on the CPU: enables the interpreter and fixes its bf16, which it holds as uint16.

Measured on triton 3.7.1: arithmetic and matmuls on bf16 values are garbage in the interpreter. Imported by
conftest.py before anything imports triton, and only on machines without a GPU.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _widened(handle):
    data = handle.data
    if handle.dtype.scalar == tl.bfloat16 and data.dtype == np.uint16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data


def _rounded(values):
    """fp32 -> bf16 bits, to nearest even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), nearest)


def _narrowed(data):
    return interpreter.TensorHandle(_rounded(data) if data.dtype.kind == "f" else data, tl.bfloat16)


def fix_bf16() -> None:
    """Replaces the interpreter's binary, unary and matrix operations on bf16, and its casts, which truncate.

    Also accepts the input precision "bf16x6" of `tl.dot`, unknown to the interpreter, which computes such a matmul in
    the operands' dtype.
    """
    builder = interpreter.InterpreterBuilder
    binary, unary, dot, cast = builder.binary_op, builder.unary_op, builder.create_dot, builder.cast_impl

    def binary_op(self, left, right, op):
        if left.dtype.scalar != tl.bfloat16:
            return binary(self, left, right, op)
        return _narrowed(op(_widened(left), _widened(right)))

    def unary_op(self, operand, op):
        return unary(self, operand, op) if operand.dtype.scalar != tl.bfloat16 else _narrowed(op(_widened(operand)))

    def create_dot(self, left, right, *arguments, **options):
        left, right = (
            interpreter.TensorHandle(_widened(x), tl.float32) if x.dtype.scalar == tl.bfloat16 else x
            for x in (left, right)
        )
        return dot(self, left, right, *arguments, **options)

    def cast_impl(self, source, kind):
        if kind.scalar == tl.bfloat16 and source.dtype.scalar == tl.float32:
            return _narrowed(source.data)
        if kind.scalar == tl.float32 and source.dtype.scalar == tl.bfloat16:
            return interpreter.TensorHandle(_widened(source), tl.float32)
        return cast(self, source, kind)

    builder.binary_op, builder.unary_op, builder.create_dot = binary_op, unary_op, create_dot
    builder.cast_impl = cast_impl
    options = interpreter.interpreter_builder.options
    allowed = (*options.allowed_dot_input_precisions, "bf16x6")
    interpreter.interpreter_builder.options = dataclasses.replace(options, allowed_dot_input_precisions=allowed)


def fuse() -> None:
    """Rounds `tl.fma` in fp32 once, as a GPU does; the interpreter rounds the product too."""

    def create_fma(self, x, y, z):
        kind = z.data.dtype
        wide = np.float64 if kind == np.float32 else kind
        total = x.data.astype(wide) * y.data.astype(wide) + z.data.astype(wide)
        return interpreter.TensorHandle(total.astype(kind), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = create_fma


def speed_up() -> None:
    """Removes two thirds or more of the interpreter's run time, most of which goes to types and not to numbers.

    Disables the search for int32 overflow, impossible at the sizes of the tests, and caches what every call of a
    function of tl computes again: its built-in members, the numpy dtype of a type, types of results, and constants.
    """
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    name_of_scalar = functools.cache(interpreter._get_np_dtype)

    def name_of(kind):
        kind = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return np.dtype(np.uint64) if isinstance(kind, tl.pointer_type) else name_of_scalar(kind)

    interpreter._get_np_dtype = name_of

    @functools.cache
    def builtins_of(package):
        return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]

    @functools.cache
    def interpreted(member):
        function = getattr(member, "__wrapped__", member)  # skips the check that `_semantic` is given

        def call(*args, _semantic=None, **named):
            return function(*args, _semantic=interpreter.interpreter_semantic, **named)

        return call

    def patch_builtin(package, builder, scope):
        for name in builtins_of(package):
            if tl.core.is_builtin(member := getattr(package, name)):
                scope.set_attr(package, name, interpreted(member))

    # Filled before the first kernel runs: a run replaces the members of tl.
    for package in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        builtins_of(package)
    interpreter._patch_builtin = patch_builtin
    _patch_once_a_kernel()
    _cache_types()
    _cache_operands()
    _shortcut_operators()
    interpreter.ScanOps.generic_scan = _scan_by_doubling


def _patch_once_a_kernel() -> None:
    """Skips the patches of tl for a function that a kernel calls, where those of the kernel cover it."""
    patch = interpreter._patch_lang
    covered = set()
    running = interpreter._LangPatchScope()

    @functools.cache
    def modules_of(function):
        modules = filter(inspect.ismodule, function.__globals__.values())
        return frozenset(x.__name__ for x in modules if x in (tl, tl.core))

    def patch_lang(function):
        nonlocal running
        nested = bool(running._changes)  # empty again after the kernel
        if nested and modules_of(function) <= covered:
            return interpreter._LangPatchScope()
        scope = patch(function)
        if not nested:
            running = scope
            covered.clear()
        covered.update(modules_of(function))
        return scope

    interpreter._patch_lang = patch_lang


def _cache_types() -> None:
    """Computes types of blocks, shapes of tensors and types of results once for equal arguments."""
    core, semantic = tl.core, interpreter.TritonSemantic
    init_block, equal, broadcast = core.block_type.__init__, core.dtype.__eq__, semantic.broadcast_impl_value
    promote = semantic.computation_type_impl
    blocks = {}

    def block_init(self, element_ty, shape):
        key = id(element_ty), *(x.value if isinstance(x, tl.constexpr) else x for x in shape)
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()  # holds the element's type, whose id stays taken
        vars(self).update(blocks[key])

    @functools.cache
    def sizes(shape):
        return core.tuple([tl.constexpr(x) for x in shape]), tl.constexpr(math.prod(shape))

    def tensor_init(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = sizes((*type.shape.values,) if type.is_block() else ())

    def broadcast_impl_value(self, left, right):
        blocks = left.type.is_block(), right.type.is_block()
        if not any(blocks) or (all(blocks) and left.type.shape.values == right.type.shape.values):
            return left, right
        return broadcast(self, left, right)

    core.block_type.__init__, core.tensor.__init__ = block_init, tensor_init
    core.block_type.to_ir = lambda self, builder: self  # the interpreter's would be an equal one
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    semantic.broadcast_impl_value = broadcast_impl_value
    semantic.computation_type_impl = functools.cache(promote)


def _cache_operands() -> None:
    """Makes tensors of equal constants once, and leaves operands that need no conversion at once."""
    core, semantic = tl.core, interpreter.TritonSemantic
    unwrap, constant, cast = core._unwrap_if_constexpr, semantic.scalar_constant, semantic.cast
    plain = {core.tensor, core.dtype, int, float, bool, str, type(None)}
    constants = {}

    def unwrap_if_constexpr(x):
        return x if type(x) in plain else x.value if type(x) is core.constexpr else unwrap(x)

    def scalar_constant(self, value, dtype):
        key = type(value), repr(value), id(dtype)  # 0.0 == -0.0
        if key not in constants:
            constants[key] = constant(self, value, dtype), dtype  # holds the type, whose id stays taken
        return constants[key][0]

    def cast_if_needed(self, x, kind, *rounding, **named):
        return x if x.dtype is kind.scalar else cast(self, x, kind, *rounding, **named)

    core._unwrap_if_constexpr, semantic.scalar_constant = unwrap_if_constexpr, scalar_constant
    semantic.cast = cast_if_needed


PLAIN = {"fp16", "fp32", "fp64", "int32", "int64"}
"""Names of the dtypes whose arithmetic is numpy's."""
OFFSETS = {"int32", "int64"}
"""Names of the dtypes of offsets that the interpreter converts to those of addresses."""
ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
COMPARISONS = {
    "less_than": np.less,
    "less_equal": np.less_equal,
    "greater_than": np.greater,
    "greater_equal": np.greater_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
}


def _made(data, dtype, kind):
    """A tensor of a type."""
    result, value = object.__new__(tl.core.tensor), object.__new__(interpreter.TensorHandle)
    value.data, value.dtype, value.attr = data, dtype, {}
    tl.core.tensor.__init__(result, value, kind)
    return result


def _constant(semantic, x, dtype):
    """The number as a tensor of a dtype that it does not promote; None if there is none."""
    if dtype.name not in PLAIN or (type(x) is not int and (type(x) is not float or dtype.name[0] == "i")):
        return None
    return semantic.scalar_constant(x, dtype) if dtype.name[0] == "f" or -(2**31) <= x < 2**31 else None


def _operands(semantic, left, right):
    """Both as tensors of one dtype; None if the interpreter is needed."""
    tensor = tl.core.tensor
    if type(left) is not tensor:
        left = _constant(semantic, left, right.dtype) if type(right) is tensor else None
    elif type(right) is not tensor:
        right = _constant(semantic, right, left.dtype)
    if left is None or right is None or left.dtype.name != right.dtype.name or left.dtype.name not in PLAIN:
        return None
    return left, right


def _kind_of(left, right, data):
    """The type of a result from the operands' shapes; None if their numbers of dimensions differ."""
    if not right.type.is_block() or (left.type.is_block() and data.shape == left.handle.data.shape):
        return left.type
    if not left.type.is_block():
        return right.type.with_element_ty(left.dtype)
    return tl.core.block_type(left.dtype, list(data.shape)) if len(left.shape) == len(right.shape) else None


def _shortcut_operators() -> None:
    """Computes arithmetic and comparisons of operands of one dtype of PLAIN, and of those with a number, by one call of
    numpy, which broadcasts them as the interpreter does: their types need no promotion, and no operand is copied."""
    core, semantic = tl.core, interpreter.TritonSemantic

    def arithmetic(name, function):
        original = getattr(semantic, name)

        def operator(self, left, right, sanitize_overflow):
            if (pair := _operands(self, left, right)) is not None:
                data = function(pair[0].handle.data, pair[1].handle.data)
                if (kind := _kind_of(*pair, data)) is not None:
                    return _made(data, pair[0].handle.dtype.scalar, kind)
            return original(self, left, right, sanitize_overflow)

        return operator

    def comparison(name, function):
        original = getattr(semantic, name)

        def operator(self, left, right):
            if (pair := _operands(self, left, right)) is not None:
                data = function(pair[0].handle.data, pair[1].handle.data)
                if (kind := _kind_of(*pair, data)) is not None:
                    kind = kind.with_element_ty(core.int1) if kind.is_block() else core.int1
                    return _made(data, pair[0].handle.dtype.scalar, kind)
            return original(self, left, right)

        return operator

    def advanced(add):
        """`add` with a shortcut for a pointer and signed offsets."""

        def operator(self, left, right, sanitize_overflow):
            if (
                type(left) is core.tensor
                and left.dtype.is_ptr()
                and type(right) is core.tensor
                and right.dtype.name in OFFSETS
            ):
                value = self.builder.create_addptr(left.handle, right.handle)
                if (kind := _kind_of(left, right, value.data)) is not None:
                    return core.tensor(value, kind)
            return add(self, left, right, sanitize_overflow)

        return operator

    for name, function in ARITHMETIC.items():
        setattr(semantic, name, arithmetic(name, function))
    for name, function in COMPARISONS.items():
        setattr(semantic, name, comparison(name, function))
    semantic.add = advanced(semantic.add)


def _scan_by_doubling(self, inputs):
    """`tl.associative_scan` in a logarithmic number of calls of the operator, each for all elements, as on a GPU; the
    interpreter calls it once for each element."""
    results = [x.handle.data.copy() for x in inputs]
    size, distance = results[0].shape[self.axis], 1
    while distance < size:
        operands = [
            self.to_tensor(data, x.dtype)
            for arrays in ([np.roll(data, distance, self.axis) for data in results], results)
            for data, x in zip(arrays, inputs, strict=True)
        ]
        found = self.combine_fn.fn(*operands)
        place = (slice(None),) * self.axis + (slice(distance, None),)
        for result, value in zip(results, found if isinstance(found, tuple) else (found,), strict=True):
            result[place] = value.handle.data[place]
        distance *= 2
    return [self.to_tensor(data, x.dtype) for data, x in zip(results, inputs, strict=True)]


fix_bf16()
fuse()
speed_up()


def _extent(x):
    """The address of a tensor's first element, and the address after its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


@contextlib.contextmanager
def checked_addresses():
    """Context manager in which a kernel that loads or stores outside of its own tensors raises IndexError."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, convert = builder.create_masked_load, builder.create_masked_store, executor._init_args_hst
    extents = {}

    def launched(self, args, named):
        args, named = convert(self, args, named)
        tensors = [x for x in (*args, *named.values()) if hasattr(x, "data_ptr")]
        extents["first"], extents["end"] = np.array([_extent(x) for x in tensors], dtype=np.uint64).T
        extents["kernel"] = self.fn.__name__
        return args, named

    def check(pointers, mask):
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses = pointers.data[np.broadcast_to(mask.data != 0, pointers.data.shape)].astype(np.uint64)[:, None]
        inside = (addresses >= extents["first"]) & (addresses + np.uint64(size) <= extents["end"])
        if not inside.any(axis=1).all():
            raise IndexError(f"{extents['kernel']} leaves its tensors")

    def checked_load(self, pointers, mask, *rest):
        check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self, pointers, value, mask, *rest):
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    executor._init_args_hst = launched
    try:
        yield
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
        executor._init_args_hst = convert
