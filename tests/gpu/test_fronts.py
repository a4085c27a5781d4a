"""SwiGLU in front of the second map of a LayerNormMLP on the GPU, in passes that are recorded and in those after."""

from __future__ import annotations

import pytest

from tests.nn.recipes import CASES
from tests.nn.test_fronts import check, make, results, sample, written

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("delayed")])
def test_bits_of_the_written_activation(name: str) -> None:
    made_by = CASES[name].recipe
    module, composed = (make(256, 384).bfloat16().cuda() for _ in range(2))
    for seed, shape in enumerate([(48, 256), (48, 256), (2, 5, 256), (48, 256)]):
        x = sample(*shape, seed=seed).bfloat16().cuda()
        want = results(lambda x: written(composed, x), composed, made_by, x)
        check([t.cpu() for t in results(module, module, made_by, x)], [t.cpu() for t in want])
