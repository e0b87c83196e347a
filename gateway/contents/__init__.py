"""Cached contents: what clients have the gateway keep until a time, in memory and in Redis."""
