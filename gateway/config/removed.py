"""Settings that are gone, by section: what holds in their place. Who still sets one is told."""

from __future__ import annotations


def _always(**values: object) -> dict[str, str]:
    return {name: f"always {value}" for name, value in values.items()}


REMOVED_SETTINGS: dict[str, dict[str, str]] = {
    "server": _always(max_json_depth=128, body_timeout_s=60, max_attempts=3, max_prompts=256, prompts_at_once=16),
    "logs": _always(delay_s=0.1, max_lines=20_000, max_bytes="16 MiB", max_alike=60, close_s=1),
    "redis": _always(retry_s=1),
    "engines": _always(connect_timeout_s=5, reconnect_max_s=5, stats_timeout_s=0.5, buffer_updates=65_536),
    "engine": _always(
        copy_queue_bytes="16 MiB",
        max_waiting=4096,
        batch_step_tokens=256,
        prefill_grid_tokens=256,
        grammar_cache=64,
        heartbeat_s=2,
        lease_s=10,
        max_leases=4096,
        send_buffer_bytes="16 MiB",
    ),
    "prompt": _always(thread_chars=20_000)
    | dict.fromkeys(("segment_memo_bytes", "chain_memo_bytes", "prompt_memo_bytes"), "see prompt.memo_bytes"),
    "routing": _always(prefill_weight=4, prefill_tokens_per_s=1000, max_backlog_s=0.5),
    "queue": _always(tier_s=1, aging=0.05, overload_share=0.4, overload_aging=0.015),
    "limits": _always(assumed_completion_tokens=256, lease_s=60),
    "anthropic": {"min_cache_tokens_of": "anthropic.min_cache_tokens is for all models"}
    | _always(lookback_blocks=20, diagnostics_ttl_s=3600, diagnostics_max_prompts=10000, diagnostics_max_bytes="8 MiB"),
    "gemini": _always(min_ttl="1s", max_contents=1000, max_content_bytes="8 MiB"),
    "stored_responses": _always(max_responses=10_000, max_response_bytes="8 MiB", max_background=256),
    "files": _always(min_free_bytes="256 MiB", max_uploads=64, max_uploads_per_tenant=16, sweep_s=60),
    "batches": _always(
        max_embedding_inputs=50_000,
        max_answer_bytes="32 MiB",
        poll_s=1,
        redis_timeout_s=5,
        max_kept=10_000,
        min_free_bytes="256 MiB",
    ),
    "embeddings": _always(
        batch_tokens=512,
        thread_chars=2000,
        max_inputs=2048,
        max_input_chars=100_000,
        max_request_tokens=300_000,
        max_waiting_tokens=1_000_000,
        max_waiting_tokens_per_tenant=500_000,
    ),
    "ledger": _always(max_rows=10_000),
    "response_cache": _always(max_entry_bytes="1 MiB", memory_s=60, removals_s=1, max_flight_bytes="8 MiB"),
    "semantic_cache": _always(
        max_audits=4,
        max_judging=64,
        max_text_tokens=256,
        max_text_chars=4000,
        max_models=64,
        max_entries=100_000,
        max_scope_entries=20_000,
        max_bytes="1 GiB",
        sync_s=1,
    ),
    "upstreams": _always(
        max_hints=100_000, list_every_s=300, max_listed=1000, max_error_bytes="1 MiB", max_metered_bytes="4 MiB"
    ),
}
