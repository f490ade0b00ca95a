"""Texts of sections of the benchmarks page."""

OVERVIEW = """## Overview

Measured on CAPTION. Time and peak memory of a step with liger_dist, divided by those of another library in the same
table of this page; below 1 is better. liger_dist has default options, and compiled layers where the other libraries
have them.

- `time`, `memory`: to the fastest row of another library that computes the same. An empty cell was not measured.
- `memory, to the leanest`: to the row that needs least memory, where it is another one. `one by one` is a call for each
  document, so it needs less memory than a packed row, and more time.
- †: memory above the weights. The other rows include the weights.
- Rows in which the documents of a packed row read each other compute something else, and are left out.

![Time and peak memory of every workload, divided by those of the best other library](plots/overview.png)
"""

HYBRIDS = """## Hybrid models: packed documents

Forward and backward of eight layers of the shape of Qwen3.5-4B with its lm_head, bf16, on one GPU: 8192 tokens in 12
documents. `documents mix`: the time of a wrong result, because the recurrent layers of transformers read the documents
before. `one by one`: a call for each document. `in rows`: one row for each document, where the others read lengths.
With fla the delta rule is that of flash-linear-attention, otherwise torch's fallback in transformers. The convolution
is that of transformers, for liger_dist with fla a kernel. Memory is the peak of a step above the weights, their
gradients included. Without fla the padded rows do not fit.

![Milliseconds and memory of every way](plots/hybrids.png)
"""
PACKED = """## Packed documents, by attention

Forward and backward of four layers of each shape with its lm_head, random weights in bf16, on one GPU: 8192 tokens in
12 documents of 402 to 1010 tokens. `padded rows`: each document in a row, padded to the longest. `a dense mask`:
`WrapConfig(varlen_attention=False)`, with the model's own attention. transformers separates documents of a packed row
by positions in Llama's mask and not in the others', where it has no row. Memory is the peak of a step above the
weights, their gradients included. [Packed sequences](packing.md) says how documents are kept apart.

![Milliseconds and memory of every way](plots/packed_documents.png)
"""
ADAPTERS = """## Adapters: LoRA and QLoRA

Steps of LoRA (rank 16 on all linear layers of the decoder) on 32 layers of the shape of Llama 8B, bf16, 2 x 2048 tokens
on each GPU, without activation checkpointing; PEFT 0.21.2, bitsandbytes 0.50.2. 4 bits: nf4 with double quantization.
`replicated`: every rank has the full frozen weights, and the LoRA layers are in one group; `per layer` in one group for
each layer. `GPU busy`: at least one kernel runs. `peak GiB` includes the weights. [Adapters on several
GPUs](adapters.md) says which way to use.

![Milliseconds and memory of every way](plots/adapters.png)
"""
EXPERTS = """## Mixtures of experts

Forward and backward of four layers of released shapes, with their lm_head, random weights in bf16, 8192 tokens, without
an optimizer; and of one layer's experts. `before`: this library with transformers' experts by `grouped_mm`. `kept MiB`:
what the experts' forward keeps for the backward. `GiB`: peak memory above the weights. LoRA has rank 16, on the
projections of attention (`of without`) and on experts too. Where layers are compiled with flex_attention, they are
compiled anew in some calls, until torch gives up; the eager function of attention takes most of its steps. ScatterMoE
and SonicMoE could not be installed beside this torch. [Mixtures of experts](experts.md) explains what is computed.

![Milliseconds and memory of every way](plots/experts.png)
"""
MTP = """## Multi-token prediction

Forward and backward of Llama-3.2-1B's shape (tied, random weights in bf16), 2 x 4096 tokens, without an optimizer.
`full logits`: the same model and layers, with torch's cross entropy of full logits for each loss. `no losses`: without
lm_head and losses; `losses MiB` is the peak above it. `layer and loss`: time of a decoder layer and of a loss, and
`ratio` that of a depth to it. [Multi-token prediction](mtp.md) explains the rest.

![Time and memory of every depth](plots/mtp.png)
"""

DRAFTS = """
## Draft heads

`python -m benchmarks.draft_heads`: forward and backward of a divergence between a draft's lm_head of C classes and C
rows of its target's lm_head, for T tokens of all depths: T x hidden size x C x vocabulary of the target. Bare GEMMs are
the draft's three products and the target's logits of C classes. "torch" are losses of full logits with softmaxes in
fp32, as trainers of drafts write them: from all logits of the target, of which the draft's are taken (SpecForge), or
from a copy of its selected rows (speculators). Extra is the peak memory of a call beyond what was allocated before it.
"""
