"""Message batches of the Anthropic API: many messages in one request, answered when there is room."""
