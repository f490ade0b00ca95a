"""Tests that repeat another one with a detail changed: ``make test-all`` runs them, ``make test`` does not.

By file and test: a regular expression that matches the whole id of the parameters that are left out; None for the whole
test. README.md has the main groups. Cells of the conformance suite are in repeated_cells.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

REPEATED: dict[str, dict[str, str | None]] = {
    "test_calls": {"test_compiling_a_model_with_its_own_cross_entropy": "eager"},
    "test_calls_without_gradients": {
        "test_calls_without_gradients_change_no_training_step": ".*-tied|(replicas|vocab_parallel w.*)-untied"
    },
    "test_causal_convolution": {"test_causal_convolutions": r"\(2, 70, 65\)-torch.float32-triton"},
    "test_checkpoints": {
        "test_a_damaged_checkpoint_is_passed_over": "(zeros|swapped)-.*",
        "test_tied_weights_are_read_by_every_strategy": "ddp|fsdp1",
    },
    "test_collectives": {
        "test_the_loss_adds_no_collective_to_the_engine": ".*(stage [012]|head alone|flat parameters).*",
        "test_a_global_mean_adds_one": ".*(head alone|flat parameters|head in the root).*",
    },
    "test_cross_entropy": {
        "test_every_option_matches_fp64_and_leaves_the_logits_alone": "(softcap|token weight|scale)-triton",
        "test_statistics_of_slices_make_those_of_whole_rows": ".*-0.1-triton",
    },
    "test_custom_forwards": {
        "test_a_compiled_forward_reads_the_sizes_of_its_logits": "times all logits|times the picked",
    },
    "test_dataset": {
        "test_a_killed_run_keeps_its_finished_shards": None,
        "test_counts_agree_with_an_independent_count": "1",
        "test_weights_of_a_stream_are_shares_of_the_tokens": r"\(0.[25], 0.[58]\)",
        "test_processes_that_tokenise_end_with_their_parent": None,
    },
    "test_deepspeed_plugin": {"test_only_the_configuration_changes": "[12]"},
    "test_docs": {"test_commands_run": "docs/distillation.md"},
    "test_distillation": {
        "test_every_pair_of_layouts": "(?!ZeRO-3-FSDP2$|FSDP2-ZeRO-3|TP-plain|FSDP1-FSDP1|FSDP2, vocab-parallel-).*",
        "test_four_ranks": "FSDP2-FSDP2|ZeRO-3-.*|FSDP2-ZeRO-3",
        "test_models_and_steps": ".*-(FSDP1|FSDP2|TP)",
        "test_16_bits": "(jsd-torch.float32|reverse_kl-None)-triton",
        "test_the_op": "(30|41)-.*",
        "test_every_divergence": "(FSDP2|ZeRO-3)-.*",
    },
    "test_engines": {
        "test_every_strategy_draws_the_same_curve": "zero1|zero2|zero3_offload|hsdp|sp",
        "test_a_checkpoint_of_four_ranks_goes_on_elsewhere": "fsdp1|ddp|tp",
        "test_grids_draw_the_same_curve": ".*dp_replicate.*",
        "test_ranks_of_one_group_read_what_one_process_reads": "63-.*|64-sp",
    },
    "test_extreme_logits": {
        "test_cross_entropy_of_extreme_logits": "torch.float32-triton-.*|torch.bfloat16-triton-(?!first lanes).*",
        "test_divergences_of_extreme_logits": "torch.float32-triton-.*|torch.bfloat16-triton-.*_kl",
        "test_linear_cross_entropy_with_an_extreme_bias": "torch.float32-triton-.*",
    },
    "test_float8": {
        "test_compiled_layers": "tensorwise",
        "test_compiled_layers_keep_no_float8_weights": None,
        "test_gradients_are_those_of_torchao_unwrapped": "(three ranks|no reshard|HSDP)-rowwise",
    },
    "test_full_disk": {"test_a_disk_that_is_full_for_one_rank": "zero3", "test_a_full_disk_is_one_sentence": "True"},
    "test_interoperability": {"test_compiling_the_whole_model_keeps_the_gradients": "eager"},
    "test_gated_norm": {"test_gated_norms": r"\(5, 3000\)-torch.float(64|32)-triton"},
    "test_hybrids": {
        "test_documents_are_apart_in_every_layout": ".*: (falcon_h1|mamba2|granitemoehybrid|lfm2)(?!.*FSDP2).*"
    },
    "test_launchers": {"test_the_deepspeed_launcher_with_only_the_json_changed": None},
    "test_layer_kernels": {
        "test_a_norm_of_wide_rows": "20000-.*",
        "test_rotary": ".*-torch.(float64|float32)-triton",
    },
    "test_linear_cross_entropy": {
        "test_every_vocabulary_matches_fp64": "(64|65|1001)-triton-.*|(2|127)-triton-torch.float.*"
    },
    "test_long_documents": {
        "test_a_long_text_file_is_one_document_of_a_stream": "1000-.*",
        "test_a_long_text_file_is_one_document_in_the_cache": "0.05",
    },
    "test_lora_runs": {
        "test_lora_fsdp2_losses_are_those_of_one_process": "dora",
        "test_lora_fsdp2_holds_no_full_base": ".*-dora",
    },
    "test_openrlhf": {
        "test_openrlhf_updates_equal_those_without_the_plug": (
            "llama, ZeRO-3|no temperature|packed, ZeRO-2|LoRA, ZeRO-2|granite scale, ZeRO-3"
        ),
        "test_openrlhf_workers_of_ray_make_fused_policies": "program1-.*",
    },
    "test_options": {
        "test_a_streamed_run_goes_on_exactly_or_is_refused": "1",
        "test_states_of_eight_bits": "none",
        "test_states_of_eight_bits_resume": None,
    },
    "test_policy_outputs": {
        "test_outputs_and_their_gradients": "temperatures-.*-triton",
        "test_fp32_logits_of_16_bit_operands": ".*-torch.float16-triton",
        "test_log_probs_of_fp32_logits": "temperatures-triton",
    },
    "test_public_reports": {"test_the_report_on_one_process": None},
    "test_registers": {"test_some_launches_spill_nothing": "(tile|divergence).*"},
    "test_restarts": {"test_layers_that_are_compiled": "ddp"},
    "test_run_features": {
        "test_steps_with_nan_are_skipped_and_counted": "fsdp1|ddp|none",
        "test_prompts_are_continued_as_the_exported_model_does": "fsdp1",
        "test_muon_trains_and_resumes_exactly": "none",
    },
    "test_scoring": {"test_every_strategy_draws_the_same_curve": "fsdp1|vocab_parallel|weighted stream"},
    "test_sequence_parallel": {"test_options": "compiled layers"},
    "test_sharded_by_transformers": {
        "test_a_trainer": "fsdp, untied|tp, untied|ep.*",
        "test_a_training_loop": "hsdp, untied|fsdp x tp, (un)?tied|fsdp, untied|tp, ep, untied|fsdp, ep, tied",
    },
    "test_sharded_peft": {
        "test_prompts_are_averaged_in_every_layout": "tied",
        "test_prompts_generate_under_fsdp2_as_alone": "tied",
    },
    "test_soft_labels": {
        "test_loss_and_gradients": "(mixed|renormalize|drop)-.*-triton",
        "test_given_logits": "(mixed|renormalize|drop)-triton",
    },
    "test_steps": {"test_accumulation_holds_sharded_gradients_alone": "fsdp1"},
    "test_signals": {"test_a_micro_batch_that_takes_longer_than_the_grace": ".*"},
    "test_stuck_ranks": {"test_a_frozen_rank_is_named": None, "test_two_nodes_survive_a_killed_worker": None},
    "test_train": {
        "test_fused_and_unfused_losses_agree_at_every_step": "ddp-.*",
        "test_long_sequences_with_tiles_and_offloaded_checkpoints": "fsdp1",
    },
    "test_train_with_teacher": {"test_every_strategy_draws_the_same_curve": "fsdp1|tp|ddp|vocab_parallel"},
    "test_trainer": {
        "test_a_trainer_trains_and_evaluates_as_before": "zero2-.*|(ddp|fsdp1)-gather-wrapped first",
    },
    "test_trl": {
        "test_one_process": "RLOO|OnlineDPO|GRPO with an fp32 head",
        "test_two_processes": "KTO-fsdp2|RLOO-fsdp2|SFT padding-free-zero3|SFT-zero3|SFT-fsdp2|DPO-fsdp2|SFT-ddp",
        "test_distillation_in_two_processes": "Distillation-(ddp|zero3)|GKD-zero3|GOLD-.*",
        "test_wrapped_first_in_two_processes": "GRPO.*|DPO-fsdp2|CPO-fsdp2|OnlineDPO-fsdp2|SFT-ddp",
        "test_wrapped_first": "RLOO.*|GRPO with.*|DPO weighted|SFT (by dft|packed|padding-free)|CPO|KTO",
    },
    "test_verl": {
        "test_verl_updates_equal_those_without_the_plug": (
            "one temperature|no temperature|log-probabilities alone|one micro-batch|padded|padded to a bucket|"
            "checkpointed|LoRA|qwen3_moe|distillation in chunks|distillation alone|Ulysses|reduced each micro-batch|"
            "FSDP1, distillation|SFT"
        ),
        "test_verl_loads_the_plug_by_its_environment_variable": "program[123]-.*",
        "test_errors_of_verl_that_the_page_lists": None,
    },
    "test_verify": {
        "test_it_finds_nothing_in_what_is_right_and_leaves_no_trace": (
            "ZeRO, stage [012] on 2|FSDP2, by wrap, vocab-parallel head, H.*|(FSDP2, head alone|FSDP1, head in its).*"
        ),
    },
    "test_vision_language": {
        "test_gradients_are_those_of_all_ranks_data": (
            "(?!FSDP2, by wrap on 2|ZeRO, stage 3 on 2: llava|FSDP2, by wrap, HSDP).*"
        ),
    },
    "test_vocab_parallel_head": {"test_it_trains_as_the_gathered_head_does": "tied"},
    "test_vocab_parallel_loss": {
        "test_equals_full_logits": ".*-3-triton",
        "test_a_compiled_loss_of_row_shards_reads_all_rows": "none",
    },
}


def missing_tests(folder: Path) -> list[str]:
    """Lists tests of :data:`REPEATED` that no file below ``folder`` has any more."""
    texts = {path.stem: path.read_text() for path in folder.rglob("test_*.py")}
    return [
        f"{file}::{name}"
        for file, tests in REPEATED.items()
        for name in tests
        if f"def {name}(" not in texts.get(file, "")
    ]


def mark_repeated(items: list[pytest.Item]) -> None:
    """Marks the tests of :data:`REPEATED` slow.

    Raises:
        pytest.UsageError: an entry that matches no parameters of its test, which has changed.
    """
    found: defaultdict[tuple[str, str], list[bool]] = defaultdict(list)
    for item in items:
        name, _, parameters = item.name.partition("[")
        tests = REPEATED.get(item.path.stem, {})
        if name not in tests:
            continue
        pattern = tests[name]
        is_repeated = pattern is None or re.fullmatch(pattern, parameters.removesuffix("]")) is not None
        found[item.path.stem, name].append(is_repeated)
        if is_repeated:
            item.add_marker(pytest.mark.slow)
    for (file, name), matches in found.items():
        if len(matches) > 1 and not any(matches):
            raise pytest.UsageError(f"repeated.py: {file} has no {name}[{REPEATED[file][name]}]")
