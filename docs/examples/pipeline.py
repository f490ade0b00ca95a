"""A pipeline of two stages, each sharded over half of the ranks by FSDP2, beside the uncut model on each rank.

torchrun --standalone --nproc-per-node 4 docs/examples/pipeline.py
"""

import copy
import os

import torch
import torch.distributed as dist
from tiny import Sequences, make_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import liger_dist

STAGES, MICRO_BATCHES, ROWS, STEPS = 2, 4, 8, 4

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()
data_ranks = dist.get_world_size() // STAGES
mesh = init_device_mesh(device.type, (STAGES, data_ranks), mesh_dim_names=("pp", "dp"))
index, data_rank = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()

uncut = make_model()
stage = liger_dist.pipeline_stage(copy.deepcopy(uncut), index, STAGES)  # layers are divided evenly
uncut.to(device)
config = liger_dist.WrapConfig(token_mean="global")  # one mean over the labels of all data-parallel ranks
stage = liger_dist.wrap(stage, liger_dist.FSDP2(mesh=mesh["dp"]), config=config)
schedule = Schedule1F1B(
    PipelineStage(stage, index, STAGES, device, group=mesh.get_group("pp")),
    MICRO_BATCHES,
    loss_fn=liger_dist.pipeline_loss,
    scale_grads=False,
)
optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
reference = torch.optim.AdamW(uncut.parameters(), lr=1e-3)


def batch_of(step: int, rank: int) -> dict[str, torch.Tensor]:
    """All ranks of a pipeline read the same rows; micro-batches have different numbers of labels."""
    first = (step * data_ranks + rank) * ROWS
    data = Sequences()
    batch = {name: torch.stack([data[first + row][name] for row in range(ROWS)]).to(device) for name in data[0]}
    for row in range(ROWS):
        batch["labels"][row, : 1 + 3 * row + rank] = -100
    return batch


for step in range(STEPS):
    loss = liger_dist.pipeline_step(schedule, **batch_of(step, data_rank))  # forward and backward
    liger_dist.clip_grad_norm_(stage.parameters(), 1.0, group=mesh.get_group("pp"))
    optimizer.step()
    optimizer.zero_grad()

    batches = [batch_of(step, rank) for rank in range(data_ranks)]
    true_loss = uncut(**{name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}).loss
    true_loss.backward()
    torch.nn.utils.clip_grad_norm_(uncut.parameters(), 1.0)
    reference.step()
    reference.zero_grad()
    total = torch.zeros((), device=device) if loss is None else loss / data_ranks  # None before the last stage
    dist.all_reduce(total)
    torch.testing.assert_close(total, true_loss.detach(), rtol=1e-4, atol=0.0)
    if dist.get_rank() == 0:
        print(f"step {step}: loss {total.item():.5f}, of the uncut model {true_loss.item():.5f}", flush=True)
dist.barrier()
dist.destroy_process_group()
