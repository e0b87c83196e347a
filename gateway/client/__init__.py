"""`kvasir batch` and `kvasir purge`: a running gateway is asked over HTTP, as any client would."""
