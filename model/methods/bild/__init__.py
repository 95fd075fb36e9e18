"""Big Little Decoder."""
