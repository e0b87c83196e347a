"""Limits of tenants per minute and in flight, counted in Redis for all gateways, or in memory."""
