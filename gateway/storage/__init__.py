"""What a gateway keeps outside of a request: how Redis is asked, and whether it is reachable."""
