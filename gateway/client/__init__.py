"""`kvasir batch` and `kvasir purge`: clients of a running gateway over HTTP."""
