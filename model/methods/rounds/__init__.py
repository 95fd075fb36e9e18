"""Draft-and-verify rounds: laws of accepted lengths, prices, the walk of many replications at once, and moments.

A round that starts at output position s drafts min(gamma, l - s) tokens, where l is the last position; in a batch that is kept full
it drafts gamma tokens, and those after l are dropped. Position t is tested as the (t - s)-th of its draft. The token at a rejected
position, or after the whole draft, comes from the target; the next round starts after it. The cost of a round depends on its number
of drafted tokens.
"""
