"""Runs the catalog of calls on a GPU, for NVIDIA's compute-sanitizer: see `make sanitize`.

python -m tests.gpu.sanitize --compile    compiles and loads every kernel that the calls launch, many at a time
python -m tests.gpu.sanitize              runs the calls, one after the other; --without-products those of other ops
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from tests.gpu.catalog import Call, catalog


def run(call: Call) -> None:
    """On the GPU; names the call where it fails."""
    try:
        call.on("cuda").run()
        torch.cuda.synchronize()
    except Exception as error:
        raise RuntimeError(call.name) from error


def is_product(call: Call) -> bool:
    """Whether it multiplies matrices."""
    return "gemm" in call.op.__name__ or "wgrad" in call.op.__name__


def main() -> None:
    """See the top of the file."""
    all_calls = [call for call in catalog() if "--without-products" not in sys.argv or not is_product(call)]
    with ThreadPoolExecutor(16 if "--compile" in sys.argv else 1) as pool:
        done = list(pool.map(run, all_calls))
    print(f"{len(done)} calls")


if __name__ == "__main__":
    main()
