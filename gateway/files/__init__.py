"""Files that tenants upload, and that batches make: bytes on disk, until a time."""
