"""A family of small real models for everyone: trained here, on the text of the Python standard library."""
