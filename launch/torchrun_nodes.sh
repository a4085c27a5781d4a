#!/usr/bin/env bash
# Starts a job on several nodes: run the same line on every node. The first host name is the meeting point.
#
#     NODES=2 HEAD=node-0 launch/torchrun_nodes.sh launch/configs/llama_8gpu.toml --run-dir /shared/runs/llama \
#         --data.files '/shared/text/**/*.txt'
set -euo pipefail

# In a store that all attempts share, processes that are started again (RESTARTS) would find what those before them
# left, and a node on which this line is run anew would wait in vain for the address of rank 0, written there only once.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun \
    --nnodes "${NODES:?number of nodes}" \
    --nproc-per-node "${PROCESSES:-gpu}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${HEAD:?host name of the first node}:${PORT:-29500}" \
    --rdzv-id "${JOB:-te_dist}" \
    --max-restarts "${RESTARTS:-0}" \
    -m te_dist.launch.train "$@"
