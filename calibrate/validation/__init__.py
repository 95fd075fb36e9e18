"""Claims about the accuracy of predictions, recomputed from data, and the page that lists them."""
