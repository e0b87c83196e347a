"""Settings that are gone, by section: what holds in their place. Who still sets one is told."""

REMOVED_SETTINGS = {
    "server": {
        "max_json_depth": "always 128",
        "body_timeout_s": "always 60",
        "max_attempts": "always 3",
        "max_prompts": "always 256",
        "prompts_at_once": "always 16",
    },
    "logs": {
        "delay_s": "always 0.1",
        "max_lines": "always 20000",
        "max_bytes": "always 16777216",
        "max_alike": "always 60",
        "close_s": "always 1",
    },
    "redis": {"retry_s": "always 1"},
    "engines": {
        "connect_timeout_s": "always 5",
        "reconnect_max_s": "always 5",
        "stats_timeout_s": "always 0.5",
        "buffer_updates": "always 65536",
    },
}
