"""Compiled CPU kernels: arguments of the ops in te_dist/ops, directions as tuples, and last the number of threads."""

from collections.abc import Callable

def simd_levels() -> list[str]: ...
def simd_level() -> str: ...
def set_simd_level(name: str) -> None: ...

assemble: Callable[..., None]
dequantize_float8: Callable[..., None]
dequantize_mxfp8: Callable[..., None]
dequantize_nvfp4: Callable[..., None]
hadamard: Callable[..., None]
quantize_float8_block: Callable[..., None]
quantize_float8_tensor: Callable[..., None]
quantize_mxfp8: Callable[..., None]
quantize_nvfp4: Callable[..., None]
tile_amax: Callable[..., None]
transpose: Callable[..., None]
