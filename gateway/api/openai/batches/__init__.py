"""Batches of the OpenAI API: files of requests, answered when there is room."""
