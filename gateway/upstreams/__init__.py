"""Hosted and self-hosted APIs behind the gateway. api/passthrough.py asks them; nothing here knows its web server."""
