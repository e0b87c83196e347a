"""What operators see: health, metrics, figures."""
