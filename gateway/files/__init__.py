"""Files that tenants upload: bytes on disk, until a time."""
