"""Limits and budgets of tenants and of their keys, counted in Redis for all gateways, or in memory."""
