"""Tenants and keys that admins make while the gateway runs."""
