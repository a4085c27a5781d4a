"""A mixture of experts with FP8 block weights: `torchrun --nproc-per-node 2 examples/moe.py`, on CPUs as it is.

Experts lie apart on two ranks; everything else, and each rank's experts beyond two ranks, is sharded by FSDP2. Steps
are of several micro batches, clipped; then the model is evaluated, saved and loaded.
"""

import shutil
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import te_dist as te
from te_dist import checkpoints, fsdp2, optim, recipe
from te_dist.nn.moe import ExpertParallel, MoE, Routing, scale_aux_losses, update_expert_biases

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

MICRO_BATCHES, STEPS = 2, 20
scale_aux_losses(model, 1 / MICRO_BATCHES)  # as the loss is
torch.manual_seed(dist.get_rank())
x, y = torch.randn(2, MICRO_BATCHES, 64, 256, device=device)


def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with te.autocast(recipe=fp8):
        for block in model:
            x = x + block(x)
    return (x - y).square().mean()


def evaluate() -> float:
    model.eval()  # routers count nothing
    with torch.no_grad():
        loss = torch.stack([loss_of(*batch) for batch in zip(x, y, strict=True)]).mean()
    model.train()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


for step in range(STEPS):
    for index, batch in enumerate(zip(x, y, strict=True)):
        for block in model:  # gradients are reduced over ranks once, after the last micro batch
            block.set_requires_gradient_sync(index == MICRO_BATCHES - 1)
        (loss_of(*batch) / MICRO_BATCHES).backward()
    optim.clip_grad_norm_(model.parameters(), 1.0)
    update_expert_biases(model)
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 4:
        loss = evaluate()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.4f}")

folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)  # one that all ranks see
before = evaluate()
checkpoints.save(f"{folder[0]}/step_{STEPS}", model=model, optimizer=optimizer, extra={"step": STEPS})
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
checkpoints.load(checkpoints.latest(folder[0]), model=model, optimizer=optimizer)  # on any number of ranks
after = evaluate()
if dist.get_rank() == 0:
    print(f"loss before it was saved {before:.4f}, and after it was loaded {after:.4f}")
    shutil.rmtree(folder[0])
dist.destroy_process_group()
