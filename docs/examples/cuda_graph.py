"""Trains a wrapped model by one CUDA graph that holds a whole step, and compares the losses with those without one.

python docs/examples/cuda_graph.py; with arguments it times a larger model: SIZE LAYERS SEQUENCES TOKENS
"""

import copy
import statistics
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import liger_dist

SIZE, LAYERS, SEQUENCES, TOKENS = map(int, sys.argv[1:]) if len(sys.argv) > 1 else (64, 2, 2, 32)
if not torch.cuda.is_available():
    print("CUDA graphs need a GPU; this machine has none")
    sys.exit()


def make_training(model):
    """A step on a micro-batch that stays at one address."""
    model = liger_dist.wrap(model, "none")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    ids = torch.zeros(SEQUENCES, TOKENS, dtype=torch.long, device="cuda")

    def step():
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        liger_dist.clip_grad_norm_(model, 1.0)
        optimizer.step()
        return loss.detach()

    return ids, step


def captured(step):
    """A function that replays the step. The warm-up compiles kernels and makes the optimizer's states; it trains."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay():
        graph.replay()
        return loss

    return replay


def milliseconds(step, calls=20):
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128256 if SIZE > 64 else 512,
    hidden_size=SIZE,
    intermediate_size=4 * SIZE,
    num_hidden_layers=LAYERS,
    num_attention_heads=SIZE // 32,
    num_key_value_heads=SIZE // 64,
    tie_word_embeddings=True,
)
dtype, tolerance = (torch.bfloat16, 2e-2) if SIZE > 64 else (torch.float32, 1e-4)
first = LlamaForCausalLM(config).to("cuda", dtype)
second = copy.deepcopy(first)
ids, step = make_training(first)
batches = [torch.randint(config.vocab_size, ids.shape, device="cuda") for _ in range(8)]
ids.copy_(batches[0])
replay = captured(step)
own_ids, own_step = make_training(second)
own_ids.copy_(batches[0])
for _ in range(3):
    own_step()
for batch in batches:
    # New values at the same address; the shape stays.
    ids.copy_(batch)
    own_ids.copy_(batch)
    # Not bit by bit: a captured step computes attention with a dense mask.
    torch.testing.assert_close(replay(), own_step(), rtol=tolerance, atol=0.0)
print("the same losses as without a graph")
print(f"{milliseconds(replay):.2f} ms a step, {milliseconds(own_step):.2f} ms without a graph")
