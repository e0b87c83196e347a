"""The Responses API of OpenAI: items in, items out, and responses that are kept for the next request."""
