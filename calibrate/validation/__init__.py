"""Claims about predictions, computed anew, and the page that lists them."""
