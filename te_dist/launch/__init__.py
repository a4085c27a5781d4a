"""The training job: `torchrun ... -m te_dist.launch.train CONFIG.toml --section.key value`."""
