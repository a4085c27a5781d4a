"""Compiled CPU kernels: arguments of the ops in te_dist/ops, directions as tuples, and last the number of threads."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

def simd_levels() -> list[str]: ...
def simd_level() -> str: ...
def set_simd_level(name: str) -> None: ...

assemble: Callable[..., None]
assemble_chunks: Callable[..., None]
dequantize_float8: Callable[..., None]
dequantize_mxfp8: Callable[..., None]
dequantize_nvfp4: Callable[..., None]
evaluate: Callable[..., None]
hadamard: Callable[..., None]
multi_adam: Callable[..., None]
multi_adam_compact: Callable[..., None]
panel_sums: Callable[..., None]
quantize_float8_block: Callable[..., None]
quantize_float8_tensor: Callable[..., None]
quantize_mxfp8: Callable[..., None]
quantize_nvfp4: Callable[..., None]
rms_rstd: Callable[..., None]
route: Callable[..., None]
route_gradient: Callable[..., None]
row_sums: Callable[..., None]
tile_amax: Callable[..., None]
transpose: Callable[..., None]

_Grid = tuple[int, int, int]
_Patch = tuple[int, int, int, bool]

class cuda:  # a submodule
    """The launcher of CUDA kernels, by the driver's interface."""

    class Launchable:
        @property
        def label(self) -> str: ...
        def launch(self, device: int, stream: int, grid: _Grid, parameters: bytes) -> None: ...

    class Kernel(Launchable):
        def __init__(
            self,
            cubin: bytes,
            entry: str,
            label: str,
            *,
            cluster: int = 1,
            shared_bytes: int = 0,
            overlaps: bool = False,
        ) -> None: ...
        def load(self, device: int) -> None: ...
        def registers(self, device: int) -> int: ...
        def local_bytes(self, device: int) -> int: ...

    class Product(Launchable):
        PARAMETERS: ClassVar[str]
        def __init__(
            self,
            library: str,
            device: int,
            extents: Sequence[int],
            pitches: Sequence[int],
            types: Sequence[str],
            alignments: Sequence[int],
            *,
            fast: bool,
            accumulate: bool,
            workspace_bytes: int,
            turned: Sequence[bool] = ...,
        ) -> None: ...

    class Program:
        def __init__(
            self, launches: Sequence[tuple[cuda.Launchable, _Grid, bytes, Sequence[_Patch]]], places: Sequence[int]
        ) -> None: ...
        @property
        def position(self) -> int: ...
        def run(self, device: int, stream: int, tensors: list[Any]) -> None: ...

    @staticmethod
    def compute_capability(device: int) -> Sequence[int]: ...
    @staticmethod
    def apart(
        values: tuple[Any, ...], classes: tuple[type, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Any, ...]] | None: ...
    @staticmethod
    def signature(tensors: tuple[Tensor, ...], classes: tuple[type, ...], alignment: int) -> bytes | None: ...
    @staticmethod
    def is_row(tensors: tuple[Tensor, ...], classes: tuple[type, ...]) -> bool: ...
    @staticmethod
    def matrix_map(
        device: int,
        dtype: int,
        address: int,
        rows: int,
        cols: int,
        pitch: int,
        box_rows: int,
        box_cols: int,
        swizzle: int,
    ) -> bytes: ...
