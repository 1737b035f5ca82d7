"""Which cases of long tests scripts/test leaves to scripts/nightly.

A number says how many cases stay, drawn by their names: every other one would be those of one value
of the parameter that changes fastest. Names say which ones leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Final

__all__ = ["LONG", "leaving"]

LONG: Final[Mapping[str, Mapping[str, int | tuple[str, ...]]]] = {
    "attention/test_flashinfer.py": {
        "test_the_same_as_the_reference": 24,
    },
    "batch/test_batch.py": {
        "test_the_command_is_interrupted_and_goes_on": 0,
    },
    "batch/test_engines.py": {
        "test_kills_of_the_command_and_of_an_engine_lose_and_repeat_no_line": 0,
    },
    "bench/test_papers_real.py": {
        "test_every_figure_runs_and_its_file_is_compared": 0,
    },
    "bench/test_peers_benchmark.py": {
        "test_a_file_s_model_has_the_tokens_of_its_dequantized_weights": 0,
        "test_vmserve_and_its_server_alone": 0,
    },
    "bench/test_scripts.py": {
        "test_a_script_measures": 6,
    },
    "chaos/test_chaos.py": {
        "test_an_engine_that_is_killed_and_one_that_hangs": 0,
        "test_ten_times_the_load": 0,
    },
    "chaos/test_commands.py": {
        "test_another_key_chats_on": 0,
        "test_models_that_come_and_go": 0,
        "test_requests_outlive_engines_behind_tcp_or_are_told": 0,
    },
    "chaos/test_models_in_process.py": {
        "test_every_request_gets_an_answer_and_all_memory_comes_back": ("0",),
    },
    "client/test_fleet.py": {
        "test_no_request_is_lost_under_ten_thousand_deaths": 0,
    },
    "client/test_partition.py": {
        "test_an_engine_is_back_when_the_network_is": 1,
        "test_a_cut_while_an_engine_joins_leaves_nothing_half_joined": 1,
    },
    "conformance/test_capabilities.py": {
        "test_calls_in_a_fork_are_refused": 6,
        "test_without_unmap_only_freeing_the_reservation_unmaps": ("uvm",),
    },
    "cuda_kernels/test_attention.py": {
        "test_a_long_sequence_is_split_and_combined": 14,
        "test_a_row_has_the_same_bits_however_it_is_computed": 8,
        "test_ragged_batches_in_both_views": 0,
    },
    "cuda_kernels/test_compile.py": {
        "test_kernels_compile_without_spills": 2,
    },
    "cuda_kernels/test_emulator.py": {
        "test_mistakes_do_not_pass": 3,
    },
    "e2e/test_families.py": {
        "test_torch_shares_prefixes_preempts_and_forks": 3,
    },
    "e2e/test_gguf.py": {
        "test_same_tokens_as_transformers": 0,
    },
    "e2e/test_kinds_in_torch.py": {
        "test_as_transformers_through_a_pool_that_is_short": (
            "gpt-oss-cpu-paged-recompute-208KiB-2",
            "gemma3-sdpa-virtual-swap-288KiB-2",
            "gemma3-reference-paged-swap-288KiB-1",
        ),
    },
    "e2e/test_persist.py": {
        "test_a_batch_reads_what_an_earlier_one_computed": 1,
        "test_every_kind_of_layers_comes_back_after_a_restart": 3,
    },
    "e2e/test_plan_floor.py": {
        "test_the_floor_is_accepted_and_a_byte_less_is_refused": 3,
    },
    "e2e/test_random_lives.py": {
        "test_a_random_life_on_a_device_that_runs_late": 1,
    },
    "e2e/test_regimes.py": {
        "test_beams": 9,
        "test_greedy": 4,
    },
    "e2e/test_same_bits.py": {
        "test_after_a_preemption": 8,
        "test_any_view_and_number_of_threads": 16,
        "test_any_budget": 20,
    },
    "e2e/test_sliding_window.py": {
        "test_layers_with_windows_give_their_past_up_beside_those_without": 1,
    },
    "e2e/test_speculation.py": {
        "test_random_workloads": 2,
    },
    "e2e/test_torch_ranks.py": {
        "test_torchrun_starts_them": 0,
        "test_srun_starts_them_on_two_hosts": 0,
    },
    "engine/test_interrupts.py": {
        "test_an_interrupt_while_an_interrupt_is_handled": 1,
        "test_an_interrupt_anywhere_in_generate": 2,
    },
    "fuzz/test_openapi_cases.py": {
        "test_every_operation_answers_or_explains": 1,
    },
    "memory/test_core_aborts.py": {
        "test_aborts_leave_nothing": 4,
    },
    "memory/test_failures.py": {
        "test_so_does_one_that_one_rank_of_two_refuses": 11,
        "test_a_failed_call_leaves_the_sequences_as_they_were": 44,
    },
    "memory/test_mappings.py": {
        "test_an_engine_at_its_limit_of_mappings_serves_on": 1,
    },
    "models/test_torch_ranks.py": {
        "test_two_hosts": 0,
    },
    "runner/test_async_kinds.py": {
        "test_steps_in_flight": 2,
        "test_too_little_memory": 2,
    },
    "server/test_fields.py": {
        "test_nothing_of_a_client_s_size_is_computed_on_the_event_loop": (
            "EmbeddingRequest.input 1",
            "MessagesRequest.messages 1",
            "messages 5",
            "prompt 3",
            "prompt 5",
            "prompt 6",
            "prompt 7",
            "prompt_logprobs",
            "truncate_prompt_tokens 1",
        ),
    },
    "server/test_fuzz.py": {
        "test_any_body": 1,
    },
    "sim/test_core_on_cuda.py": {
        "test_a_random_life": 30,
    },
    "sim/test_cuda_faults.py": {
        "test_every_call_fails_in_turn": 20,
    },
}


def leaving(rule: int | tuple[str, ...], cases: Iterable[str]) -> set[str]:
    """The cases that do not stay. A test without cases has one, ""."""
    names = list(cases)
    if isinstance(rule, tuple):
        return set(rule) & set(names)
    return set(sorted(names, key=lambda name: sha256(name.encode()).digest())[rule:])
