"""Laws of matches and acceptances, the random streams that they are drawn from, and intervals."""
