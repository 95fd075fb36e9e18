"""What a simulated server did: its requests, its steps, and figures of both."""
