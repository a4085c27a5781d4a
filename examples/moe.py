"""A mixture of experts with FP8 block weights: `torchrun --nproc-per-node 2 examples/moe.py`, on CPUs as it is.

Experts lie apart on two ranks; everything else, and each rank's experts beyond two ranks, is sharded by FSDP2.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import te_dist as te
from te_dist import fsdp2, optim, recipe
from te_dist.nn.moe import ExpertParallel, MoE, Routing, update_expert_biases

if not dist.is_torchelastic_launched():
    raise SystemExit("torchrun has not started this process: torchrun --nproc-per-node 2 examples/moe.py")
device = "cpu"
dist.init_process_group("gloo")
if dist.get_world_size() % 2:
    raise SystemExit(f"got {dist.get_world_size()} processes, wanted pairs of them: torchrun --nproc-per-node 2")
mesh = init_device_mesh(device, (dist.get_world_size() // 2, 2), mesh_dim_names=("edp", "ep"))
everyone = mesh._flatten("dp")  # tokens differ on every rank
fp8 = recipe.Float8BlockScaling()

routing = Routing(num_experts=8, top_k=2, aux_loss_coefficient=1e-2, bias_update_rate=1e-3)
with te.quantized_model_init(recipe=fp8, preserve_high_precision_init_val=True), torch.device("meta"):
    model = torch.nn.ModuleList(MoE(256, 128, routing) for _ in range(2))
for block in model:
    parallelize_module(block, mesh["ep"], ExpertParallel())
    fsdp2.fully_shard(block.experts, mesh=mesh["edp"])
    fsdp2.fully_shard(block, mesh=everyone)
fsdp2.materialize(model, device=device, seed=0)
optimizer = optim.FusedAdam(model.parameters(), lr=1e-3)

torch.manual_seed(dist.get_rank())
x, y = torch.randn(2, 128, 256, device=device)
for step in range(20):
    with te.autocast(recipe=fp8):
        hidden = x
        for block in model:
            hidden = hidden + block(hidden)
        loss = (hidden - y).square().mean()
    loss.backward()
    update_expert_biases(model)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
