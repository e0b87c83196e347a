"""Bytes that outlive a request, calls of Redis, and the circuit breaker of Redis."""
