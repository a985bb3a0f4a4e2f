"""bf16 and fp8 for Triton's interpreter, which keeps bf16 as 16-bit integers and computes on the bit patterns.

`install()` makes its arithmetic go through fp32 with one rounding to nearest even at the end. Known faults that this
mends (triton 3.6 to 3.7): bf16 products and sums are wrong without a message, fp32 to bf16 truncates, and fp32 to fp8
loses the carry of the mantissa.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

BF16 = tl.bfloat16
FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
Handle = interpreter.TensorHandle
Builder: Any = interpreter.InterpreterBuilder


def widen(bits: np.ndarray) -> np.ndarray:
    """bf16 bit patterns as fp32."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """fp32 as bf16 bit patterns, to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint16(0x7FC0), rounded)


def install() -> None:
    """Patch the interpreter of this process, once."""
    if getattr(Builder, "_computes_bf16", False):
        return
    Builder._computes_bf16 = True
    Builder.binary_op = _binary(Builder.binary_op)
    Builder.unary_op = _unary(Builder.unary_op)
    Builder.create_rsqrt = _rsqrt(Builder.create_rsqrt)
    Builder.create_fma = _fma(Builder.create_fma)
    Builder.create_dot = _dot(Builder.create_dot)
    Builder.cast_impl = _cast(Builder.cast_impl)
    Builder.create_fp_to_fp = _fp_to_fp(Builder.create_fp_to_fp, Builder.cast_impl)
    Builder.get_bf16 = lambda self, value: Handle(narrow(np.array([value], dtype=np.float32)), BF16)
    interpreter.ReduceOps.min_max = _reduction(interpreter.ReduceOps.min_max)
    interpreter.ReduceOps.sum = _reduction(interpreter.ReduceOps.sum)


def _is_bf16(handle: Any) -> bool:
    return handle.dtype.scalar == BF16


def _value(handle: Any) -> np.ndarray:
    return widen(handle.data) if _is_bf16(handle) else handle.data


def _binary(original: Callable) -> Callable:
    def binary_op(self: Any, left: Any, right: Any, op: Callable) -> Any:
        if not _is_bf16(left):
            return original(self, left, right, op)
        out = op(_value(left), _value(right))
        return Handle(out if out.dtype == bool else narrow(out), BF16)

    return binary_op


def _unary(original: Callable) -> Callable:
    def unary_op(self: Any, arg: Any, op: Callable) -> Any:
        return Handle(narrow(op(widen(arg.data))), BF16) if _is_bf16(arg) else original(self, arg, op)

    return unary_op


def _rsqrt(original: Callable) -> Callable:
    def create_rsqrt(self: Any, arg: Any) -> Any:
        return Handle(narrow(1 / np.sqrt(widen(arg.data))), BF16) if _is_bf16(arg) else original(self, arg)

    return create_rsqrt


def _fma(original: Callable) -> Callable:
    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if not _is_bf16(z):
            return original(self, x, y, z)
        return Handle(narrow(_value(x) * _value(y) + _value(z)), BF16)

    return create_fma


def _dot(original: Callable) -> Callable:
    def create_dot(self: Any, a: Any, b: Any, acc: Any, *rest: Any, **options: Any) -> Any:
        if not (_is_bf16(a) and _is_bf16(b)):
            return original(self, a, b, acc, *rest, **options)
        product = np.matmul(widen(a.data), widen(b.data)).astype(acc.data.dtype)
        return Handle(product + acc.data, acc.dtype.scalar)

    return create_dot


def _cast(original: Callable) -> Callable:
    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        before, after = source.dtype.scalar, target.scalar
        if before == BF16 and after != BF16:
            return Handle(widen(source.data).astype(interpreter._get_np_dtype(target)), after)
        if after == BF16 and before != BF16:
            return Handle(narrow(source.data.astype(np.float32)), after)
        return original(self, source, target)

    return cast_impl


def _fp_to_fp(original: Callable, cast: Callable) -> Callable:
    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        before, after = source.dtype.scalar, target.scalar
        if after in FP8:
            values = torch.from_numpy(np.ascontiguousarray(_value(source), dtype=np.float32))
            if FP8[after] == torch.float8_e4m3fn:
                values = values.clamp(-448, 448)  # the hardware conversion saturates
            return Handle(values.to(FP8[after]).view(torch.uint8).numpy(), after)
        if before in FP8:
            values = torch.from_numpy(np.ascontiguousarray(source.data)).view(FP8[before]).float().numpy()
            return Handle(narrow(values) if after == BF16 else values.astype(interpreter._get_np_dtype(target)), after)
        if BF16 in (before, after):
            return cast(self, source, target)
        return original(self, source, target, rounding)

    return create_fp_to_fp


def _reduction(original: Callable) -> Callable:
    def as_bf16(result: Any) -> Any:
        if result.dtype.scalar != tl.float32:
            return result
        data = narrow(result.handle.data)
        is_block = result.type.is_block() and data.shape
        return tl.core.tensor(Handle(data, BF16), tl.block_type(BF16, list(data.shape)) if is_block else BF16)

    def reduce(self: Any, given: Any, *args: Any, **options: Any) -> Any:
        first = given[0] if isinstance(given, tuple) else given
        if first.dtype.scalar != BF16:
            return original(self, given, *args, **options)
        data = widen(first.handle.data)
        wide = tl.core.tensor(Handle(data, tl.float32), tl.block_type(tl.float32, list(data.shape)))
        result = original(self, wide, *args, **options)
        if isinstance(result, tuple | list):
            return as_bf16(result[0]), result[1]
        return as_bf16(result)

    return reduce
