"""A module for ``VERL_USE_EXTERNAL_MODULES``: has verl's program for PPO and GRPO run on CPUs, with transformers'
``generate`` as inference server, because vLLM and SGLang have no build for CPUs here.

verl's configuration asks for it by ``actor_rollout_ref.rollout.name=transformers``. The server has the weights that
verl's engine sends after each step, and draws each answer with a seed of the step and the request.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy
from verl_engines import patch_verl, set_platform

set_platform()

from verl.trainer.ppo.ray_trainer import RayPPOTrainer  # noqa: E402
from verl.utils import distributed  # noqa: E402
from verl.workers.engine.base import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp import transformer_impl  # noqa: E402
from verl.workers.rollout import base, replica  # noqa: E402

NAME = "transformers"


class Server:
    """An actor of Ray that generates for one replica."""

    def __init__(self, folder: str, length: int) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.length, self.step = length, -1

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> replica.TokenOutput:
        """Draws an answer and returns the log-probabilities of its tokens, as vLLM does."""
        # Without an await, so that no other request draws in between.
        torch.manual_seed(zlib.crc32(f"{self.step} {request_id} {prompt_ids}".encode()))
        output = self.model.generate(
            torch.tensor([prompt_ids]),
            do_sample=True,
            temperature=sampling_params["temperature"],
            top_k=0,
            max_new_tokens=self.length,
            return_dict_in_generate=True,
            output_scores=True,
        )
        scores = self.model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
        return replica.TokenOutput(
            token_ids=output.sequences[0, len(prompt_ids) :].tolist(),
            log_probs=scores[0].tolist(),
            stop_reason="completed",
            extra_fields={"global_steps": self.step},
        )

    async def load(self, weights: dict[str, Tensor], step: int) -> None:
        self.model.load_state_dict(weights)
        self.step = step

    async def wake_up(self, **_: Any) -> None:
        """Does nothing: the server keeps its weights."""

    async def sleep(self) -> None:
        """Does nothing: the server keeps its weights."""


class Replica(replica.RolloutReplica):
    """The server of all ranks, beside the workers that train."""

    async def launch_servers(self) -> None:
        config = self.config
        kind = ray.remote(Server).options(name=f"{NAME}_{self.replica_rank}", num_cpus=0, max_concurrency=64)
        self._server_handle = kind.remote(self.model_config.path, config.response_length)
        self._server_address = f"{NAME}:{self.replica_rank}"
        self.servers = [self._server_handle]


class Rollout(base.BaseRollout):
    """The side of the worker: sends the weights of verl's engine to the server."""

    async def resume(self, tags: list[str]) -> None:
        """Does nothing: the server keeps its weights."""

    async def release(self) -> None:
        """Does nothing: the server keeps its weights."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]],
        wire_format: str = "named_tensors",
        *,
        global_steps: int = 0,
        **_: Any,
    ) -> None:
        """Gathers the weights on each rank; rank 0 sends them."""
        full = {name: weight.detach().clone() for name, weight in weights}
        if torch.distributed.get_rank() == 0:
            await asyncio.wrap_future(ray.get_actor(f"{NAME}_0").load.remote(full, global_steps).future())


def note_engines(folder: Path) -> None:
    """Has each process write the classes of the engines that verl makes there."""
    make = EngineRegistry.new

    def new(*args: Any, **kwargs: Any) -> Any:
        engine = make(*args, **kwargs)
        with (folder / f"engines.{os.environ['RANK']}").open("a") as file:
            file.write(f"{type(engine).__qualname__}\n")
        return engine

    EngineRegistry.new = new


def note_batches(folder: Path) -> None:
    """Has the trainer save the batch of each update."""
    update = RayPPOTrainer._update_actor

    def update_actor(self: Any, batch: Any) -> Any:
        torch.save(dict(batch.batch.items()), folder / f"batch.{self.global_steps}")
        return update(self, batch)

    RayPPOTrainer._update_actor = update_actor


patch_verl()
# It asks for a backend of CPUs, and for one of the platform's device.
distributed.get_device_name = lambda: "cuda"
# Pinned memory needs a GPU.
transformer_impl.CPUOffloadPolicy = lambda **_: CPUOffloadPolicy(pin_memory=False)
base._ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.Rollout"
replica.RolloutReplicaRegistry.register(NAME, lambda: Replica)
note_engines(Path(os.environ["RUN_FOLDER"]))
note_batches(Path(os.environ["RUN_FOLDER"]))
