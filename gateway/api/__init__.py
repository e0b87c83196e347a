"""HTTP: wire JSON into Requests, events back into wire JSON or SSE. One folder per dialect."""
