"""Steps, laws and bounds that methods share which draft and verify concurrently, on separate units."""
