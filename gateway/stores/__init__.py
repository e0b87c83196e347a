"""Bytes by tenant and id, bounded by count, bytes and time: in memory, or in Redis for all gateways."""
