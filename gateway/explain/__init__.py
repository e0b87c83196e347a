"""Why a request reused less than it might have: two prompts, part by part. Pure."""
