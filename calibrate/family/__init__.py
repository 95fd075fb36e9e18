"""A family of small real models that everybody can have: trained here, on the standard library's own text."""
