"""Trains a wrapped model by one CUDA graph that holds a whole step, and compares the losses with those without one.

python docs/examples/cuda_graph.py; with arguments it times a larger model, under torchrun also a sharded one:

torchrun --nproc-per-node 2 docs/examples/cuda_graph.py fsdp2 SIZE LAYERS SEQUENCES TOKENS

A strategy that ends in ``+lora`` trains LoRA layers of PEFT: none+lora.
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import liger_dist

way, *sizes = sys.argv[1:] if len(sys.argv) > 1 else ["none"]
STRATEGY, HAS_LORA = way.removesuffix("+lora"), way.endswith("+lora")
SIZE, LAYERS, SEQUENCES, TOKENS = map(int, sizes) if sizes else (64, 2, 2, 32)
WARM_UP = 11
"""steps; DDP looks at the first ten"""
if not torch.cuda.is_available():
    print("CUDA graphs need a GPU; this machine has none")
    sys.exit()
torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
if "RANK" in os.environ:
    dist.init_process_group("nccl")
rank = dist.get_rank() if dist.is_initialized() else 0
config = LlamaConfig(
    vocab_size=128256 if SIZE > 64 else 512,
    hidden_size=SIZE,
    intermediate_size=4 * SIZE,
    num_hidden_layers=LAYERS,
    num_attention_heads=SIZE // 32,
    num_key_value_heads=SIZE // 64,
    tie_word_embeddings=True,
)
dtype, tolerance = (torch.bfloat16, 1e-2) if SIZE > 64 else (torch.float32, 1e-5)


def make_training():
    """A step on a micro-batch that stays at one address."""
    torch.manual_seed(0)
    # FSDP2 has weights and states of the optimizer in fp32, and computes in 16 bits.
    weights = torch.float32 if STRATEGY == "fsdp2" else dtype
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(weights)
    if HAS_LORA:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    model = liger_dist.wrap(model, liger_dist.FSDP2(param_dtype=dtype) if STRATEGY == "fsdp2" else STRATEGY)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True, capturable=True)
    ids = torch.zeros(SEQUENCES, TOKENS, dtype=torch.long, device="cuda")

    def step():
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        liger_dist.clip_grad_norm_(model, 1.0)
        optimizer.step()
        return loss.detach()

    return ids, step


def milliseconds(step, calls=20):
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


generator = torch.Generator("cuda").manual_seed(rank)
shape = SEQUENCES, TOKENS
batches = [torch.randint(config.vocab_size, shape, device="cuda", generator=generator) for _ in range(8)]

# The model is made, warmed up and captured on one stream. The warm-up compiles the kernels and makes the optimizer's
# states; it trains.
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    ids, step = make_training()
    ids.copy_(batches[0])
    for _ in range(WARM_UP):
        step()
stream.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
    loss = step()

own_ids, own_step = make_training()
own_ids.copy_(batches[0])
for _ in range(WARM_UP):
    own_step()
for batch in batches:
    # New values at the same address; the shape stays.
    ids.copy_(batch)
    own_ids.copy_(batch)
    graph.replay()
    torch.testing.assert_close(loss, own_step(), rtol=tolerance, atol=0.0)
times = milliseconds(graph.replay), milliseconds(own_step)
if rank == 0:
    print("the same losses as without a graph")
    print(f"{way}: {times[0]:.2f} ms a step, {times[1]:.2f} ms without a graph")
# The process group may not be destroyed while a graph holds its collectives.
torch.cuda.synchronize()
del graph
if dist.is_initialized():
    dist.destroy_process_group()
