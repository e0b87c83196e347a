"""What each tenant may ask for per minute and at a time, counted in Redis for all gateways, or in memory."""
