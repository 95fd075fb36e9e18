"""Serving under load: prices of ragged engine steps, the scheduler, policies of draft length, closed forms."""
