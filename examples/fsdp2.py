"""A model with FP8 block weights under FSDP2: `torchrun --nproc-per-node 2 examples/fsdp2.py`, on CPUs as it is.

On GPUs: device = "cuda", backend "nccl", and torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import te_dist as te
from te_dist import fsdp2, offload, optim, recipe

if not dist.is_torchelastic_launched():
    raise SystemExit("torchrun has not started this process: torchrun --nproc-per-node 2 examples/fsdp2.py")
device = "cpu"
dist.init_process_group("gloo")
mesh = init_device_mesh(device, (dist.get_world_size(),))
fp8 = recipe.Float8BlockScaling()

with te.quantized_model_init(recipe=fp8, preserve_high_precision_init_val=True), torch.device("meta"):
    blocks = [te.LayerNormMLP(256, 768, normalization="RMSNorm", activation="swiglu", bias=False) for _ in range(4)]
    model = torch.nn.Sequential(*blocks)
for block in model:
    fsdp2.fully_shard(block, mesh=mesh)  # torch's fully_shard; weights are gathered in FP8
fsdp2.fully_shard(model, mesh=mesh)
fsdp2.materialize(model, device=device, seed=0)  # the same model on any number of ranks
optimizer = optim.FusedAdam(model.parameters(), lr=1e-3)

torch.manual_seed(dist.get_rank())
x = torch.randn(64, 256, device=device)
for step in range(20):
    with te.autocast(recipe=fp8), offload.activations(budget="1GiB", min_bytes=0):
        loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
