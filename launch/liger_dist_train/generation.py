"""Lets an exported model go on with a text, or answer in a chat, by transformers alone:

liger-dist generate runs/train/exported "def "
liger-dist generate runs/train/exported "What is a token?" --chat
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def main(arguments: list[str]) -> None:
    """Runs ``liger-dist generate``."""
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="liger-dist generate", description=__doc__, formatter_class=how)
    parser.add_argument("folder", help="what liger-dist export wrote")
    parser.add_argument("prompt", help="text to continue, or what the user says")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the tokenizer's chat template")
    parser.add_argument("--tokens", type=int, default=80, help="new ones, at most; default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the likeliest token; default: 0")
    options = parser.parse_args(arguments)
    if not (Path(options.folder) / "config.json").is_file():
        parser.error(f"{options.folder} has no config.json; expected a folder that liger-dist export wrote")
    if not options.prompt or options.tokens < 1:
        parser.error(f"expected a prompt and --tokens of 1 or more, got {options.prompt!r} and {options.tokens}")
    if not 0 <= options.temperature < math.inf:
        parser.error(f"--temperature is {options.temperature}; expected a finite number, 0 or more")
    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    model = AutoModelForCausalLM.from_pretrained(options.folder)
    text = options.prompt
    if options.chat:
        turns = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(text, add_special_tokens=not options.chat, return_tensors="pt")
    torch.manual_seed(0)
    # Of the folder's settings those that end an answer: a chat model's would draw, or penalize what is likely.
    ends = {name: getattr(model.generation_config, name) for name in ("eos_token_id", "pad_token_id", "bos_token_id")}
    draws = {"do_sample": True, "temperature": options.temperature, "top_k": 50} if options.temperature else {}
    model.generation_config = GenerationConfig(max_new_tokens=options.tokens, **ends, **draws)
    ids = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"])
    new = ids[0, inputs["input_ids"].shape[1] :]
    answer = tokenizer.decode(new, skip_special_tokens=True)
    print(answer if options.chat else options.prompt + answer)
