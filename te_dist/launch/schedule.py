"""The learning rate of each step."""

from __future__ import annotations

import math

from te_dist.launch.config import OptimizerConfig


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Linear warm-up to the peak, then half a cosine down to `final_fraction` of it at the last step.

    Args:
        step: from 0; the first step of a warm-up already moves the weights.
        steps: of the whole run.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    remaining = max(1, steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / remaining)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * cosine)
