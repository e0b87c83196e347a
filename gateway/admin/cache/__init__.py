"""/admin/cache: remembered answers are listed, looked at and removed."""
