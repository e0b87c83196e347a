"""Hosted and self-hosted APIs behind the gateway, called by api/passthrough.py. Knows nothing of the web server."""
